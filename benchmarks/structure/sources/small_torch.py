"""Small torch models with what the strangers do not have: equal dims, and a program for .pt2."""

from __future__ import annotations

import torch
from torch import nn


class Correlation(nn.Module):
    """Adds what a convolution makes of an image and of its transpose: h and w have to be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return torch.relu(y + y.transpose(2, 3))


class Cell(nn.Module):
    """A batch of rows through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def square() -> nn.Module:
    torch.manual_seed(0)
    return Correlation()


def cell() -> nn.Module:
    torch.manual_seed(0)
    return Cell()


class Tail(nn.Module):
    """Blocks of four behind the first value: the length has to be one more than a multiple of 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x[:, 1:].unflatten(1, (-1, 4))
        return torch.tanh(blocks).sum(2) + x[:, :1]


def tail() -> nn.Module:
    return Tail()
