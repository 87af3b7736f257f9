"""Gives padded positions of ``nn.TransformerEncoder`` the zeros that they have in eager mode.

Without gradients, the encoder makes a nested tensor of its input and ``src_key_padding_mask``, and
pads the result with zeros, if padding is at the end of each row only. While torch.export traces, it
computes the padded positions instead. Under `padded_rows` the last layer's output is 0 there too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pipeline.export.exchange import Exchange

_own: Any = nn.TransformerEncoder.forward


def _forward(
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    """``forward`` with zeros wherever the nested tensor of eager mode is padded."""
    padding = src_key_padding_mask
    if padding is None or mask is not None or not _nests(self, src):
        return _own(self, src, mask, padding, is_causal)
    kept = padding.logical_not()  # (batch, time)
    if getattr(self, "mask_check", True):
        at_end = torch.logical_or(kept[:, :-1], padding[:, 1:]).all()
        kept = torch.logical_or(kept, at_end.logical_not())
    else:  # eager mode keeps as many positions, counted from the start of each row
        kept = torch.arange(padding.shape[1]) < kept.sum(1, keepdim=True)
        padding = kept.logical_not()

    def zeroed(layer: nn.Module, args: Any, made: torch.Tensor) -> torch.Tensor:
        del layer, args
        return torch.where(kept[:, :, None], made, 0.0)

    hook = self.layers[-1].register_forward_hook(zeroed)
    try:
        return _own(self, src, mask, padding, is_causal)
    finally:
        hook.remove()


def _nests(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """Whether the encoder makes nested tensors in eager mode, as far as its inputs don't matter."""
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not encoder.layers[0].training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
    )


_exchange = Exchange({(nn.TransformerEncoder, "forward"): _forward})


def padded_rows() -> AbstractContextManager[None]:
    """Zeroes padded positions of ``nn.TransformerEncoder``, for all threads."""
    return _exchange.used()
