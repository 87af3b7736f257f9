"""Finds the first ONNX node whose value differs between two runs, with its module and line.

For torch, the module runs eagerly at the failing sizes, so no size is baked in. Its values have no
ONNX names. An ONNX value counts as right if an op of the eager run gave the same shape and numbers.
The op must come from the same source line, if known. Two ONNX files are compared by value names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from pipeline.artifact.manifest import RewriteInfo
from pipeline.compare.divergence.eager import Eager, torch_prints
from pipeline.compare.divergence.fingerprints import OnnxPrints, onnx_prints
from pipeline.compare.divergence.flow import NOISE, Flow, Parting
from pipeline.compare.run_names import EXPORTED, REWRITTEN, TORCH
from pipeline.graph.names import name_nodes
from pipeline.graph.origin import called, line_of, origin_of
from pipeline.probe.eager import call_module
from pipeline.probe.state import untouched
from pipeline.spec.closeness import Difference

if TYPE_CHECKING:
    import torch

_ROUNDING = 1e-5
_SMALL = 1024
_TIES = (
    "torch may choose others of values that are equal within rounding. Other random values "
    "(--seed 1), or your own (--inputs), may have no such ties"
)
_MANY = 8  # the largest constant that is shown, in numbers
# attributes with sizes; integer constants have sizes too
_SIZES = (
    "kernel_shape",
    "strides",
    "output_shape",
    "shape",
    "split",
    "scales",
    "sizes",
    "hidden_size",
)


@dataclass
class _Model:
    """An ONNX file without large external weights, and its values at the failing sizes."""

    path: Path
    proto: onnx.ModelProto
    prints: OnnxPrints
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)

    @staticmethod
    def of(path: Path, feed: Mapping[str, np.ndarray], seconds: float) -> _Model:
        proto = onnx.load(path, load_external_data=False)
        name_nodes(proto.graph)
        for tensor in proto.graph.initializer:  # ONNX Runtime needs shape constants in the file
            if external_data_helper.uses_external_data(tensor) and math.prod(tensor.dims) < _SMALL:
                external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
        model = _Model(path, proto, onnx_prints(proto, path.parent, feed, seconds))
        model.constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        for node in proto.graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        model.constants[node.output[0]] = attribute.t
        return model

    def array(self, name: str) -> np.ndarray | None:
        """Returns a constant of the main graph."""
        tensor = self.constants.get(name)
        if tensor is None:
            return None
        if external_data_helper.uses_external_data(tensor):
            return numpy_helper.to_array(tensor, str(self.path.parent))
        return numpy_helper.to_array(tensor)

    def ends(self) -> list[str]:
        """Returns the model's outputs, or the outputs of the node that failed."""
        if self.prints.failed:
            node = self.failing()
            return list(node.output) if node is not None else []
        return [value.name for value in self.proto.graph.output]

    def failing(self) -> onnx.NodeProto | None:
        name = self.prints.failed[0] if self.prints.failed else ""
        return next((node for node in self.proto.graph.node if name and node.name == name), None)


@dataclass(frozen=True)
class Located:
    """Where two runs start to differ.

    Args:
        text: The first difference in one line; empty if it is not known.
        ties: Whether it reads indices that depend on which of equal values were chosen.
    """

    text: str = ""
    ties: bool = False


def choice_behind(model: Path, output: str) -> str:
    """Returns the last node that chooses elements that an output depends on; empty if none does."""
    proto = onnx.load(model, load_external_data=False)
    name_nodes(proto.graph)
    chosen = Flow(proto.graph).chooser([output])
    return f"{called(chosen)}{origin_of(chosen)}" if chosen is not None else ""


def locate(
    pair: tuple[str, str],
    feed: Mapping[str, np.ndarray],
    exported: Path,
    rewritten: Path | None = None,
    *,
    module: torch.nn.Module | None = None,
    rewrite: RewriteInfo | None = None,
    seconds: float = 120.0,
) -> Located:
    """Finds where two runs start to differ, or where the second run fails, at these inputs.

    Runs the module eagerly once, and each ONNX file once, about three times slower than normally.
    Keeps no values.

    Args:
        pair: The names of the runs, as in `pipeline.compare.run_names`; the first is the reference.
        feed: The inputs by name, at the failing sizes.
        exported, rewritten: The ONNX files; `rewritten` is needed if it is in the pair.
        module: The torch reference with its padding, for a pair with torch. It gets the inputs in
            the feed's order.
        rewrite: The record of the passes, to name those that rewrote the node.
        seconds: The time limit of a run; the result is empty if a run takes longer.
    """
    if pair[0] == TORCH and pair[1] in (EXPORTED, REWRITTEN) and module is not None:
        path = exported if pair[1] == EXPORTED else rewritten
        return _against_torch(path, feed, module, seconds) if path is not None else Located()
    if pair == (EXPORTED, REWRITTEN) and rewritten is not None:
        return Located(_between_files(exported, rewritten, feed, rewrite, seconds))
    return Located()


def _against_torch(
    path: Path,
    feed: Mapping[str, np.ndarray],
    module: torch.nn.Module,
    seconds: float,
) -> Located:
    try:
        with untouched(module):
            eager = Eager(torch_prints(partial(call_module, module, feed), seconds))
    except Exception:  # any error of the model: the comparison reports it
        return Located()
    model = _Model.of(path, feed, seconds)
    flow = Flow(model.proto.graph)
    apart: dict[str, float] = {}
    surely = set()
    for place, node in enumerate(flow.nodes):
        for name in node.output:
            mine = model.prints.values.get(name)
            if mine is None or mine.even or name not in model.prints.real or not flow.varies[place]:
                continue
            apart[name] = eager.apart(mine, node)
            if eager.has(mine, node):
                surely.add(name)
    parting = _parting(flow, model, apart, surely)
    if parting is None:
        return Located(_failure(model))
    found = model.prints.values.get(parting.value)
    there = eager.shape_like(found, parting.nodes[-1]) if found is not None else None
    ties, direct = _ties(flow, model, parting)
    facts = [ties, _fixed(model, parting, there), _other_weight(model, parting, module)]
    return Located(_told(model, parting, there, TORCH, facts), direct)


def _between_files(
    exported: Path,
    rewritten: Path,
    feed: Mapping[str, np.ndarray],
    rewrite: RewriteInfo | None,
    seconds: float,
) -> str:
    old, new = _Model.of(exported, feed, seconds), _Model.of(rewritten, feed, seconds)
    flow = Flow(new.proto.graph)
    apart = {
        name: value.apart(new.prints.values[name])
        for name, value in old.prints.values.items()
        if name in new.prints.values
    }
    parting = _parting(flow, new, apart, set(apart))
    if parting is None:
        return _failure(new)
    was = old.prints.values.get(parting.value)
    facts = [_other_constant(old, new, parting), _passes(parting, rewrite)]
    return _told(new, parting, was.shape if was else None, EXPORTED, facts)


def _parting(
    flow: Flow, model: _Model, apart: dict[str, float], surely: set[str]
) -> Parting | None:
    prints = model.prints
    kinds = {value.type.tensor_type.elem_type for value in model.proto.graph.output}
    half = kinds & {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    noise = 4e-3 if half else NOISE
    ends = model.ends()
    poor = {n for n, p in prints.values.items() if n not in prints.real or p.even}
    if prints.failed:
        apart |= dict.fromkeys(ends, math.inf)
        surely |= set(ends)
    found = flow.parting(apart, ends, surely, noise, poor)
    return found or flow.parting(apart, ends, apart, noise, poor)


def _told(
    model: _Model,
    parting: Parting,
    there: tuple[int, ...] | None,
    first: str,
    facts: Sequence[str],
) -> str:
    """Returns the line: the node, its origin, the difference, and the facts."""
    node, mine = parting.nodes[-1], model.prints.values.get(parting.value)
    if mine is None:
        return _failure(model, facts)
    if there is None:
        what = f"equals no value that {first} computes at this line"
    elif there != mine.shape:
        what = f"has shape {list(mine.shape)}, {first} has {list(there)}"
    else:
        what = f"has other numbers than {first}"
    near = ""
    if parting.inside is not None:
        near = f"its floating-point inputs agree within {max(parting.inside, 1e-7):.0e}"
    inside = "; ".join(fact for fact in (near, *facts) if fact)
    line = f"first difference: {called(node)}{origin_of(node)}: {parting.value} {what}"
    line += f" ({inside})" if inside else ""
    failing = model.failing()
    return line + (f"; a later node fails: {_failure(model)}" if failing is not None else "")


def _ties(flow: Flow, model: _Model, parting: Parting) -> tuple[str, bool]:
    """Returns the node whose choice may differ where values tie, as text, and whether the parting
    reads the chosen indices itself. Else such a node stands further before it."""
    made = [name for node in parting.nodes for name in node.input if name in flow.maker]
    indices = [name for name in made if name not in model.prints.real]
    for how, names in (("its indices come from", indices), ("before it, rows are chosen by", made)):
        chosen = flow.chooser(names)
        if chosen is not None:
            return f"{how} {called(chosen)}{origin_of(chosen)}: {_TIES}", names is indices
    return "", False


def _failure(model: _Model, facts: Sequence[str] = ()) -> str:
    node = model.failing()
    if node is None or model.prints.failed is None:
        return ""
    inside = "; ".join(fact for fact in facts if fact)
    inside = f" ({inside})" if inside else ""
    return f"{called(node)}{origin_of(node)} fails: {model.prints.failed[1]}{inside}"


def _of_one_line(parting: Parting) -> list[onnx.NodeProto]:
    """Returns the nodes of the parting that come from the same source line as the last one."""
    line = line_of(parting.nodes[-1])
    return [node for node in parting.nodes if line_of(node) == line]


def _fixed(model: _Model, parting: Parting, there: tuple[int, ...] | None) -> str:
    """Returns the constants with a wrong size, or else the constants that may have a size."""
    found: list[tuple[str, list[float]]] = []
    for node in _of_one_line(parting):
        for attribute in node.attribute:
            if attribute.name in _SIZES:
                value = onnx.helper.get_attribute_value(attribute)
                numbers = list(value) if isinstance(value, list | tuple) else [value]
                found.append((f"{attribute.name}={numbers}", numbers))
        for name in node.input:
            array = model.array(name)
            if (
                array is not None
                and (array.dtype == np.int64 or not array.ndim)
                and array.size <= _MANY
            ):
                numbers = array.reshape(-1).tolist()
                if any(abs(number) > 1 for number in numbers):
                    found.append((f"{name} = {numbers}", numbers))
    mine = model.prints.values.get(parting.value)
    wrong: set[float] = set()
    if mine is not None and there is not None and len(there) == len(mine.shape):
        wrong = {a for a, b in zip(mine.shape, there, strict=True) if a != b}
    sizes = [text for text, numbers in found if wrong.intersection(numbers)]
    if sizes:
        return f"a size is baked in: {', '.join(dict.fromkeys(sizes))}"
    texts = list(dict.fromkeys(text for text, _ in found))
    return f"its constants: {', '.join(texts[:4])}" if texts else ""


def _other_weight(model: _Model, parting: Parting, module: torch.nn.Module) -> str:
    """Returns a weight of the nodes that differs from the module's weight of that name."""
    weights = module.state_dict(keep_vars=True)
    for name in dict.fromkeys(name for node in parting.nodes for name in node.input):
        array = model.array(name)
        own = weights.get(name, weights.get(f"inner.{name}"))  # the padding wraps the module
        if array is None or own is None or tuple(own.shape) != array.shape:
            continue
        far = _far(own.detach().cpu().numpy(), array)
        if far > _ROUNDING * np.abs(array).max():  # a batch norm is folded with rounding
            return f"its {name} differs by up to {far:.3g} from the module's"
    return ""


def _other_constant(old: _Model, new: _Model, parting: Parting) -> str:
    """Returns a constant of the nodes that differs between the two files."""
    for name in dict.fromkeys(name for node in parting.nodes for name in node.input):
        before, now = old.array(name), new.array(name)
        if before is None or now is None:
            continue
        if before.shape != now.shape:
            return f"its {name} has shape {list(now.shape)}, not {list(before.shape)}"
        if far := _far(before, now):
            return f"its {name} differs by up to {far:.3g} from {EXPORTED}'s"
    return ""


def _far(a: np.ndarray, b: np.ndarray) -> float:
    if not a.size or a.dtype.kind not in "biuf":
        return 0.0
    return Difference(a, b).largest


def _passes(parting: Parting, rewrite: RewriteInfo | None) -> str:
    """Returns the passes that rewrote the nodes. A new node has the name ``<old name>/<short>``."""
    if rewrite is None:
        return ""
    names = set()
    for node in parting.nodes:
        parts = node.name.split("/")
        names |= {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}
        names |= set(node.output)
    done = [p.name for p in rewrite.passes if any(c.node in names for c in p.rewritten)]
    return f"rewritten by {', '.join(done)}" if done else "no pass rewrote this node"
