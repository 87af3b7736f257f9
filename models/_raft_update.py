"""torchvision's RAFT with less work per update: the same function, computed in another order.

At every update, RAFT's GRU convolves cat([h, context, motion features]) for the gates z and r, and
cat([r * h, context, motion features]) for q. A convolution is linear in its input channels. The
context's part is the same at all updates, so it is computed once before them. The gates z and r are
one convolution with twice the output channels. The correlation is divided by the root of the
channels before its matrix product, not after it.

The context's part is stored negative and subtracted. TensorRT 8.6 fuses an addition into the
convolution before it. On Hopper only its Ampere kernels can do this, and they are twice as slow
(H200, 1x5, 128 to 384 channels, 55x128, tf32: 53 us with the addition, 25 us without;
docs/results/build-cost.md). A subtraction is computed together with the sigmoid or tanh after it.

Call `pipeline.machine.libraries.import_torchvision` before you import this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.optical_flow import raft as torchvision_raft


class SplitGRU(nn.Module):
    """torchvision's ConvGRU, its weights sliced by input channels and joined by gates.

    Args:
        gru: ``torchvision.models.optical_flow.raft.ConvGRU``; its input is
            [h | context | motion features], in this order. Its weights are copied.
        context: channels of the context.
    """

    def __init__(self, gru: Any, context: int) -> None:
        super().__init__()
        gates = (gru.convz, gru.convr, gru.convq)
        weight = torch.cat([gate.weight.detach() for gate in gates])
        bias = torch.cat([gate.bias.detach() for gate in gates])
        hidden = gru.convz.out_channels
        padding = gru.convz.padding
        end = hidden + context
        others = torch.cat([weight[:, :hidden], weight[:, end:]], dim=1)
        self.sizes = [2 * hidden, hidden]
        self.context = _convolution(-weight[:, hidden:end], -bias, padding)
        self.gates = _convolution(others[: 2 * hidden], None, padding)
        self.candidate = _convolution(others[2 * hidden :], None, padding)

    def forward(self, h: Tensor, motion: Tensor, context: Tensor) -> Tensor:
        """The next h.

        Args:
            h: [N, hidden, H, W].
            motion: the motion features, [N, channels, H, W].
            context: `self.context` of the context, [N, 3 * hidden, H, W]: of z, r, q, negative.
        """
        zr, q = torch.split(context, self.sizes, dim=1)
        gates = torch.sigmoid(self.gates(torch.cat([h, motion], dim=1)) - zr)
        z, r = torch.chunk(gates, 2, dim=1)
        q = torch.tanh(self.candidate(torch.cat([r * h, motion], dim=1)) - q)
        return (1 - z) * h + z * q


class ScaledCorrelation(torchvision_raft.CorrBlock):  # type: ignore[misc]
    """torchvision's CorrBlock, divided by the root of the channels before the product.

    So it divides N * H * W * channels elements, not N * (H * W)**2.
    """

    def _compute_corr_volume(self, fmap1: Tensor, fmap2: Tensor) -> Tensor:
        batch, channels, height, width = fmap1.shape
        root = float(np.sqrt(np.float32(channels)))  # rounded as torchvision's
        left = (fmap1 / root).view(batch, channels, height * width)
        right = fmap2.view(batch, channels, height * width)
        product = torch.matmul(left.transpose(1, 2), right)
        return product.view(batch, height, width, 1, height, width)


class SplitRaft(nn.Module):
    """Images [N, 3, H, W] in -1..1, H and W multiples of 8 from 128, to the flow after the last
    update, [N, 2, H, W] in pixels.

    Args:
        raft: ``torchvision.models.optical_flow.RAFT`` with its weights loaded; they are copied. Its
            ``corr_block`` may be another class with the same methods. `ScaledCorrelation` replaces
            torchvision's CorrBlock.
        updates: the number of flow updates.
    """

    def __init__(self, raft: Any, updates: int) -> None:
        super().__init__()
        self.raft = raft
        self.updates = updates
        own = raft.corr_block
        if type(own) is torchvision_raft.CorrBlock:
            own = ScaledCorrelation(num_levels=own.num_levels, radius=own.radius)
        self.correlation = own
        block = raft.update_block
        grus = [block.recurrent_block.convgru1]
        # RAFT-small has one; the other is a function that returns h unchanged
        if isinstance(block.recurrent_block.convgru2, nn.Module):
            grus.append(block.recurrent_block.convgru2)
        others = block.hidden_state_size + block.motion_encoder.out_channels
        self.grus = nn.ModuleList(SplitGRU(gru, gru.convz.in_channels - others) for gru in grus)

    def forward(self, image1: Tensor, image2: Tensor) -> Tensor:
        raft, block = self.raft, self.raft.update_block
        batch, _, height, width = image1.shape
        if image1.shape != image2.shape or height % 8 or width % 8:
            raise ValueError(
                f"images of {tuple(image1.shape)} and {tuple(image2.shape)}: the shapes must be "
                "equal, with H and W multiples of 8"
            )
        features = raft.feature_encoder(torch.cat([image1, image2], dim=0))
        self.correlation.build_pyramid(*torch.chunk(features, 2, dim=0))
        encoded = raft.context_encoder(image1)
        hidden = block.hidden_state_size
        h, context = torch.split(encoded, [hidden, encoded.shape[1] - hidden], dim=1)
        h, context = torch.tanh(h), functional.relu(context)
        halves = [(gru, gru.context(context)) for gru in cast(Iterable[SplitGRU], self.grus)]
        grid = torchvision_raft.make_coords_grid(batch, height // 8, width // 8).to(image1.device)
        position = grid
        for _ in range(self.updates):
            windows = self.correlation.index_pyramid(centroids_coords=position)
            motion = block.motion_encoder(position - grid, windows)
            for gru, part in halves:
                h = gru(h, motion, part)
            position = position + block.flow_head(h)
        mask = None if raft.mask_predictor is None else raft.mask_predictor(h)
        flow: Tensor = torchvision_raft.upsample_flow(flow=position - grid, up_mask=mask)
        return flow


def _convolution(weight: Tensor, bias: Tensor | None, padding: Any) -> nn.Conv2d:
    """A Conv2d of stride 1 with copies of this weight [out, in, height, width] and bias [out]."""
    outputs, inputs, height, width = weight.shape
    made = nn.Conv2d(
        inputs, outputs, (height, width), padding=padding, bias=bias is not None, device="meta"
    )
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made
