"""Replaces torch functions that turn a symbolic size into a number while a model is traced.

``torch.linspace(a, b, steps)`` accepts no symbolic number of steps (its schema says ``int``), and
``affine_grid`` calls it. ``cdist`` uses another algorithm above 25 rows, and the results of
``chunk``, and of ``split`` by a size, can't be exported; ``tensor_split`` has the example's pieces
(torch 2.13). Under `SymbolicSteps` they are traced as arange, differences and slices, but only for
symbolic sizes. The output sizes of adaptive max pools and of ``adaptive_avg_pool1d`` must be
numbers too: these are traced as an op of ours, and as a 2-D pool. So is ``max_pool1d``. Pools whose
window is the whole axis are traced as a mean or a maximum, and ``one_hot`` as a comparison. For
windows and the indices of triangles see `pipeline.export.torch_2_13.symbolic_ranges`, for diagonals
`pipeline.export.torch_2_13.symbolic_diagonals`, for ``take_along_dim`` and ``kron``
`pipeline.export.torch_2_13.symbolic_products`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipeline.errors import ExportError
from pipeline.export.ops.pools import sized_max_pool
from pipeline.export.torch_2_13.symbolic_diagonals import DIAGONALS
from pipeline.export.torch_2_13.symbolic_products import PRODUCTS
from pipeline.export.torch_2_13.symbolic_ranges import RANGES, Size, linspace

_NUMPYS = {"axis": "dim", "x": "input"}  # numpy's names of arguments, which torch takes too


class SymbolicSteps(TorchFunctionMode):
    """While it is active, these functions keep symbolic sizes.

    The parameters of our functions have torch's names: a model may pass each by name.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function of its API."""
        del types
        kwargs = kwargs or {}
        other = _OTHERS.get(func)
        named = {_NUMPYS.get(name, name): value for name, value in kwargs.items()}
        result = NotImplemented if other is None else other(*args, **named)
        return func(*args, **kwargs) if result is NotImplemented else result


def _arange(
    *ends: Any,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
    dtype: torch.dtype | None = None,
    out: Any = None,
    device: Any = None,
    **options: Any,
) -> Any:
    """``arange`` with a float for an end or the step. Its dtype is a float.

    torch's exporter takes the type of one of the numbers, also if another is a float. ONNX's Range
    counts its elements in float32, and has one more or fewer at some sizes; ``ceil`` of a float of
    sizes is exact.
    """
    del options
    if len(ends) == 3:
        *ends, step = ends  # type: ignore[assignment]
    first, last = (0, *(n for n in (start, *ends, end) if n is not None))[-2:]
    numbers = (first, last, step)
    sizes = any(isinstance(n, torch.SymInt | torch.SymFloat) for n in numbers)
    broken = any(isinstance(n, float | torch.SymFloat) for n in numbers)
    dtype = dtype or torch.get_default_dtype()
    if not (broken and dtype.is_floating_point) or out is not None:
        return NotImplemented
    if not sizes:
        return torch.arange(*map(float, numbers), dtype=dtype, device=device)
    first, last, step = (int(n) if isinstance(n, float) and n % 1 == 0 else n for n in numbers)
    if not any(isinstance(n, float | torch.SymFloat) for n in (first, last, step)):
        return torch.arange(first, last, step, dtype=dtype, device=device)
    length = last if isinstance(first, int) and first == 0 else last - first
    count: Any = math.ceil(length if isinstance(step, int) and step == 1 else length / step)
    return first + step * torch.arange(count, dtype=dtype, device=device)


def _affine_grid(
    theta: torch.Tensor, size: Sequence[Size], align_corners: bool | None = None
) -> Any:
    if not any(isinstance(s, torch.SymInt) for s in size):
        return NotImplemented
    return affine_grid(theta, size, align_corners)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: Any = None) -> Any:
    """``cdist`` by differences; needs memory for [..., rows of x1, rows of x2, channels]."""
    del compute_mode
    rows = (x1.shape[-2], x2.shape[-2])
    if p not in (1, 2) or not any(isinstance(s, torch.SymInt) for s in rows):
        return NotImplemented
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    return difference.abs().sum(-1) if p == 1 else difference.square().sum(-1).sqrt()


def _chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """``chunk`` if the number of pieces is the same at every size."""
    size = input.shape[dim]
    if not isinstance(size, torch.SymInt):
        return NotImplemented
    step = (size + chunks - 1) // chunks
    least = (chunks - 1) ** 2 + 1  # chunk(3) of 4 elements gives 2 pieces
    always = (size.node.expr % chunks).is_zero or _low(size) >= least
    # the declared sizes may say more: `short_sizes` evaluates the condition at all of them
    if not (always or statically_known_true((size + step - 1) // step == chunks)):
        raise ExportError(
            f"chunk({chunks}) of an axis whose size follows an input can give fewer than {chunks} "
            f"pieces: declare a range in which this size is at least {least}, or use "
            f"torch.tensor_split, which always gives {chunks}"
        )
    return _pieces(input, dim, [*(step * n for n in range(chunks)), size])


def _tensor_split(input: torch.Tensor, sections: Any = None, dim: int = 0, **indices: Any) -> Any:
    """``tensor_split`` into a number of pieces, or at indices.

    Of a number of pieces, the first ones may be longer by one.
    """
    size = input.shape[dim]
    names = "indices_or_sections", "indices", "sections"
    at = next((indices.pop(name) for name in names if name in indices), sections)
    if indices or not isinstance(size, torch.SymInt):
        return NotImplemented
    if isinstance(at, tuple | list):
        before = (slice(None),) * (dim % input.dim())
        return tuple(input[(*before, slice(*ends))] for ends in pairwise([0, *at, None]))
    if not isinstance(at, int):
        return NotImplemented
    sections = at
    sizes = ((size + sections - 1 - n) // sections for n in range(sections))
    return _pieces(input, dim, [*accumulate(sizes, initial=0)])


def _split(tensor: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
    """``split`` into pieces of one size; the last may be shorter.

    torch's exporter fails at a symbolic size of the pieces.
    """
    size = tensor.shape[dim]
    if not isinstance(sizes, torch.SymInt):
        return NotImplemented
    number = max(int((size + sizes - 1) // sizes), 1)  # the branch that torch takes too
    return _pieces(tensor, dim, [*(sizes * n for n in range(number)), size])


def _low(size: torch.SymInt) -> Any:
    """The smallest value that a size can have."""
    return size.node.shape_env.bound_sympy(size.node.expr).lower


def _pieces(x: torch.Tensor, dim: int, ends: Sequence[Size]) -> tuple[torch.Tensor, ...]:
    return tuple(x.narrow(dim, a, b - a) for a, b in pairwise(ends))


def _adaptive_avg_pool1d(input: torch.Tensor, output_size: Any) -> Any:
    (length,) = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    if not isinstance(length, torch.SymInt):
        return NotImplemented
    size: Any = (1, length)
    return functional.adaptive_avg_pool2d(input.unsqueeze(-2), size).squeeze(-2)


def _adaptive_max_pool(input: torch.Tensor, output_size: Any, return_indices: bool = False) -> Any:
    listed = output_size if isinstance(output_size, (tuple, list)) else ()
    if return_indices or not any(isinstance(s, torch.SymInt) for s in listed):
        return NotImplemented
    pairs = zip(listed, input.shape[-len(listed) :], strict=True)
    return sized_max_pool(input, [before if new is None else new for new, before in pairs])


def _adaptive_max_pool1d(
    input: torch.Tensor, output_size: Any, return_indices: bool = False
) -> Any:
    listed = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    return _adaptive_max_pool(input, listed, return_indices)


@dataclass(frozen=True)
class _Pool:
    """A pool whose windows are the whole of some axes, and have a fixed size in the others.

    Args:
        over: the mean or the maximum over axes.
        pool: torch's pool, for the other axes.
        axes: how many axes it has.
        order: the arguments after the padding.
    """

    over: Callable[..., Any]
    pool: Callable[..., Any]
    axes: int
    order: tuple[str, str, str]

    def __call__(
        self,
        input: torch.Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        *rest: Any,
        **named: Any,
    ) -> Any:
        axes, options = self.axes, dict(zip(self.order, rest, strict=False)) | named
        special = options.get("return_indices") or options.get("divisor_override")
        if special or any(n != 1 for n in _each(options.get("dilation", 1), axes)):
            return NotImplemented
        windows = _each(kernel_size, axes)
        whole = [n for n, window in enumerate(windows) if isinstance(window, torch.SymInt)]
        if not whole or any(p != 0 for p in _each(padding, axes)):
            return NotImplemented
        sizes = input.shape[-axes:]
        if not all(statically_known_true(windows[n] == sizes[n]) for n in whole):
            return NotImplemented
        found = self.over(input, [n - axes for n in whole], keepdim=True)
        if len(whole) == axes:
            return found

        def one(values: list[Any]) -> list[Any]:
            return [1 if n in whole else value for n, value in enumerate(values)]

        steps = one(_each(stride, axes)) if stride else None
        return self.pool(found, one(windows), steps, **options)


_AVG = [
    _Pool(torch.mean, pool, n, ("ceil_mode", "count_include_pad", "divisor_override"))
    for n, pool in enumerate(
        (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d), 1
    )
]
_MAX = [
    _Pool(torch.amax, pool, n, ("dilation", "ceil_mode", "return_indices"))
    for n, pool in enumerate(
        (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d), 1
    )
]


def _each(value: Any, axes: int) -> list[Any]:
    """A pool's option as one value an axis."""
    listed = list(value) if isinstance(value, (tuple, list)) else [value]
    return listed * axes if len(listed) == 1 else listed


def _one_hot(input: torch.Tensor, num_classes: Any = -1) -> Any:
    """``one_hot`` by comparing. torch's schema says ``int`` for the number of classes."""
    if isinstance(num_classes, int):
        return NotImplemented
    classes = torch.arange(num_classes, device=input.device)
    return (input.unsqueeze(-1) == classes).to(torch.int64)


def _max_pool1d(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """``max_pool1d`` as a 2-D pool of one row: torch's own reads the length as a number."""
    if return_indices or not any(isinstance(s, torch.SymInt) for s in input.shape):
        return NotImplemented
    found = _MAX[0](input, kernel_size, stride, padding, dilation)
    if found is not NotImplemented:
        return found

    def row(value: Any, other: int) -> tuple[int, int]:
        return (other, value[0] if isinstance(value, (tuple, list)) else value)

    kernel = row(kernel_size, 1)
    steps = row(stride, 1) if stride else kernel
    found = functional.max_pool2d(
        input.unsqueeze(-2), kernel, steps, row(padding, 0), row(dilation, 1), ceil_mode
    )
    return found.squeeze(-2)


def affine_grid(
    theta: torch.Tensor, size: Sequence[Any], align_corners: bool | None = None
) -> torch.Tensor:
    """``torch.nn.functional.affine_grid`` for d = 2 or 3.

    Args:
        theta: the transforms, [n, d, d + 1].
        size: the output's size, [n, c, ...].
        align_corners: as in torch.

    Returns:
        The grid, [n, ..., d].
    """
    spatial = list(size[2:])
    axes = []
    for n, steps in enumerate(spatial):
        line = linspace(-1.0, 1.0, steps, dtype=theta.dtype, device=theta.device)
        if not align_corners:
            line = line * ((steps - 1) / steps)
        shape = [1] * len(spatial)
        shape[n] = steps
        axes.append(line.reshape(shape).expand(spatial))
    # x, the last axis, comes first
    base = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)
    points = base.reshape(1, -1, len(spatial) + 1) @ theta.transpose(1, 2)
    return points.reshape([theta.shape[0], *spatial, len(spatial)])


_OTHERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **RANGES,
    **DIAGONALS,
    **PRODUCTS,
    torch.arange: _arange,
    functional.affine_grid: _affine_grid,
    torch.cdist: _cdist,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.unsafe_chunk: _chunk,
    torch.Tensor.unsafe_chunk: _chunk,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.adaptive_avg_pool1d: _adaptive_avg_pool1d,
    torch.max_pool1d: _max_pool1d,
    functional.max_pool1d: _max_pool1d,
    torch.max_pool2d: _MAX[1],
    torch.max_pool3d: _MAX[2],
    functional.max_pool2d: _MAX[1],
    functional.max_pool3d: _MAX[2],
    functional.avg_pool1d: _AVG[0],
    functional.avg_pool2d: _AVG[1],
    functional.avg_pool3d: _AVG[2],
    functional.one_hot: _one_hot,
    functional.adaptive_max_pool1d: _adaptive_max_pool1d,
    functional.adaptive_max_pool2d: _adaptive_max_pool,
    functional.adaptive_max_pool3d: _adaptive_max_pool,
}
