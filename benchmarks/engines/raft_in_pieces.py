"""torchvision's RAFT for images whose correlation volume does not fit into a GPU's memory.

The numbers are those of torchvision's code. The volume of all pairs of pixels is [H*W, 1, H, W],
with the sizes of the feature maps: 62.6 GiB for images of 2160x3840. Here, each lookup computes it
anew, a few rows of pixels at a time, and gives each part to torchvision's lookup. Sizes must be
multiples of 8, because nothing is padded.

    python3 benchmarks/engines/torch_baselines.py raft --option correlation=volume
        --option update=torchvision --option updates=12
        --module benchmarks/engines/raft_in_pieces.py:raft --artifact ARTIFACT
        --variant eager-fp32 --shape h=2160,w=3840 --reference DIR
    python benchmarks/engines/run_engine.py engine ARTIFACT --shape h=2160,w=3840 --reference DIR

The first stores torch's outputs, and the second prints the engine's distance to them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.machine.libraries import import_torchvision
from pipeline.source.zoo import find_spec

if TYPE_CHECKING:
    import torch

PART_BYTES = 2**31  # of the volume at once


def raft() -> torch.nn.Module:
    """The zoo's RAFT with 12 updates, as torchvision wrote it, with its correlation in parts."""
    import torch
    from torch.nn.functional import avg_pool2d

    import_torchvision()
    from torchvision.models.optical_flow.raft import CorrBlock

    class InPieces(CorrBlock):
        def build_pyramid(self, fmap1: torch.Tensor, fmap2: torch.Tensor) -> None:
            self.maps = (fmap1, fmap2)

        def index_pyramid(self, centroids_coords: torch.Tensor) -> torch.Tensor:
            first, second = self.maps
            _, channels, height, width = first.shape
            rows = max(1, PART_BYTES // (4 * width * height * width))
            found = []
            for start in range(0, height, rows):
                part = first[:, :, start : start + rows].flatten(2).transpose(1, 2)
                volume = torch.matmul(part, second.flatten(2)) / math.sqrt(channels)
                self.corr_pyramid = [volume.view(-1, 1, height, width)]
                while len(self.corr_pyramid) < self.num_levels:
                    self.corr_pyramid.append(avg_pool2d(self.corr_pyramid[-1], 2, 2))
                coords = centroids_coords[:, :, start : start + rows]
                found.append(super().index_pyramid(coords))
            return torch.cat(found, 2)

    module = find_spec("raft", {"update": "torchvision"}, None).build(None)
    own = module.raft.corr_block
    module.raft.corr_block = InPieces(num_levels=own.num_levels, radius=own.radius)
    return module
