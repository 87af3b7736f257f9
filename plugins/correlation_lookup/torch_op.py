"""The correlation lookup in torch: the op, and RAFT's correlation block made of it.

RAFT (https://arxiv.org/abs/2003.12039) correlates every pixel of one feature map with every pixel
of the other and looks windows up in that volume: (H * W) ** 2 floats, 67 GB for the first level
of a 2160x3840 image. The op computes only the windows that are asked for. Averaging the volume
over its last two axes is the same as averaging the second feature map, since each entry is a sum
of products with it; so the pyramid is one of feature maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.plugins.base import DOMAIN
from pipeline.plugins.correlation_lookup.function import LEVELS

_CHUNK = 1 << 24  # elements of the second feature map that are gathered at a time


@torch.library.custom_op(f"{DOMAIN}::correlation_lookup", mutates_args=())
def correlation_lookup(
    features: Tensor, levels: Sequence[Tensor], coordinates: Tensor, radius: int
) -> Tensor:
    """Dot products of each pixel's features with those of windows of the other map.

    Equal to torchvision's CorrBlock up to rounding, without the all-pairs volume; computed row by
    row in float32.

    Args:
        features: [N, H, W, C] of the first feature map, channels last, float32 or float16.
        levels: the second feature map and what is left of it after each halving,
            [N, h, w, C], channels last, of the dtype of `features`.
        coordinates: [N, 2, H, W], x and y of the window's centre in pixels of level 0, float32.
        radius: the window is 2 * radius + 1 pixels wide and high.

    Returns:
        [N, levels * (2 * radius + 1) ** 2, H, W], the dtype of `features`: dot products divided
        by sqrt(C), bilinearly interpolated, zero beyond the map's border; level by level, within
        a level the offset in x changes slowest.
    """
    batch, height, width, channels = features.shape
    positions = (2 * radius + 2) ** 2
    rows = max(1, _CHUNK // max(1, batch * width * positions * channels))
    parts = []
    for top in range(0, height, rows):
        query = features[:, top : top + rows].flatten(1, 2)
        centre = coordinates[:, :, top : top + rows].flatten(2)
        windows = [
            _window(level, query, centre / 2**number, radius) for number, level in enumerate(levels)
        ]
        found = torch.cat(windows, dim=2).transpose(1, 2)
        parts.append(found.reshape(batch, found.shape[1], -1, width))
    return torch.cat(parts, dim=2).to(features.dtype).contiguous()


@correlation_lookup.register_fake
def _(features: Tensor, levels: Sequence[Tensor], coordinates: Tensor, radius: int) -> Tensor:
    del coordinates
    batch, height, width, _ = features.shape
    return features.new_empty((batch, len(levels) * (2 * radius + 1) ** 2, height, width))


def _window(level: Tensor, query: Tensor, centre: Tensor, radius: int) -> Tensor:
    """[N, Q, (2 * radius + 1) ** 2] float32, of query [N, Q, C] and centre [N, 2, Q].

    All offsets are whole pixels, so the windows' points share one fractional part: dot products
    are taken at whole positions, one more than the window is wide, and blended.
    """
    batch, height, width, channels = level.shape
    origin = centre.floor()
    blend = (centre - origin)[..., None, None]
    steps = torch.arange(-radius, radius + 2, device=centre.device)
    x, y = origin[:, 0, :, None] + steps, origin[:, 1, :, None] + steps
    inside_x, inside_y = (x >= 0) & (x <= width - 1), (y >= 0) & (y <= height - 1)
    inside = inside_x[..., :, None] & inside_y[..., None, :]
    column, row = torch.where(inside_x, x, 0).long(), torch.where(inside_y, y, 0).long()
    image = torch.arange(batch, device=centre.device)[:, None, None, None] * (height * width)
    index = (image + row[..., None, :] * width + column[..., :, None]).flatten(2)
    near = level.reshape(-1, channels)[index].float()
    dots = (near @ query[..., None].float() / channels**0.5).view(inside.shape)
    dots = torch.where(inside, dots, 0.0)
    dots = dots[:, :, :-1] + (dots[:, :, 1:] - dots[:, :, :-1]) * blend[:, 0]
    dots = dots[..., :-1] + (dots[..., 1:] - dots[..., :-1]) * blend[:, 1]
    return dots.flatten(2)


class OnDemandCorrelation(torch.nn.Module):
    """Takes the place of torchvision's CorrBlock in RAFT; keeps feature maps instead of a volume.

    Args:
        radius: as CorrBlock's: 4 in RAFT-large, 3 in RAFT-small.
    """

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius
        self.out_channels = LEVELS * (2 * radius + 1) ** 2
        self._features: Tensor | None = None
        self._levels: list[Tensor] = []

    def build_pyramid(self, first: Tensor, second: Tensor) -> None:
        """Keeps both feature maps [N, C, H, W], the second one at each level, channels last."""
        smallest = 2**LEVELS
        if first.shape != second.shape or min(first.shape[2:]) < smallest:
            raise ValueError(
                f"feature maps of {tuple(first.shape)} and {tuple(second.shape)}: must be equal, "
                f"H and W at least {smallest}"
            )
        maps = [second]
        while len(maps) < LEVELS:
            maps.append(functional.avg_pool2d(maps[-1], kernel_size=2, stride=2))
        self._features = first.permute(0, 2, 3, 1).contiguous()
        self._levels = [each.permute(0, 2, 3, 1).contiguous() for each in maps]

    def index_pyramid(self, centroids_coords: Tensor) -> Tensor:
        """The windows [N, out_channels, H, W] round coordinates [N, 2, H, W]."""
        if self._features is None:
            raise RuntimeError("index_pyramid comes after build_pyramid")
        windows: Tensor = correlation_lookup(
            self._features, self._levels, centroids_coords, self.radius
        )
        return windows
