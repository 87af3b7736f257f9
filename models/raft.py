"""torchvision's RAFT optical flow (https://arxiv.org/abs/2003.12039).

Any size in 135..2160 x 135..3840 is legal. RAFT itself needs multiples of 8 from 128. So the images
are padded by replication, like the original's InputPadder, and the flow is cropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import InputError
from pipeline.machine.libraries import import_torchvision
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.padding import Padding
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    import torch

_SEED = 0
_CORRELATIONS = ("volume", "on_demand")
_UPDATES = ("split", "torchvision")

# In pixels. Measured with the seeded weights and 12 updates over all sizes that are compared
# (largest flow 7 and 24 px). tests/models/test_raft.py plants the faults that have to be found; the
# smallest is an InstanceNorm epsilon of 1e-4 instead of 1e-5 in a single node.
_TOLERANCE = Tolerance(
    rtol=1e-4,
    atol=3e-4,
    why="px; ONNX Runtime is within 6e-5 of torch, the smallest planted fault gives 1.5e-3",
)
_TOLERANCE_SMALL = Tolerance(
    rtol=1e-4,
    atol=2e-3,
    why="px; ONNX Runtime is within 7e-4 of torch, the smallest planted fault gives 1.5e-2",
)

# Stated as about four times what was measured (docs/results/h200.md).
_ENGINE = {
    "tf32": Tolerance(1e-3, 5e-2, "px; an engine was within 1.2e-2 on an H200"),
    "fp16": Tolerance(1e-2, 1e-1, "px; an engine was within 2.8e-2 on an H200"),
}
_ENGINE_SMALL = {
    "tf32": Tolerance(1e-3, 3e-1, "px; an engine was within 7.4e-2 on an H200"),
    "fp16": Tolerance(1e-2, 3e-1, "px; half.onnx is within 6.7e-2; no engine was compared"),
}


def raft(*, updates: int = 12, correlation: str = "volume", update: str = "split") -> ModelSpec:
    """torchvision's raft_large.

    Args:
        updates: the number of flow updates, at least 1.
        correlation: ``volume`` correlates all pairs of pixels once, (H / 8 * W / 8) ** 2 floats.
            ``on_demand`` computes only the windows that an update reads, with the custom op
            CorrelationLookup (docs/guide/plugins.md). Use it for large images.
        update: how an update is computed; the function is the same. ``torchvision`` uses
            torchvision's code. ``split`` does less work per update (models/_raft_update.py).
    """
    return _spec("raft", "raft_large", updates, correlation, update, _TOLERANCE, _ENGINE)


def raft_small(
    *, updates: int = 12, correlation: str = "volume", update: str = "split"
) -> ModelSpec:
    """torchvision's raft_small; the arguments are `raft`'s."""
    return _spec(
        "raft_small", "raft_small", updates, correlation, update, _TOLERANCE_SMALL, _ENGINE_SMALL
    )


def _spec(
    name: str,
    constructor: str,
    updates: int,
    correlation: str,
    update: str,
    tolerance: Tolerance,
    engine_tolerance: Mapping[str, Tolerance],
) -> ModelSpec:
    if type(updates) is not int or updates < 1:
        raise InputError(f"model {name}: updates={updates!r} must be a whole number, at least 1")
    if correlation not in _CORRELATIONS:
        raise InputError(
            f"model {name}: correlation={correlation!r} must be {' or '.join(_CORRELATIONS)}"
        )
    if update not in _UPDATES:
        raise InputError(f"model {name}: update={update!r} must be {' or '.join(_UPDATES)}")

    def build(weights: Path | None) -> torch.nn.Module:
        return _build(constructor, updates, correlation, update, weights)

    h, w = Dim("h", 135, 440, 2160), Dim("w", 135, 1024, 3840)
    return ModelSpec(
        name=name,
        build=build,
        inputs=(Input("image1", (1, 3, h, w)), Input("image2", (1, 3, h, w))),
        outputs=(Output("flow", (1, 2, h, w), metric="end-point-error"),),
        tolerance=tolerance,
        engine_tolerance=engine_tolerance,
        padding=Padding({"h": 8, "w": 8}, mode="replicate", align="center"),
        libraries=("torch", "torchvision"),
        seed=_SEED,
        options={"updates": updates, "correlation": correlation, "update": update},
    )


def _build(
    constructor: str, updates: int, correlation: str, update: str, weights: Path | None
) -> torch.nn.Module:
    import torch

    import_torchvision()
    from torchvision.models import optical_flow

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = getattr(optical_flow, constructor)(weights=None)
    if weights is not None:
        load_weights(model, weights)
    if correlation == "on_demand":
        from pipeline.plugins.correlation_lookup.torch_op import OnDemandCorrelation

        model.corr_block = OnDemandCorrelation(model.corr_block.radius)
    if update == "split":
        from pipeline.models._raft_update import SplitRaft

        return SplitRaft(model, updates).eval()

    class LastFlow(torch.nn.Module):
        """RAFT with its last flow prediction, [1, 2, H, W] in pixels, as the only output."""

        def __init__(self) -> None:
            super().__init__()
            self.raft = model

        def forward(self, image1: torch.Tensor, image2: torch.Tensor) -> torch.Tensor:
            flows: list[torch.Tensor] = self.raft(image1, image2, num_flow_updates=updates)
            return flows[-1]

    return LastFlow().eval()
