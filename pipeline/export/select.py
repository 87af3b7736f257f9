"""Chooses between numbers by a condition on symbolic sizes, without a branch.

Python's ``if`` makes torch.export follow one side. Code that `number_branches` has rewritten calls
these functions instead: the condition becomes a size of 0 or 1, and the result a size that depends
on it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

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
_watched: ContextVar[list[tuple[tuple[torch.Tensor, ...], int]] | None] = ContextVar(
    "_watched", default=None
)
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
        joined: tensors that `pipeline.export.cut` made of the value that a name had before the
            branch, by the name's number. They equal that value where the condition does not hold.
    """

    indicator: Any
    test: Callable[[], Any]
    sides: tuple[Any, Any] | None = None
    larger: bool | None = None
    joined: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True if self.test() else False  # noqa: SIM210 a branch: see `Asked.inside`


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
    left, right = known_number(left), known_number(right)
    if not (_symbolic(left) or _symbolic(right)) or not (is_whole(left) and is_whole(right)):
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
        elif (not result) is not decisive:
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
        Undecided: they are not one object, numbers, or tuples of the same number of numbers. A new
            list or tensor would not change where the model changes its own.
    """
    if first is second:
        return first
    if type(first) is tuple and type(second) is tuple and len(first) == len(second):
        return tuple(choose(condition, a, b) for a, b in zip(first, second, strict=True))
    if not (is_whole(first) and is_whole(second)):
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


def start_of_second(condition: Open, made: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """The values with which the second side begins.

    They are those from before. A tensor that the first side padded or cropped equals its value
    from before where the condition does not hold.
    """
    pairs = enumerate(zip(made, before, strict=True))
    return [one if _is_joined(condition, k, one) else old for k, (one, old) in pairs]


def _is_joined(condition: Open, target: int, value: object) -> bool:
    return any(value is one for one in condition.joined.get(target, ()))


def are_lists(values: Callable[[], Sequence[Any]]) -> bool:
    """Whether all values exist and are lists; to read another object's element may change it."""
    try:
        return all(type(value) is list for value in values())
    except (NameError, LookupError):
        return False


def number(value: Any) -> Any:
    """The value, if it is a number: ``+=`` changes other objects in place."""
    if not is_whole(value) and not isinstance(value, float):
        raise Undecided
    return value


def whole_number(kind: Any, value: Any) -> Any:
    """``int(value)``, symbolic if the value is made of sizes in one step.

    Args:
        kind: what the model calls: Python's ``int``, or what has its name there.
        value: its argument.
    """
    is_int = isinstance(kind, type) and issubclass(kind, int)
    if is_int and isinstance(value, torch.SymFloat) and _is_one_step(value):
        return torch.sym_int(value)  # type: ignore[no-untyped-call]
    return kind(value)


def _is_one_step(value: torch.SymFloat) -> bool:
    """Whether Python makes a float of sizes that are not negative in one step, as ``h * 0.7``.

    sympy folds several: ``h * 0.7 * 10`` becomes ``7.0*h``, and Python's floats are no ``7.0*h``.
    A quotient of whole numbers does not count: the model's ``int`` keeps it symbolic.
    """
    mode = get_proxy_mode()
    proxy: Any = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    if proxy is None:
        return False
    node: Node = proxy.force().node
    numbers = [arg for arg in node.args if isinstance(arg, int | float)]
    if node.target is operator.truediv and all(float(n).is_integer() for n in numbers):
        return False
    return all(not isinstance(arg, Node) or _is_size(arg) for arg in node.args)


def _is_size(node: Node) -> bool:
    """Whether a node's value is a size that is not negative, also as a float."""
    if node.target is torch.sym_float:
        (node,) = node.all_input_nodes
    size = node.meta.get("val")
    if not isinstance(size, torch.SymInt):
        return False
    return bool(size.node.shape_env.bound_sympy(size.node.expr).lower >= 0)


def product(sizes: Any) -> Any:
    """``sizes.numel()``, symbolic if one of the sizes is."""
    return math.prod(sizes) if isinstance(sizes, torch.Size) else sizes.numel()


def read(value: Callable[[], Any]) -> Any:
    """The value of a name or of a list's element; `NOTHING` if it has none."""
    try:
        return value()
    except (NameError, LookupError):
        return NOTHING


def joined(
    condition: Open,
    before: Sequence[Any],
    first: Sequence[Any],
    second: Sequence[Any],
    numbers: Collection[int] = (),
) -> list[Any]:
    """The values after a branch.

    Args:
        condition: the condition.
        before: the values before the branch.
        first, second: the values after each side.
        numbers: which of the values may be numbers where the model has tensors.

    Raises:
        Undecided: as `choose`, or a value has none on one side.
    """
    if any(value is NOTHING for value in (*first, *second)):
        raise Undecided
    found = []
    for k, (old, a, b) in enumerate(zip(before, first, second, strict=True)):
        if _is_joined(condition, k, b) and (a is old or _is_joined(condition, k, a)):
            found.append(b)  # the second side began with what the first one left
        else:
            known = _watched_number if k in numbers and a is not b else _itself
            found.append(choose(condition, known(a), known(b)))
    return found


def _itself(value: Any) -> Any:
    return value


def _watched_number(value: Any) -> Any:
    """`known_number`, as long as the model does not write into the tensor later."""
    number = known_number(value)
    if number is not value:
        watch(value)
    return number


@contextlib.contextmanager
def writes_watched() -> Iterator[None]:
    """Raises `Undecided` at the end if one of the tensors was written to that `watch` got."""
    watched: list[tuple[tuple[torch.Tensor, ...], int]] = []
    token = _watched.set(watched)
    try:
        yield
    finally:
        _watched.reset(token)
    if any(sum(one._version for one in tensors) != then for tensors, then in watched):
        raise Undecided("the model writes into a tensor that a branch pads, crops or chooses")


def watch(*tensors: torch.Tensor) -> None:
    """Nobody may write into these tensors from now on.

    They are one object in the model, and two or a number in the program.
    """
    watched = _watched.get()
    if watched is not None:
        watched.append((tensors, sum(one._version for one in tensors)))


def known_number(value: Any) -> Any:
    """The whole number that an int64 tensor holds, if torch knows it while it traces."""
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype != torch.int64:
        return value
    try:
        number = value.item()
    except Exception:  # of torch: it depends on data
        return value
    return value if not is_whole(number) or free_unbacked_symbols(number) else number


def _symbolic(value: object) -> bool:
    return isinstance(value, torch.SymInt) and not value.node.expr.is_number


def is_whole(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Whether two whole numbers are the same at every size."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    apart = one - other
    return bool(apart == 0) if isinstance(apart, int) else bool(apart.node.expr == 0)
