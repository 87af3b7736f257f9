"""The precisions of an engine."""

from __future__ import annotations

from pipeline.errors import InputError
from pipeline.spec.tensors import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")


def check_precision(precision: str) -> None:
    """Raises `InputError` unless an engine can be built in that precision."""
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
