"""Runs a model in float64, for a measured tolerance: what it makes in float32 becomes float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.export.tolerance_runs import Calls

# made in float64, so that they are without the rounding of float32
_MADE = frozenset(
    getattr(torch, name)
    for name in ("arange", "eye", "full", "linspace", "logspace", "ones", "zeros")
)
_MASK = 3  # the position of the mask of attention


class WideCalls(Calls):
    """Collects the functions of torch that are called in a run in float64.

    A float32 tensor that is made of no floats, and without a dtype, becomes float64:
    ``torch.zeros(3)``, ``torch.where(mask, 0.0, -1.0)``. The numbers of ``torch.tensor([0.9])``
    stay those of the model, rounded to float32. Attention reads a float32 mask beside float64
    inputs wrongly, without an error (torch 2.13), so the mask becomes float64 too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function of its API."""
        given = kwargs or {}
        if func is scaled_dot_product_attention:
            args, given = _with_wide_mask(args, given)
        made = super().__torch_function__(func, types, args, given)
        if not isinstance(made, torch.Tensor) or made.dtype != torch.float32:
            return made
        if "dtype" in given and given["dtype"] is not None:
            return made
        if func in _MADE:
            return func(*args, **{**given, "dtype": torch.float64})
        return made if _has_floats((*args, *given.values())) else made.double()


def _with_wide_mask(
    args: tuple[Any, ...], given: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of attention, the float mask in the dtype of the query."""
    query = args[0] if args else given["query"]

    def wide(mask: Any) -> Any:
        real = isinstance(mask, torch.Tensor) and mask.is_floating_point()
        return mask.to(query.dtype) if real else mask

    new = {key: wide(value) if key == "attn_mask" else value for key, value in given.items()}
    return tuple(wide(value) if n == _MASK else value for n, value in enumerate(args)), new


def _has_floats(values: Sequence[Any]) -> bool:
    """Whether there is a float or complex tensor among the values, also inside lists."""
    return any(
        _has_floats(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        for value in values
    )
