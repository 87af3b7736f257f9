"""The names of the runs that a comparison can hold."""

from __future__ import annotations

TORCH, EXPORTED, REWRITTEN, HALF, ENGINE = "torch", "exported", "rewritten", "half", "engine"


def is_engine(run: str) -> bool:
    """True for the run of an engine, in whichever profile."""
    return run == ENGINE or run.startswith(f"{ENGINE}-")


def in_precision(run: str) -> bool:
    """True for a run in the engine's precision: that of an engine, and of half.onnx."""
    return run == HALF or is_engine(run)
