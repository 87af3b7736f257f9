"""One linear layer from a file: exported by torch, saved, loaded, then converted."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import InputError
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    import torch

_SEED = 0
_BATCH = (1, 8, 64)
_TOLERANCE = Tolerance(
    rtol=1e-5,
    atol=2e-6,
    why="measured: float32 rounding is at most 2.4e-7 over every batch, for outputs up to 1.3; a "
    "weight that is off by 1 % changes an output by at least 1e-4",
)

_HALF = Tolerance(2e-3, 2e-3, "half.onnx is within 4.8e-4; no engine was compared")


def linear(*, inputs: int = 64, outputs: int = 32) -> ModelSpec:
    """``torch.nn.Linear``, saved as a ``.pt2`` for any batch and loaded again.

    Args:
        inputs: the number of input features.
        outputs: the number of output features.
    """
    for word, value in (("inputs", inputs), ("outputs", outputs)):
        if type(value) is not int or value < 1:
            raise InputError(f"model linear: {word}={value!r} must be a whole number, at least 1")

    def build(weights: Path | None) -> torch.nn.Module:
        return _build(inputs, outputs, weights)

    batch = Dim("batch", *_BATCH)
    return ModelSpec(
        name="linear",
        build=build,
        inputs=(Input("x", (batch, inputs)),),
        outputs=(Output("y", (batch, outputs)),),
        tolerance=_TOLERANCE,
        engine_tolerance={"fp16": _HALF},
        libraries=("torch",),
        seed=_SEED,
        options={"inputs": inputs, "outputs": outputs},
    )


def save_linear(path: Path, inputs: int, outputs: int, weights: Path | None = None) -> None:
    """Saves the layer as an ExportedProgram for any batch in the spec's range.

    The example's batch is not 1: torch.export treats a size of 1 as a constant.
    """
    import torch

    from pipeline.models._seeded import seeded

    layer = seeded(lambda: torch.nn.Linear(inputs, outputs), _SEED)
    if weights is not None:
        load_weights(layer, weights)
    low, opt, high = _BATCH
    batch = torch.export.Dim("batch", min=low, max=high)
    program = torch.export.export(
        layer, (torch.zeros(opt, inputs),), dynamic_shapes=({0: batch},), strict=False
    )
    torch.export.save(program, path)


def _build(inputs: int, outputs: int, weights: Path | None) -> torch.nn.Module:
    from pipeline.export.program import ProgramModule, load_program

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "linear.pt2"
        save_linear(path, inputs, outputs, weights)
        return ProgramModule(load_program(path))
