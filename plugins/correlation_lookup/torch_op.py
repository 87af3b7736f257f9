"""The correlation lookup in torch: the op, and RAFT's correlation block that uses it.

RAFT (https://arxiv.org/abs/2003.12039) correlates every pixel of one feature map with every pixel
of the other, and looks windows up in this volume. It has (H * W) ** 2 floats: 67 GB for the first
level of a 2160x3840 image. The op computes only the windows that are looked up. Each entry of the
volume is a sum of products with the second feature map. So averaging the volume over its last two
axes equals averaging the second feature map, and the pyramid holds feature maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.plugins.base import DOMAIN
from pipeline.plugins.correlation_lookup.function import LEVELS

_CHUNK = 1 << 24  # elements of the second feature map gathered at a time


@torch.library.custom_op(f"{DOMAIN}::correlation_lookup", mutates_args=())
def correlation_lookup(
    features: Tensor, levels: Sequence[Tensor], coordinates: Tensor, radius: int
) -> Tensor:
    """Dot products of each pixel's features with those of windows of the other map.

    Equal to torchvision's CorrBlock up to rounding, without the all-pairs volume. Computed row by
    row in float32.

    Args:
        features: the first feature map, [N, H, W, C], channels last, float32 or float16.
        levels: the second feature map, and the same map after each halving, [N, h, w, C],
            channels last, with the dtype of `features`.
        coordinates: [N, 2, H, W], x and y of the window's centre in pixels of level 0, float32.
        radius: the window is 2 * radius + 1 pixels wide and high.

    Returns:
        [N, levels * (2 * radius + 1) ** 2, H, W], with the dtype of `features`. Dot products are
        divided by sqrt(C), interpolated bilinearly, and zero beyond the map's border. They are
        ordered by level. Within a level the offset in x changes slowest.
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
    """[N, Q, (2 * radius + 1) ** 2] float32, from query [N, Q, C] and centre [N, 2, Q].

    All offsets are whole pixels, so the points of a window share one fractional part. Dot products
    are computed at whole positions, one more per axis than the window has, and then blended.
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
    """Replaces torchvision's CorrBlock in RAFT. It keeps feature maps instead of a volume.

    Args:
        radius: CorrBlock's radius: 4 in RAFT-large, 3 in RAFT-small.
    """

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius
        self.out_channels = LEVELS * (2 * radius + 1) ** 2
        self._features: Tensor | None = None
        self._levels: list[Tensor] = []

    def build_pyramid(self, first: Tensor, second: Tensor) -> None:
        """Keeps the first feature map [N, C, H, W], and each level of the second, channels last."""
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
        """The windows [N, out_channels, H, W] around coordinates [N, 2, H, W]."""
        if self._features is None:
            raise RuntimeError("call index_pyramid after build_pyramid")
        windows: Tensor = correlation_lookup(
            self._features, self._levels, centroids_coords, self.radius
        )
        return windows
