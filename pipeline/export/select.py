"""Chooses between numbers, pads and crops by a condition on symbolic sizes, without a branch.

Python's ``if`` makes torch.export follow one side. Code that `number_branches` has rewritten calls
these functions instead: the condition becomes a size of 0 or 1, and the result a size that depends
on it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.nn import functional

from pipeline.export.asked import hear

_TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
_sym_min: Callable[[Any, Any], Any] = torch.sym_min
_sym_max: Callable[[Any, Any], Any] = torch.sym_max
NOTHING = object()  # the value of a name without one


class Undecided(Exception):
    """The two sides can't be joined: a result can't be chosen, or only one side has it."""


@dataclass(frozen=True)
class Open:
    """A condition on symbolic sizes that no branch was taken on.

    Args:
        indicator: 1 where it holds, and 0 elsewhere.
        test: evaluates it, as Python's ``if`` does.
        sides: the two numbers that it compares; None if it is made of several conditions.
        larger: whether it holds if the first of `sides` is the larger one; None if they are tested
            for equality.
        joined: tensors that are right on both sides, for `padded` and `cropped` made them.
    """

    indicator: Any
    test: Callable[[], Any]
    sides: tuple[Any, Any] | None = None
    larger: bool | None = None
    joined: list[torch.Tensor] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.test())


def is_open(condition: object) -> bool:
    """Whether the condition is still open."""
    return isinstance(condition, Open)


def compare(name: str, left: Any, right: Any) -> Any:
    """A comparison, open if it is of whole numbers of which one is symbolic.

    Args:
        name: the class of Python's syntax tree for the comparison, such as ``LtE``.
        left, right: the operands.
    """
    test = _TESTS[name]
    left, right = _known(left), _known(right)
    if not (_symbolic(left) or _symbolic(right)) or not (_whole(left) and _whole(right)):
        return test(left, right)
    apart = left - right
    condition = test(left, right)
    if not isinstance(condition, torch.SymBool) or apart.node.expr.is_number:
        return condition  # the same at every size
    hear(condition)
    if name in ("Eq", "NotEq"):
        differ = _sym_min(1, _sym_max(apart, -apart))
        indicator, larger = (differ if name == "NotEq" else 1 - differ), None
    else:
        larger = name in ("Gt", "GtE")
        more = (apart if larger else -apart) + (0 if name in ("Gt", "Lt") else 1)
        indicator = _sym_min(1, _sym_max(0, more))
    return Open(indicator, lambda: condition, (left, right), larger)


def truth(value: Any) -> Any:
    """The truth of a value, open if it is a symbolic whole number."""
    return compare("NotEq", value, 0) if _symbolic(value) else value


def condition(opened: Callable[[], Any], plain: Callable[[], Any]) -> Any:
    """A condition with its comparisons open, or as Python evaluates it if that fails.

    It fails where Python would not evaluate a part of it: ``n > 0 and h // n > 2``.
    """
    try:
        return opened()
    except Exception:
        return plain()


def every(*conditions: Callable[[], Any]) -> Any:
    """Python's ``and`` of conditions."""
    return _joined(conditions, _sym_min, decisive=False)


def some(*conditions: Callable[[], Any]) -> Any:
    """Python's ``or`` of conditions."""
    return _joined(conditions, _sym_max, decisive=True)


def _joined(
    conditions: Sequence[Callable[[], Any]], join: Callable[[Any, Any], Any], *, decisive: bool
) -> Any:
    found: list[Open] = []
    for one in conditions:
        result = one()
        if isinstance(result, Open):
            found.append(result)
        elif bool(result) is decisive:
            return decisive
    if not found:
        return not decisive
    indicator = found[0].indicator
    for other in found[1:]:
        indicator = join(indicator, other.indicator)
    if len(found) == 1:
        return found[0]
    test = any if decisive else all
    return Open(indicator, lambda: test(bool(one) for one in found))


def negated(condition: Any) -> Any:
    """Python's ``not``."""
    if not isinstance(condition, Open):
        return not condition
    return Open(1 - condition.indicator, lambda: not bool(condition), joined=condition.joined)


def either(chosen: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """``first() if chosen else second()``; both, joined, if the condition is open."""
    if isinstance(chosen, Open):
        with contextlib.suppress(Exception):  # a side fails where it is not taken, or is no number
            return choose(chosen, first(), second())
    return first() if chosen else second()


def choose(condition: Open, first: Any, second: Any) -> Any:
    """`first` where the condition holds, and `second` elsewhere.

    Raises:
        Undecided: they are not numbers, nor sequences of the same number of numbers, nor a tensor
            and the same one padded or cropped.
    """
    if first is second:
        return first
    for value in (second, first):  # the second side began with what the first one made
        if _is_joined(condition, value):
            return value
    first, second = _known(first), _known(second)
    if isinstance(first, list | tuple) and type(first) in (list, tuple):
        if type(first) is not type(second) or len(first) != len(second):
            raise Undecided
        return type(first)(choose(condition, a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, bool) and isinstance(second, bool):  # one is True, and one is False
        return condition.indicator == int(first)
    if not (_whole(first) and _whole(second)):
        raise Undecided
    return _chosen(condition, first, second)


def _chosen(condition: Open, first: Any, second: Any) -> Any:
    """`choose` of whole numbers: ``min(a, b)`` for ``a if a < b else b``."""
    if _same(first, second):
        return first
    if condition.sides is not None and condition.larger is not None:
        one, other = condition.sides
        straight = _same(first, one) and _same(second, other)
        if straight or (_same(first, other) and _same(second, one)):
            join = _sym_max if condition.larger is straight else _sym_min
            return join(one, other)
    return second + (first - second) * condition.indicator


class _Index:
    def __getitem__(self, index: Any) -> Any:
        return index


INDEX = _Index()  # ``INDEX[a:b]`` is a slice


def padded(
    condition: Open, pad: Callable[..., Any], x: torch.Tensor, pads: Sequence[Any], *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """``pad(x, pads, ...)`` where the condition holds, and `x` elsewhere.

    Raises:
        Undecided: `pad` is not torch's, or a number is not whole.
    """
    if pad not in (functional.pad, torch._C._nn.pad):
        raise Undecided
    result = pad(x, [choose(condition, n, 0) for n in pads], *args, **kwargs)
    condition.joined.append(result)
    return result


def cropped(condition: Open, x: Any, index: Any) -> Any:
    """``x[index]`` where the condition holds, and `x` elsewhere.

    Raises:
        Undecided: `x` is no tensor, or the index is not made of slices whose ends count either from
            the start or from the end.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, torch.Tensor):
        raise Undecided
    if ... in parts:
        at = parts.index(...)
        parts[at : at + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    if not all(isinstance(part, slice) and part.step is None for part in parts):
        raise Undecided
    chosen = []
    for part, size in zip(parts, x.shape, strict=False):
        start = None if part.start is None else choose(condition, _from_start(part.start, size), 0)
        stop = None if part.stop is None else choose(condition, _from_start(part.stop, size), size)
        chosen.append(slice(start, stop))
    result = x[tuple(chosen)]
    condition.joined.append(result)
    return result


def _from_start(end: Any, size: Any) -> Any:
    """An end of a slice, counted from the start of the axis."""
    end = _known(end)
    if not _whole(end):
        raise Undecided
    if statically_known_true(end >= 0):
        return end
    if not statically_known_true(end <= 0):
        raise Undecided
    return _sym_max(size + end, 0)


def joined_or(condition: Open, made: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """The values with which the second side begins: those from before, but the first side's padded
    and cropped tensors, which are the same where the condition does not hold."""
    pairs = zip(made, before, strict=True)
    return [one if _is_joined(condition, one) else old for one, old in pairs]


def _is_joined(condition: Open, value: object) -> bool:
    return any(value is one for one in condition.joined)


def listed(*values: Any) -> None:
    """Raises `Undecided` unless all are lists: a value that is put into another object stays."""
    if not all(type(value) is list for value in values):
        raise Undecided


def number(value: Any) -> Any:
    """The value, if it is a number: ``+=`` changes other objects in place."""
    if not _whole(value) and not isinstance(value, float):
        raise Undecided
    return value


def read(value: Callable[[], Any]) -> Any:
    """The value of a name or of a list's element; `NOTHING` if it has none."""
    try:
        return value()
    except (NameError, LookupError):
        return NOTHING


def joined(condition: Open, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """`choose` for each pair.

    Raises:
        Undecided: as `choose`, or a value has none on one side.
    """
    if any(value is NOTHING for value in (*first, *second)):
        raise Undecided
    return [choose(condition, a, b) for a, b in zip(first, second, strict=True)]


def _known(value: Any) -> Any:
    """The whole number that a tensor holds, if torch knows it while it traces."""
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype.is_floating_point:
        return value
    try:
        number = value.item()
    except Exception:  # of torch: it depends on data
        return value
    return value if not _whole(number) or free_unbacked_symbols(number) else number


def _symbolic(value: object) -> bool:
    return isinstance(value, torch.SymInt) and not value.node.expr.is_number


def _whole(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Whether two whole numbers are the same at every size."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    apart = one - other
    return bool(apart == 0) if isinstance(apart, int) else bool(apart.node.expr == 0)
