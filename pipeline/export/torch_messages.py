"""Reads rules on dims from torch.export's errors and log.

Every pattern here matches torch's own text (torch 2.13), never a sentence of this package. torch
fails with "Suggested fixes" (``_h = Dim('_h', min=17, max=270)``, ``h = 8*_h``). It does not say
which line of the model made a guard, so `GuardLog` reads the shape environment's log for that.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torch.nn.utils.rnn import PackedSequence

from pipeline.errors import ExportError, first_line
from pipeline.probe.eager import model_line
from pipeline.probe.evaluate import holds, symbols_in
from pipeline.probe.rules import narrowed
from pipeline.spec.dims import Dim
from pipeline.spec.rules import Rule

_LOGGER = "torch.fx.experimental.symbolic_shapes"
_FIX = re.compile(r"^\s*(\w+) = (.+)$")
_RANGE = re.compile(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)\Z")
_MULTIPLE = re.compile(r"(\d+)\*(\w+)(?: ([+-]) (\d+))?\Z")
_SYMBOL = re.compile(r"create_symbol (\w+) = .* for L\['(\w+)'\](\[\d+\])?\.size\(\)\[(\d+)\]")
_GUARD = re.compile(r"eval (.+?) \[guard added\]")
_FLOAT = re.compile(r"\b\d+\.\d*(?:e[-+]?\d+)?|\b\d+e[-+]?\d+")


def find_rules(message: str, dims: Mapping[str, Dim]) -> list[Rule]:
    """The rules in the "Suggested fixes" of a constraint violation's text.

    Args:
        message: the exception's text.
        dims: the exported dims by name; a dim with a multiple of k is ``k*_name`` in torch.
    """
    _, _, fixes = message.partition("Suggested fixes:")
    found = {m[1]: m[2] for line in fixes.splitlines() if (m := _FIX.match(line))}
    rules = []
    for dim in dims.values():
        root, step = _root(dim)
        for key in (root, dim.name):
            fix = found.get(key)
            if fix is not None and (rule := _rule(dim, step if key == root else 1, fix, found)):
                rules.append(rule)
                break
    return rules


_FIXED = re.compile(
    r"L\['(\w+)'\](\[\d+\])?\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be "
    r"a constant \((\d+)\)"
)


def fixed_dims(
    message: str, arguments: Mapping[tuple[str, int], str], dims: Mapping[str, Dim]
) -> list[Rule]:
    """The rules on dims that were passed as ``DYNAMIC`` and that the model fixed.

    Args:
        message: the exception's text.
        arguments: the dim's name by (argument name of ``forward``, axis).
        dims: the dims by name.
    """
    rules = {}
    for match in _FIXED.finditer(message):
        name = arguments.get((match[1] + (match[2] or ""), int(match[3])), "")
        if name in dims:
            size = int(match[4])
            rules[name] = narrowed(dims[name], "fixed", (size, size), shown=True)
    return list(rules.values())


def root_name(dim: Dim) -> str:
    """The name of the torch Dim that `dim` is a multiple of, or the dim's own name."""
    return _root(dim)[0]


def _short(guard: str) -> str:
    """A guard with fewer digits of its floats than torch's log has."""
    return _FLOAT.sub(lambda m: f"{float(m[0]):.12g}", guard)


def _root(dim: Dim) -> tuple[str, int]:
    return (f"_{dim.name}", dim.multiple_of) if dim.multiple_of > 1 else (dim.name, 1)


def _rule(  # noqa: PLR0911
    dim: Dim, step: int, fix: str, found: Mapping[str, str]
) -> Rule | None:
    """The rule behind ``(dim - offset)/step = fix``; the offset is 0 if the step is 1."""
    name, offset = dim.name, dim.offset if step > 1 else 0
    if fix.isdigit():
        size = int(fix) * step + offset
        return narrowed(dim, "fixed", (size, size), shown=True)
    if match := _RANGE.match(fix):
        low = int(match[1]) * step + offset if match[1] else dim.min
        high = int(match[2]) * step + offset if match[2] else dim.max
        if (low, high) == (dim.min, dim.max):
            return None
        return narrowed(dim, "range", (low, high), (dim.multiple_of, dim.offset), shown=True)
    if match := _MULTIPLE.match(fix):
        multiple = int(match[1]) * step
        more = int(f"{match[3] or ''}{match[4] or 0}") * step + offset
        if match[2].lstrip("_") == name and match[2] != name:  # of a multiple: __h
            inner = _RANGE.match(found.get(match[2], ""))
            ends = (inner[1], inner[2]) if inner else (None, None)
            low = max(dim.min, int(ends[0] or 1) * multiple + more) if inner else dim.min
            high = min(dim.max, int(ends[1]) * multiple + more) if ends[1] else dim.max
            step_of = (multiple, more % multiple)
            return narrowed(dim, "multiple", (low, high), step_of, shown=False)
        other = match[2].removeprefix("_")
        text = f"{multiple}*{other}" + (f" {'+' if more > 0 else '-'} {abs(more)}" if more else "")
        return Rule("expression", name, formula=text)
    if fix in found or re.fullmatch(r"\w+", fix):
        return Rule("equal", fix.removeprefix("_"), (name,))
    text = fix if step == 1 else f"{step}*({fix})" + (f" + {offset}" if offset else "")
    return Rule("expression", name, formula=text.replace(f"_{name}", "n"))


# a pattern in torch's error -> what to do in the model
_ADVICE = (
    (
        r"unhashable type: non-nested SymInt",
        "do not use a size as a key of a dict or in a set: compute the value from the size in each "
        "call, without a cache",
    ),
    (
        r"Could not extract specialized integer",
        "do not make a number from a tensor's values: read sizes from x.shape directly, and set "
        "other numbers when you make the module",
    ),
    (
        r"Could not guard on data-dependent expression",
        "do not choose a branch by a tensor's values: compute both branches and use torch.where, "
        "use torch.cond, or choose when you make the module",
    ),
    (
        r"\.numpy\(\) is not supported for tensor subclasses",
        "do not use NumPy in forward: for a tensor of sizes, use x.shape directly or .tolist() in "
        "place of .numpy(), and write other steps with torch",
    ),
    (
        r"functorch tensor|storage of TensorWrapper",
        "do not use torch.func in forward: write the derivative, or the step per sample, as a "
        "formula",
    ),
    (
        r"found a fake tensor in the exported program constant's list",
        "torch.export does not follow a step of forward. If forward computes a gradient "
        "(torch.autograd.grad or backward), write the derivative as a formula",
    ),
)
_PACKED = (
    "run the RNN over the padded batch, without pack_padded_sequence and pad_packed_sequence. "
    "Then take the last valid step, y[torch.arange(y.shape[0]), lengths - 1] with batch_first=True"
    ", or set the padded steps to zero with a mask. A bidirectional RNN also reads the padding: "
    "flip each sequence by its length (torch.gather), and run a second RNN over it"
)
_UNMET = re.compile(
    r"Not all values of (\w+) = (\S+) in .* satisfy the generated guard (.+)\.$", re.M
)
_ROUNDED = re.compile(r"\b(?:Trunc|Floor|Ceil|Round)ToInt\(")
_IN_INTEGERS = (
    "a size times a float has no exact formula: compute it in integers, such as "
    "x.shape[2] * 7 // 10 in place of int(x.shape[2] * 0.7) or scale_factor=0.7"
)


def advice(text: str) -> str:
    """What to change in a model for which torch gives this error; an empty text if unknown."""
    return next((words for pattern, words in _ADVICE if re.search(pattern, text)), "")


def _packs(error: Exception) -> bool:
    """True if a function that failed, or that called it, handled a packed sequence."""
    names = ("pack_padded_sequence", "pad_packed_sequence", "pack_sequence")
    return any(
        frame.f_code.co_name in names
        or any(type(value) is PackedSequence for value in frame.f_locals.values())
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def export_failed(error: Exception, line: str) -> ExportError:
    """The error for a failure of torch.export, with the model's line or an empty text."""
    text, first, do = str(error), first_line(error), advice(str(error))
    if not do and _packs(error):
        do = _PACKED
    unmet = _UNMET.findall(text)
    if unmet:
        guard = unmet[0][2]
        for name, place, _ in unmet:
            guard = guard.replace(place, name)
        first = f"what the model does at the example's sizes needs {guard}"
        do = "declare only such sizes, or write this step without a branch on sizes"
    place = f" at {line}" if line else ""
    return ExportError(
        f"torch.export failed{place}: {first}",
        detail=text,
        line=line,
        what=f"torch.export failed: {first}",
        do=do,
    )


def of_rounding(size: str) -> str:
    """What to change if a size is a rounded float of sizes; an empty text if it is not."""
    return _IN_INTEGERS if _ROUNDED.search(size) else ""


class GuardLog:
    """Records the guards that torch.export adds, each with the model's line that made it.

    Enter it round torch.export.export, then call `guard_on`.

    Args:
        framework: torch's folder, whose lines are not the model's.
    """

    def __init__(self, framework: Path) -> None:
        self._framework = str(framework)
        self._symbols: dict[tuple[str, int], str] = {}
        self._guards: list[tuple[str, str]] = []

    def __enter__(self) -> GuardLog:
        logger = logging.getLogger(_LOGGER)
        self._saved = (logger.handlers, logger.level, logger.propagate)
        handler = logging.Handler()
        handler.emit = self._emit  # type: ignore[method-assign]
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logger = logging.getLogger(_LOGGER)
        logger.handlers, level, logger.propagate = self._saved
        logger.setLevel(level)

    def _emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if match := _SYMBOL.match(text):
            self._symbols[match[2] + (match[3] or ""), int(match[4])] = match[1]
        elif match := _GUARD.match(text):
            line = model_line(traceback.extract_stack(), self._framework)
            if line:
                self._guards.append((match[1], line))

    def guard_on(
        self, arguments: Mapping[tuple[str, int], str], dim: str, sizes: Sequence[int] = ()
    ) -> tuple[str, str]:
        """The guard on a dim, and the model's line that made it; empty texts if there is none.

        Args:
            arguments: the dim's name by (argument name of ``forward``, axis).
            dim: the dim's name.
            sizes: the dim's sizes. A guard that one of them breaks is preferred, then one that
                ties the dim to another dim.
        """
        names = {s for at, s in self._symbols.items() if arguments.get(at) == dim}
        on_it = [(g, line) for g, line in self._guards if names & symbols_in(g)]
        for guard, line in on_it:
            if symbols_in(guard) <= names and any(
                holds(guard, dict.fromkeys(names, size)) is False for size in sizes
            ):
                return guard, line
        tying = [(guard, line) for guard, line in on_it if not symbols_in(guard) <= names]
        return next(iter(tying or on_it), ("", ""))

    def line_for(self, guard: str) -> str:
        """The model's line that made the guard of this text, or an empty text."""
        short = _short(guard)
        exact = next((line for text, line in self._guards if _short(text) == short), "")
        return exact or next(  # it may be a part of ``Min(h, w) >= 24``
            (
                line
                for text, line in self._guards
                if re.search(r"\b(Min|Max)\(", text) and symbols_in(guard) < symbols_in(text)
            ),
            "",
        )
