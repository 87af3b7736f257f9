# ruff: noqa: E501
"""The patterns of docs/results/patterns.md: small torch modules with dynamic sizes.

Each pattern occurs in real models. The dims' opts are the sizes of the naive export's example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipeline.spec.dims import Dim
from pipeline.spec.model import Input

B = Dim("b", 1, 2, 4)
H, W = Dim("h", 16, 24, 90), Dim("w", 16, 32, 85)
H8, W8 = Dim("h", 16, 24, 64, multiple_of=8), Dim("w", 16, 32, 72, multiple_of=8)
D = Dim("d", 4, 6, 9)
T = Dim("t", 5, 12, 33)

IMAGE = Input("x", (1, 8, H, W))
IMAGE8 = Input("x", (1, 8, H8, W8))
BATCH = Input("x", (B, 8, H, W))
LINE = Input("x", (B, 8, T))
VOLUME = Input("x", (1, 8, D, H, W))
TOKENS = Input("x", (B, T, 32))
KEPT = Input("mask", (B, T), dtype="bool")
WORDS = Input("x", (B, T), dtype="int64", low=0, high=50)
SECOND = Input("y", (1, 8, H, W))


@dataclass(frozen=True)
class Pattern:
    """One row of the table.

    Args:
        name: The name in the table.
        build: Makes the module.
        inputs: The inputs with their dims.
        outputs: The number of tensors that the module returns.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...] = (IMAGE,)
    outputs: int = 1

    def module(self) -> nn.Module:
        """The module in eval mode, with the same weights each time."""
        torch.manual_seed(0)
        return self.build().eval()


class _One(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class _Two(_One):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.function(x, y)


def _of(name: str, function: Callable[..., Any], *inputs: Input, outputs: int = 1) -> Pattern:
    kind = _Two if len(inputs) == 2 else _One
    return Pattern(name, lambda: kind(function), inputs or (IMAGE,), outputs)


def _layer(name: str, build: Callable[[], nn.Module], *inputs: Input) -> Pattern:
    return Pattern(name, build, inputs or (IMAGE,))


class _First(nn.Module):
    """The first tensor of a layer's result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)[0]
        return result


class _Attention(nn.Module):
    """Self-attention with a bool mask of keys. Optionally, some rows have no key."""

    def __init__(self, *, self_too: bool) -> None:
        super().__init__()
        self.self_too = self_too

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        keep = mask[:, None, None, :]
        if self.self_too:
            keep = keep | torch.eye(x.shape[1], dtype=torch.bool)
        else:
            keep = keep & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        out = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=keep)
        return out.transpose(1, 2).flatten(2)


class _SkipSize(nn.Module):
    """A decoder that resizes to the size of its skip connection."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.down = nn.Conv2d(8, 8, 3, 2, 1)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.down(x)
        return x + functional.interpolate(small, size=x.shape[-2:], mode=self.mode)


class _RunningNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x)
        return result


def _pixel_unshuffle_by_hand(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // 2, 2, w // 2, 2)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)


def _pixel_shuffle_by_hand(x: torch.Tensor) -> torch.Tensor:
    n, _, h, w = x.shape
    return x.reshape(n, 2, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 2 * h, 2 * w)


def _channel_shuffle(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def _windows(x: torch.Tensor) -> torch.Tensor:
    """Swin's partition and its inverse, around a roll."""
    n, c, h, w = x.shape
    x = torch.roll(x, (-2, -2), (2, 3))
    parts = x.reshape(n, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 3, 5, 1).reshape(-1, 64, c)
    parts = parts.softmax(1).reshape(n, h // 8, w // 8, 8, 8, c)
    return torch.roll(parts.permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w), (2, 2), (2, 3))


def _grid(x: torch.Tensor) -> torch.Tensor:
    """A sampling grid near the identity, in -1 ... 1."""
    n, _, h, w = x.shape
    rows = torch.linspace(-1, 1, h).view(1, h, 1).expand(n, h, w)
    columns = torch.linspace(-1, 1, w).view(1, 1, w).expand(n, h, w)
    return torch.stack([columns, rows], -1) + 0.1 * x[:, :2].permute(0, 2, 3, 1)


def _pad_to(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, -x.shape[3] % 8, 0, -x.shape[2] % 8))


def _ceil_to(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(1, -(-x.shape[2] // 8) * 8, x.shape[3]) * x.mean()


def _masked_assignment(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y < 0] = 0.5
    return y


def _slice_assignment(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :, 1:-1, ::2] = x.mean()
    return y


def _scatter(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        index = (x.abs() * 7.99).long()
        base = torch.zeros(x.shape[0], x.shape[1], 8)
        if kind == "add":
            return base.scatter_add(2, index, x)
        if kind == "amax":
            return base.scatter_reduce(2, index, x, "amax", include_self=True)
        if kind == "mean":
            return base.scatter_reduce(2, index, x, "mean", include_self=False)
        return base.index_add(2, index[0, 0], x)

    return run


def _index_put(x: torch.Tensor) -> torch.Tensor:
    index = (x[0, 0].abs() * 7.99).long()
    return torch.zeros(8, 8).index_put((index,), x[0].T, accumulate=True)


def _affine(x: torch.Tensor) -> torch.Tensor:
    theta = torch.eye(2, 3)[None] + 0.1 * x.mean((2, 3))[:, :6].view(-1, 2, 3)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def _fft(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft2(x).abs()


def _fft_filter(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * 0.5, n=x.shape[-1], norm="ortho")


def _moments(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()


def _layer_norm_by_hand(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def _resize(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: functional.interpolate(x, **options)


PATTERNS: tuple[Pattern, ...] = (
    _layer("conv, norm, ReLU", lambda: nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()), BATCH),
    _layer("transposed conv", lambda: nn.ConvTranspose2d(8, 8, 4, 2, 1)),
    _layer("linear on tokens", lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), TOKENS),
    _layer("embedding", lambda: nn.Embedding(50, 16), WORDS),
    _layer("LSTM", lambda: _First(nn.LSTM(32, 16, batch_first=True)), TOKENS),
    _layer("GRU, both ways", lambda: _First(nn.GRU(32, 16, batch_first=True, bidirectional=True)), TOKENS),
    _layer("transformer layer", lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), TOKENS),
    Pattern("attention, mask of keys", lambda: _Attention(self_too=True), (TOKENS, KEPT)),
    Pattern("attention, fully masked rows", lambda: _Attention(self_too=False), (TOKENS, KEPT)),
    _of("attention, causal", lambda x: functional.scaled_dot_product_attention(*(x[:, None],) * 3, is_causal=True), TOKENS),
    _of("attention, 3-D", lambda x: functional.scaled_dot_product_attention(x, x, x), TOKENS),
    _layer("LayerNorm", lambda: nn.LayerNorm(32), TOKENS),
    _of("LayerNorm by hand", _layer_norm_by_hand, TOKENS),
    _layer("GroupNorm", lambda: nn.GroupNorm(4, 8), BATCH),
    _layer("InstanceNorm1d", lambda: nn.InstanceNorm1d(8, affine=True), LINE),
    _layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(8), BATCH),
    _layer("InstanceNorm3d", lambda: nn.InstanceNorm3d(8, affine=True), VOLUME),
    _layer("InstanceNorm, running statistics", _RunningNorm, BATCH),
    _of("normalisation by var", _moments, BATCH),
    _layer("PixelShuffle", lambda: nn.PixelShuffle(2)),
    _of("pixel shuffle by hand", _pixel_shuffle_by_hand),
    _layer("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), IMAGE8),
    _of("pixel unshuffle by hand", _pixel_unshuffle_by_hand, IMAGE8),
    _of("channel shuffle", _channel_shuffle),
    _of("shifted windows", _windows, IMAGE8),
    _of("nearest x2", _resize(scale_factor=2)),
    _of("nearest to 54x66", _resize(size=(54, 66))),
    _of("nearest x0.7", _resize(scale_factor=0.7)),
    _of("nearest-exact to 54x66", _resize(size=(54, 66), mode="nearest-exact")),
    _of("bilinear x2", _resize(scale_factor=2, mode="bilinear")),
    _of("bilinear x1.7, corners", _resize(scale_factor=1.7, mode="bilinear", align_corners=True)),
    _of("bilinear x0.7", _resize(scale_factor=0.7, mode="bilinear")),
    _of("bicubic to 54x66", _resize(size=(54, 66), mode="bicubic")),
    _of("trilinear x2", _resize(scale_factor=2, mode="trilinear"), VOLUME),
    _of("linear x1.5", _resize(scale_factor=1.5, mode="linear"), LINE),
    _of("area to 7x5", _resize(size=(7, 5), mode="area")),
    _of("antialias, bilinear to 14x14", _resize(size=(14, 14), mode="bilinear", antialias=True)),
    _of("antialias, bicubic x0.5", _resize(scale_factor=0.5, mode="bicubic", antialias=True)),
    _layer("resize to the skip, nearest", lambda: _SkipSize("nearest")),
    _layer("resize to the skip, bilinear", lambda: _SkipSize("bilinear")),
    _of("resize to the other input", lambda x, y: functional.interpolate(x[:, :, ::2], size=y.shape[2:]), IMAGE, SECOND),
    _of("adaptive average to 1", lambda x: functional.adaptive_avg_pool2d(x, 1)),
    _of("adaptive average to 7x5", lambda x: functional.adaptive_avg_pool2d(x, (7, 5))),
    _of("adaptive max to 7x5", lambda x: functional.adaptive_max_pool2d(x, (7, 5))),
    _of("adaptive average, 1-D", lambda x: functional.adaptive_avg_pool1d(x, 4), LINE),
    _of("adaptive average, 3-D", lambda x: functional.adaptive_avg_pool3d(x, (2, 3, 4)), VOLUME),
    _of("max pool, ceil_mode", lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    _of("average pool, ceil_mode", lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    _of("max pool with indices", lambda x: functional.max_pool2d(x, 2, return_indices=True), outputs=2),
    _of("max unpool", lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2), IMAGE8),
    _of("grid_sample", lambda x: functional.grid_sample(x, _grid(x), align_corners=True)),
    _of("affine_grid", _affine),
    _of("pad, reflect", lambda x: functional.pad(x, (3, 2, 1, 0), mode="reflect")),
    _of("pad, replicate", lambda x: functional.pad(x, (3, 2, 1, 0), mode="replicate")),
    _of("pad, circular", lambda x: functional.pad(x, (3, 2, 1, 0), mode="circular")),
    _of("pad to a multiple by %", _pad_to),
    _of("ceil of a size by //", _ceil_to),
    _of("int(size * 0.7)", lambda x: x[:, :, : int(x.shape[2] * 0.7)]),
    _of("// and % of integers", lambda x: torch.stack([((x * 9).long() // 4), (x * 9).long() % 4]).float()),
    _of("topk, k=10", lambda x: x.flatten(2).topk(10)[0]),
    _of("topk, a quarter", lambda x: x.topk(x.shape[2] // 4)[0].sum(-1), LINE),
    _of("sort", lambda x: x.sort(-1)[0], LINE),
    _of("median", lambda x: x.median(-1)[0], LINE),
    _of("argmax", lambda x: x.argmax(1)),
    _of("cumsum", lambda x: x.cumsum(-1)),
    _of("cumprod", lambda x: (1 + 0.1 * x).cumprod(-1), LINE),
    _of("einsum", lambda x: torch.einsum("nchw,nckw->nhk", x, x)),
    _of("cdist", lambda x: torch.cdist(x, x + 1), TOKENS),
    _of("roll", lambda x: torch.roll(x, (2, -3), (2, 3))),
    _of("flip", lambda x: x.flip(-1)),
    _of("split and cat", lambda x: torch.cat(x.split(3, 1)[::-1], 1)),
    _of("chunk a dynamic axis", lambda x: torch.cat([c.mean(2) for c in x.chunk(2, 2)], 1), IMAGE8),
    _of("index_select", lambda x: x.index_select(2, torch.tensor([3, 0, 1]))),
    _of("gather", lambda x: x.gather(1, x.argmax(1, keepdim=True))),
    _of("scatter_add", _scatter("add"), LINE),
    _of("scatter_reduce amax", _scatter("amax"), LINE),
    _of("scatter_reduce mean", _scatter("mean"), LINE),
    _of("index_put, accumulate", _index_put, LINE),
    _of("index_add", _scatter("index_add"), LINE),
    _of("boolean mask assignment", _masked_assignment),
    _of("slice assignment", _slice_assignment),
    _of("masked_fill", lambda x: x.masked_fill(x > 0.5, -math.inf).softmax(-1)),
    _of("boolean selection", lambda x: x[x > 0]),
    _of("nonzero", lambda x: (x > 0.5).nonzero(), LINE),
    _of("tril of a dynamic mask", lambda x: x * torch.ones(x.shape[1], x.shape[1]).tril().mean(-1)[:, None], TOKENS),
    _of("linspace over a size", lambda x: x + torch.linspace(0, 1, x.shape[3])),
    _of("meshgrid", lambda x: x + torch.stack(torch.meshgrid(torch.arange(x.shape[2]), torch.arange(x.shape[3]), indexing="ij")).sum(0)),
    _of("unfold", lambda x: functional.unfold(x, 3, padding=1)),
    _of("fold", lambda x: functional.fold(functional.unfold(x, 4, stride=4), x.shape[2:], 4, stride=4), IMAGE8),
    _of("rfft2, magnitude", _fft),
    _of("rfft and back", _fft_filter, LINE),
    _of("bitwise", lambda x: (((x * 9).int() & 5) ^ 3).float()),
    _of("logical", lambda x: ((x > 0) ^ (x.abs() < 0.5)).float()),
    _of("logsumexp", lambda x: x.logsumexp(1)),
    _of("norm over axes", lambda x: x / x.norm(dim=(1, 2), keepdim=True)),
    _of("softmax over a flat axis", lambda x: x.flatten(2).softmax(-1).mT),
    _of("output that is the input", lambda x: (x, x + 1), outputs=2),
    _of("output given twice", lambda x: (y := x + 1, y), outputs=2),
)  # fmt: skip
