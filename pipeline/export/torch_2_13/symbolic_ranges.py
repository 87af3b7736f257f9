"""logspace, windows and the indices of triangles over a symbolic size.

torch's schemas say ``int`` for their lengths, so torch.export makes a number of the size (2.13).
`pipeline.export.torch_2_13.symbolic_steps` calls these functions in place of torch's. Each returns
``NotImplemented`` where torch's own function serves, or where no formula is known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.errors import ExportError
from pipeline.export.declared import ends_of

Size = Any  # int or torch.SymInt
_TRIED = 4096  # the most steps at which integers are compared with torch; 0.1 s
_most: Any = torch.sym_max
_arange: Any = torch.arange


def linspace(
    start: Any, end: Any, steps: Size, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """``torch.linspace``, computed from both ends, so that the last value is exactly `end`.

    torch does the same, and rounds the ends and the step to the dtype
    (aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp).

    Raises:
        ExportError: an integer dtype, and integers do not give torch's values.
    """
    dtype = dtype or torch.get_default_dtype()
    options = {k: v for k, v in options.items() if k == "device"}
    if not dtype.is_floating_point:
        return _whole(start, end, steps, **options).to(dtype)
    # ONNX Runtime computes float16 in float32, and has no bfloat16: each result is rounded here
    wide = dtype if dtype == torch.float64 else torch.float32

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype).to(wide)

    def scalar(value: Any) -> torch.Tensor:
        tensor = isinstance(value, torch.Tensor)
        return rounded(value if tensor else torch.full((), value, dtype=wide, **options))

    first, last = scalar(start), scalar(end)
    step = rounded(rounded(last - first) / rounded(scalar(_most(steps - 1, 1))))
    i = torch.arange(steps, dtype=wide, **options)
    lower = first + rounded(step * rounded(i))
    upper = last - rounded(step * rounded(steps - 1 - i))
    found = torch.where(torch.arange(steps, **options) < _most(steps // 2, 1), lower, upper)
    return found.to(dtype)


def _whole(start: Any, end: Any, steps: Size, **options: Any) -> torch.Tensor:
    """``linspace`` of an integer dtype, in integers.

    torch computes it in float64, which TensorRT lacks, and rounds towards zero. So one value of
    ``linspace(0, 10, 246, dtype=int64)`` is 1 lower than the quotient.
    """
    instead = (
        "for n steps, write torch.div((end - start) * torch.arange(n) + start * (n - 1), n - 1, "
        'rounding_mode="trunc")'
    )
    if not all(isinstance(n, int | float) for n in (start, end)):
        raise ExportError(
            "linspace of an integer dtype needs numbers for start and end, if its number of steps "
            f"follows a size: {instead}"
        )
    first, last = int(start), int(end)

    def exact(n: Any, **options: Any) -> torch.Tensor:
        d = _most(n - 1, 1)
        values = (last - first) * torch.arange(n, **options) + first * d
        return torch.div(values, d, rounding_mode="trunc")

    low, high = ends_of(steps)
    if not 0 <= low <= high <= _TRIED:
        raise ExportError(
            f"linspace of an integer dtype can have more than {_TRIED} steps: declare a smaller "
            f"max, or {instead}"
        )
    with _untraced():
        sizes = range(int(low), int(high) + 1)
        bad = [n for n in sizes if not _like_torch(exact, first, last, n)]
    if bad:
        raise ExportError(
            f"linspace({first}, {last}) of an integer dtype rounds in float64, which TensorRT "
            f"lacks, and one value is 1 off at {bad[0]} steps: {instead}"
        )
    return exact(steps, **options)


def _like_torch(exact: Callable[..., torch.Tensor], first: int, last: int, steps: int) -> bool:
    return torch.equal(exact(steps), torch.linspace(first, last, steps, dtype=torch.int64))


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Tensors inside are real ones, although a model is traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _linspace(start: Any, end: Any, steps: Size, **options: Any) -> Any:
    if not isinstance(steps, torch.SymInt) or options.get("out") is not None:
        return NotImplemented
    return linspace(start, end, steps, **options)


def _logspace(start: Any, end: Any, steps: Size, base: float = 10.0, **options: Any) -> Any:
    dtype = options.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point or base <= 0:
        return NotImplemented
    exponents = _linspace(start, end, steps, **options)
    return exponents if exponents is NotImplemented else torch.pow(base, exponents)


def _window(length: Size, periodic: bool, shape: Callable[[Any], Any], options: Any) -> Any:
    """A window. torch gives 1 for a length of 1.

    Args:
        shape: from the place in the window, which is 0 at the start and 1 at the end.
    """
    if not isinstance(length, torch.SymInt):
        return NotImplemented
    dtype = options.get("dtype") or torch.get_default_dtype()
    i = _arange(length, dtype=dtype, device=options.get("device"))
    values = shape(i / _most(length if periodic else length - 1, 1))
    # torch takes a size for at least 2, and would drop a condition on the size itself
    return torch.where(i.sum() == 0, torch.ones_like(values), values)


def _cosines(*weights: float) -> Callable[[Any], Any]:
    """The sum of cosines of 0, 1, ... turns with these weights."""

    def shape(place: Any) -> Any:
        waves = [w * torch.cos(2 * math.pi * n * place) for n, w in enumerate(weights) if n]
        return sum(waves, start=torch.full_like(place, weights[0]))

    return shape


def _hann(window_length: Size, periodic: bool = True, **options: Any) -> Any:
    return _window(window_length, periodic, _cosines(0.5, -0.5), options)


def _hamming(
    window_length: Size,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    **options: Any,
) -> Any:
    return _window(window_length, periodic, _cosines(alpha, -beta), options)


def _blackman(window_length: Size, periodic: bool = True, **options: Any) -> Any:
    return _window(window_length, periodic, _cosines(0.42, -0.5, 0.08), options)


def _bartlett(window_length: Size, periodic: bool = True, **options: Any) -> Any:
    return _window(window_length, periodic, lambda place: 1 - (2 * place - 1).abs(), options)


def triangle(rows: Size, device: Any = None) -> torch.Tensor:
    """``torch.tril_indices(rows, rows)``.

    The k-th element is in row (sqrt(8 k + 1) - 1) / 2. The root is of a float, so the row may be
    one too low or too high, and is corrected in integers.
    """
    k = torch.arange(rows * (rows + 1) // 2, device=device)
    r = ((torch.sqrt(8 * k.to(torch.float32) + 1) - 1) / 2).to(torch.int64)
    r = torch.where(r * (r + 1) // 2 > k, r - 1, r)
    r = torch.where((r + 1) * (r + 2) // 2 <= k, r + 1, r)
    return torch.stack([r, k - r * (r + 1) // 2])


def _lower(row: Size, col: Size, offset: Size = 0, **options: Any) -> Any:
    """``tril_indices`` if no row is cut at the last column: row r has r + 1 + offset elements."""
    sizes = any(isinstance(n, torch.SymInt) for n in (row, col, offset))
    if not sizes or options.get("dtype") not in (None, torch.int64):
        return NotImplemented
    if not (statically_known_true(row + offset <= col) and statically_known_true(offset <= 0)):
        return NotImplemented
    i, j = triangle(_most(row + offset, 0), options.get("device")).unbind(0)
    return torch.stack([i - offset, j])


def _upper(row: Size, col: Size, offset: Size = 0, **options: Any) -> Any:
    """``triu_indices``: the lower triangle, read from its end."""
    found = _lower(row, col, col - row - offset, **options)
    if found is NotImplemented:
        return found
    i, j = found.flip(1).unbind(0)
    return torch.stack([row - 1 - i, col - 1 - j])


def _vander(x: torch.Tensor, N: Size = None, increasing: bool = False) -> Any:
    columns: Any = x.shape[0] if N is None else N
    if not isinstance(columns, torch.SymInt) or x.dim() != 1:
        return NotImplemented
    if not x.dtype.is_floating_point:
        return NotImplemented
    first = _arange(columns, device=x.device) == 0
    powers = torch.where(first, torch.ones_like(x[:, None]), x[:, None]).cumprod(1)
    return powers if increasing else powers.flip(1)


RANGES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linspace: _linspace,
    torch.logspace: _logspace,
    torch.hann_window: _hann,
    torch.hamming_window: _hamming,
    torch.blackman_window: _blackman,
    torch.bartlett_window: _bartlett,
    torch.tril_indices: _lower,
    torch.triu_indices: _upper,
    torch.vander: _vander,
}
