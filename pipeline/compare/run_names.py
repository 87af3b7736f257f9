"""The names of the runs in a comparison."""

from __future__ import annotations

TORCH, EXPORTED, REWRITTEN, HALF, ENGINE = "torch", "exported", "rewritten", "half", "engine"
REFERENCE = "reference"  # another ONNX file, see `pipeline.spec.model.ModelSpec.reference`


def is_engine(run: str) -> bool:
    """Returns True for the run of an engine, in any profile."""
    return run == ENGINE or run.startswith(f"{ENGINE}-")


def in_precision(run: str) -> bool:
    """Returns True for a run in the engine's precision: an engine, or half.onnx."""
    return run == HALF or is_engine(run)
