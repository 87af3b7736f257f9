"""A model of the zoo for torch: padded and cropped, with half-precision weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def half_type(device: str) -> Any:
    """The dtype of autocast."""
    import torch

    return torch.float16 if device == "cuda" else torch.bfloat16  # CPUs have kernels for bfloat16


def store_half(module: Any, half: Any) -> None:
    """Stores weights in the type that autocast casts them to.

    This applies to weights that only layers with a computation in that type read. autocast itself
    would cast each weight at every call. It caches only weights that require gradients, and these
    do not. Under torch.compile it never caches.
    """
    from torch import nn

    kinds = (
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.MultiheadAttention,
    )  # fmt: skip
    owners = [(owner, p) for owner in module.modules() for p in owner.parameters(recurse=False)]
    others = {id(p) for owner, p in owners if not isinstance(owner, kinds)}
    for _, parameter in owners:
        if id(parameter) not in others and parameter.is_floating_point():
            parameter.data = parameter.data.to(half)


def flat(result: Any) -> list[Any]:
    """The tensors in a model's result, in order."""
    from pipeline.export.module import flat_outputs

    return list(flat_outputs(result))


def module_of(spec: Any, weights: Path | None) -> Any:
    """The spec's module, called with its inputs in order. Pads and crops if the spec says so."""
    import torch
    from torch.nn.functional import pad

    from pipeline.export.module import flat_outputs, made
    from pipeline.export.padding import factors
    from pipeline.spec.dims import Dim
    from pipeline.spec.padding import amounts

    spec, module = made(spec, weights)
    if spec.padding is None:
        return module
    padding = spec.padding
    outputs = [output.shape for output in spec.outputs]

    class Padded(torch.nn.Module):
        """The padding of the exported graph, as a user would write it in torch."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before, sizes, padded = {}, {}, []
            for tensor, declared in zip(args, spec.inputs, strict=True):
                amount = [0] * (2 * tensor.ndim)
                for axis, size in enumerate(declared.shape):
                    if isinstance(size, Dim) and size.name in padding.multiples:
                        n = sizes[size.name] = tensor.shape[axis]
                        low, high = amounts(n, padding.multiples[size.name], padding.align)
                        before[size.name] = low
                        place = 2 * (tensor.ndim - 1 - axis)
                        amount[place : place + 2] = [low, high]
                while amount and amount[-2:] == [0, 0]:
                    del amount[-2:]
                wide = amount + [0] * (-len(amount) % 4) if amount else amount
                padded.append(pad(tensor, wide, mode=padding.mode) if wide else tensor)
            found = []
            for tensor, shape in zip(flat_outputs(self.inner(*padded)), outputs, strict=True):
                for axis, size in enumerate(shape or ()):
                    for name, factor in factors(size, padding.multiples):
                        start = factor * before[name]
                        tensor = tensor.narrow(axis, start, factor * sizes[name])  # noqa: PLW2901
                found.append(tensor)
            return tuple(found)

    return Padded()
