"""Pads and crops a tensor where a condition on symbolic sizes holds, without a branch.

Code that `number_branches` has rewritten calls these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from pipeline.export.declared import ends_of, smallest_size
from pipeline.export.select import Open, Undecided, choose, is_whole, known_number, watch

_least: Callable[[Any, Any], Any] = torch.sym_min
_most: Callable[[Any, Any], Any] = torch.sym_max


class _Index:
    def __getitem__(self, index: Any) -> Any:
        return index


INDEX = _Index()  # ``INDEX[a:b]`` is a slice


def padded(
    condition: Open, target: int, before: Any, pad: Callable[..., Any], x: Any, /, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """``pad(x, ...)`` where the condition holds, and a copy of `x` elsewhere.

    Args:
        condition: the condition.
        target: the number of the name that gets the result.
        before: the value of that name before this side of the branch.
        pad: torch's function.
        x: the tensor.
        args, kwargs: its other arguments, the first of them named ``pad`` or first in order.

    Raises:
        Undecided: `pad` is not torch's, `x` has not come from `before`, or a number is not whole.
    """
    if pad not in (functional.pad, torch._C._nn.pad):
        raise Undecided
    _from(condition, target, before, x)
    pads, rest = (args[0], args[1:]) if args else (kwargs.pop("pad"), ())
    result = pad(x, [choose(condition, known_number(n), 0) for n in pads], *rest, **kwargs)
    return _joined_to(condition, target, x, result, copied=True)


def cropped(
    condition: Open, target: int, before: Any, x: Any, index: Any, *, copied: bool = False
) -> Any:
    """``x[index]`` where the condition holds, and `x` elsewhere; ``x[index]`` of a list.

    Args:
        condition: the condition.
        target: the number of the name that gets the result.
        before: the value of that name before this side of the branch.
        x: the tensor.
        index: its index.
        copied: whether the result has to be contiguous.

    Raises:
        Undecided: `x` has not come from `before`, or the index is not made of slices whose ends
            count either from the start or from the end.
    """
    if not isinstance(x, torch.Tensor):
        return x[index]
    _from(condition, target, before, x)
    parts = list(index) if isinstance(index, tuple) else [index]
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
    return _joined_to(condition, target, x, result.clone() if copied else result, copied=copied)


def _from(condition: Open, target: int, before: Any, x: Any) -> None:
    """Raises `Undecided` unless a tensor is a name's value from before, padded and cropped."""
    known = [before, *condition.joined.get(target, ())]
    if not isinstance(x, torch.Tensor) or not any(x is one for one in known):
        raise Undecided


def _joined_to(
    condition: Open, target: int, x: torch.Tensor, result: torch.Tensor, *, copied: bool
) -> torch.Tensor:
    condition.joined.setdefault(target, []).append(result)
    if copied:
        watch(x, result)
    return result


def _from_start(end: Any, size: Any) -> Any:
    """An end of a slice, counted from the start of the axis, as Python counts it."""
    end = known_number(end)
    if not is_whole(end):
        raise Undecided
    low, high = ends_of(end)
    # torch assumes sizes of 2 and more while it traces
    knows = not isinstance(end, int) and smallest_size(end) >= 2
    if low >= 0 or (knows and statically_known_true(end >= 0)):
        return end
    if high > 0 and not (knows and statically_known_true(end <= 0)):
        raise Undecided
    # -0 is 0, and so counts from the start
    return _most(size + end, 0) * _least(-end, 1)
