"""A super-resolution UNet in plain torch: sub-pixel stem and head, resized skips, any size.

The parts are those of the field: space to depth before the convolutions (ESPCN's sub-pixel
convolution, https://arxiv.org/abs/1609.05158, backwards at the stem and forwards at the head),
a UNet whose decoder resizes to the size of its skip (https://arxiv.org/abs/1505.04597),
nearest and convolution instead of a deconvolution, and the bicubic upsampling of the image as
global skip (https://arxiv.org/abs/1511.04587).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

SCALE = 2
_LEVELS = 3
_GROUPS = 4


class UNet(nn.Module):
    """Image [batch, 3, h, w] to image [batch, 3, 2*h, 2*w], h and w odd or even.

    Args:
        channels: of the convolutions at half the image's size; a multiple of 4. Each further
            level has twice as many.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels << level for level in range(_LEVELS)]
        self.unshuffle = nn.PixelUnshuffle(SCALE)
        self.stem = nn.Conv2d(3 * SCALE**2, channels, 3, padding=1)
        self.encoder = nn.ModuleList(_block(width, width) for width in widths)
        self.down = nn.ModuleList(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1) for width in widths[:-1]
        )
        self.decoder = nn.ModuleList(_block(3 * width, width) for width in widths[-2::-1])
        self.refine = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.head = nn.Conv2d(channels // 2, 3 * SCALE**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(SCALE)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        h, w = image.shape[-2:]
        even = functional.pad(image, (0, -w % SCALE, 0, -h % SCALE), mode="replicate")
        x = self.stem(self.unshuffle(even))
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.down[level - 1](x))
            skips.append(x)
        skips.pop()
        for block in self.decoder:
            skip = skips.pop()
            x = functional.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = block(torch.cat((x, skip), dim=1))
        x = functional.interpolate(x, scale_factor=SCALE, mode="nearest")
        x = functional.leaky_relu(self.refine(x), 0.1)
        detail = self.shuffle(self.head(x))[..., : SCALE * h, : SCALE * w]
        coarse = functional.interpolate(image, scale_factor=SCALE, mode="bicubic")
        return torch.add(coarse, detail)


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.GroupNorm(_GROUPS, after),
        nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.GroupNorm(_GROUPS, after),
        nn.SiLU(),
    )
