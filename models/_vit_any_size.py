"""torchvision's VisionTransformer for images of any whole number of patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class AnySize(nn.Module):
    """Image [batch, 3, h, w] to logits [batch, classes], h and w multiples of the patch's size.

    The position embedding was trained for a square of patches. It is resized to the image's patches
    like DINOv2's ``interpolate_pos_encoding`` (https://arxiv.org/abs/2304.07193): bicubic and
    antialiased. The class token's embedding is unchanged.

    Args:
        vit: a ``torchvision.models.VisionTransformer`` without a convolutional stem.
    """

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit
        self.side = vit.image_size // vit.patch_size

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        patches = self.vit.conv_proj(image)
        size = patches.shape[-2:]
        token = self.vit.class_token.expand(image.shape[0], -1, -1)
        x = torch.cat((token, patches.flatten(2).transpose(1, 2)), dim=1)
        encoder = self.vit.encoder
        x = encoder.ln(encoder.layers(encoder.dropout(x + self.position(size))))
        logits: torch.Tensor = self.vit.heads(x[:, 0])
        return logits

    def position(self, size: torch.Size) -> torch.Tensor:
        """The position embedding [1, 1 + height * width, channels of a token] for these patches."""
        embedding: torch.Tensor = self.vit.encoder.pos_embedding
        square = embedding[:, 1:].transpose(1, 2).reshape(1, -1, self.side, self.side)
        resized = functional.interpolate(square, size=size, mode="bicubic", antialias=True)
        return torch.cat((embedding[:, :1], resized.flatten(2).transpose(1, 2)), dim=1)
