"""Says which op of the model torch's exporter can't translate, where it is, and what to use.

The exporter's own text names its node of the decomposed program (``%bessel_i0``) and no line of
the model. The node itself is in the exporter's frames, so it is taken from the traceback: it knows
the op that the model calls and the line (torch 2.13; `from_node` and `stack_trace`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ExportError, first_line

_OUTSIDE = "compute it before or after the engine, and pass its result as an input"
_RANDOM = (
    "pass the random numbers as an input; if forward makes a layer, make it in __init__, with its "
    "final weights"
)
# by the name of torch's op, without its overload; every advice that is code is tried in the tests
_INSTEAD: dict[str, str] = {
    "aten._linalg_eigh": _OUTSIDE,
    "aten._linalg_svd": _OUTSIDE,
    "aten.linalg_cholesky_ex": _OUTSIDE,
    "aten.linalg_eig": _OUTSIDE,
    "aten.linalg_eigh": _OUTSIDE,
    "aten.linalg_eigvals": _OUTSIDE,
    "aten.linalg_lu_factor_ex": "use torch.linalg.solve for 4x4 or smaller; otherwise " + _OUTSIDE,
    "aten.linalg_matrix_exp": _OUTSIDE,
    "aten.linalg_pinv": "use torch.linalg.inv(a.mT @ a) @ a.mT if a has 4 columns or fewer and "
    "full rank; otherwise " + _OUTSIDE,
    "aten.linalg_qr": _OUTSIDE,
    "aten.linalg_solve_triangular": "use torch.linalg.solve for 4x4 or smaller; otherwise "
    + _OUTSIDE,
    "and_": "for a size, use n % 2**k in place of n & (2**k - 1)",
    "lshift": "for a size, use n * 2**k in place of n << k",
    "rshift": "for a size, use n // 2**k in place of n >> k",
    "aten.kthvalue": "use torch.topk(x, k, dim, largest=False), and take its last value",
    "aten.nanmedian": "replace the NaNs (torch.nan_to_num), and use median",
    "aten.bernoulli": _RANDOM,
    "aten.multinomial": _RANDOM,
    "aten.normal_functional": _RANDOM,
    "aten.poisson": _RANDOM,
    "aten.randperm": _RANDOM,
    "aten.normal_": _RANDOM,
    "aten.uniform_": _RANDOM,
    "prims.normal": _RANDOM,
    "prims.uniform": _RANDOM,
}
_PARAMETRIZED = (
    "keep the weight that the parametrization makes: "
    "torch.nn.utils.parametrize.remove_parametrizations(module, name) before the conversion"
)
_PARAMETRIZATIONS = f"{Path('torch/nn/utils/parametrizations.py')}:"
_NO_TRANSLATION = "it has no translation to ONNX"
_ELSE = "write this step with other ops, or end the model before it and do the rest outside"


def refusal(error: BaseException) -> ExportError | None:
    """The refusal of the op at which torch.onnx.export failed; None if it failed elsewhere.

    Args:
        error: the exporter's exception. Its cause may be an ExportError of our translation.
    """
    chain = _chain(error)
    cause = chain[-1]
    node = next(_nodes(chain), None)
    if node is None:
        return cause if isinstance(cause, ExportError) else None
    called, place = _called(node), line_of(node)
    at = f" at {place}" if place else ""
    if isinstance(cause, ExportError):
        what = f"{called}: {cause}"
        return ExportError(f"{called}{at}: {cause}", detail=cause.detail, line=place, what=what)
    others = tuple(_refused(other, _NO_TRANSLATION) for other in _without_translation(chain, node))
    if isinstance(cause, torch.onnx.errors.OnnxExporterError):  # no function for the op
        return _refused(node, _NO_TRANSLATION, detail=str(error), others=others)
    if sizes := _symbolic_options(node):
        why = f"ONNX needs a number for {', '.join(sizes)}, which here follows a size"
        first = f"make {', '.join(sizes)} a number, or "
    else:
        why = f"torch's exporter can't translate it: {first_line(cause, repr(cause))}"
        first = ""
    return _refused(node, why, first, detail=str(error), others=others)


def _refused(
    node: torch.fx.Node,
    why: str,
    first: str = "",
    *,
    detail: str = "",
    others: tuple[ExportError, ...] = (),
) -> ExportError:
    """The refusal of a node, with advice that begins with `first`."""
    called, place = _called(node), line_of(node)
    at = f" at {place}" if place else ""
    names = _name(node.target), called
    instead = first + next((_INSTEAD[n] for n in names if n in _INSTEAD), _ELSE)
    if _PARAMETRIZATIONS in place:
        instead = _PARAMETRIZED
    text = f"can't be exported: {why}"
    return ExportError(
        f"{called}{at} {text}",
        detail=detail,
        line=place,
        what=f"{called} {text}",
        do=instead,
        others=others,
    )


def _without_translation(
    chain: Sequence[BaseException], failed: torch.fx.Node
) -> Iterator[torch.fx.Node]:
    """The other nodes whose op the exporter's table lacks: one for each op and line of the model.

    The exporter stops at the first one. Its table is in its frames, as the node is.
    """
    table: Any = next(_in_frames(chain, "registry"), None)
    seen = {(_called(failed), line_of(failed))}
    for node in failed.graph.nodes if table is not None else ():
        found = _called(node), line_of(node)
        unknown = isinstance(node.target, torch._ops.OpOverload) and not table.is_registered(
            node.target
        )
        if unknown and found not in seen:
            seen.add(found)
            yield node


class _Following(torch.fx.Interpreter):
    """Runs a graph node by node, and knows the node that runs."""

    at: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self.at = n
        return super().run_node(n)


def not_run(
    graph: torch.fx.GraphModule, args: Sequence[torch.Tensor], error: Exception
) -> Exception:
    """The refusal of an op that torch traces, but can't run.

    Example: a 4-D tensor is reflected by two numbers. torch traces that, and refuses to run it.

    Args:
        graph: the traced program.
        args: inputs at which it fails.
        error: torch's error, returned if no node of the graph fails alone.
    """
    follows = _Following(graph)
    try:
        follows.run(*(arg.clone() for arg in args))
    except Exception:  # the same error, now with its node
        if follows.at is None:
            return error
    else:
        return error
    why = f"torch traces it, but can't run it: {first_line(error).rstrip('.')}"
    return _refused(follows.at, why, detail=str(error))


def line_of(node: torch.fx.Node) -> str:
    """The model's line of a node, as ``file:line in function: code``; empty if torch lost it."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    starts = [n for n, line in enumerate(lines) if line.startswith('File "')]
    if not starts:
        return ""
    # File "/a/model.py", line 7, in forward
    file, number, where = lines[starts[-1]].removeprefix('File "').rsplit(", ", 2)
    code = lines[starts[-1] + 1] if starts[-1] + 1 < len(lines) else ""
    place = ":".join([file.rstrip('"'), number.removeprefix("line ")]) + f" {where}"
    return f"{place}: {code}" if code else place


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and its causes, the last of which is an ExportError if there is one."""
    chain = [error]
    while not isinstance(chain[-1], ExportError) and chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def _nodes(chain: Sequence[BaseException]) -> Iterator[torch.fx.Node]:
    """The nodes in the exporter's frames."""
    for node in _in_frames(chain, "node"):
        if isinstance(node, torch.fx.Node) and node.op == "call_function":
            yield node


def _in_frames(chain: Sequence[BaseException], name: str) -> Iterator[Any]:
    """A variable's values in the exporter's frames, from the innermost exception outwards."""
    for error in reversed(chain):
        frame = error.__traceback__
        while frame is not None:
            inside = str(frame.tb_frame.f_globals.get("__name__", "")).startswith("torch.onnx.")
            if inside and name in frame.tb_frame.f_locals:
                yield frame.tb_frame.f_locals[name]
            frame = frame.tb_next


def _name(target: Any) -> str:
    """``aten.conv2d`` of ``aten.conv2d.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(f".{target._overloadname}")
    return str(getattr(target, "__name__", target))


def _called(node: torch.fx.Node) -> str:
    """The op that the model calls. torch may have decomposed it into the node."""
    sources: Any = node.meta.get("from_node")
    target = str(node.target)
    while sources:
        target = str(sources[-1].target)
        sources = sources[-1].from_node
    return _name(node.target) if target.count(".") < 2 else target.rpartition(".")[0]


def _symbolic_options(node: torch.fx.Node) -> list[str]:
    """The op's options that are sizes although its schema has a number, or a list of numbers."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | node.kwargs

    def symbolic(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(symbolic, value))
        kinds = (torch.SymInt, torch.SymFloat)
        return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), kinds)

    return [name for name, value in given.items() if symbolic(value)]
