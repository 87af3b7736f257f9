"""How hard TensorRT's builder tries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError
from pipeline.machine.target import Target

LEVELS = range(6)


@dataclass(frozen=True)
class Effort:
    """How hard the builder tries, and what it remembers.

    Args:
        level: TensorRT's builder optimisation level, 0 (fast to build) to 5. None uses TensorRT's
            default (3).
        timing_cache: The file to read timings from and to write them to; None for no cache.
    """

    level: int | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in LEVELS:
            raise InputError(
                f"optimisation level {self.level}: must be {LEVELS[0]} to {LEVELS[-1]}"
            )


DEFAULT_EFFORT = Effort()


def check_effort(effort: Effort, target: Target) -> None:
    """Raises `InputError` for a timing cache if the target times no kernels when it builds."""
    if target.flavour == "tensorrt_rtx" and effort.timing_cache is not None:
        raise InputError(f"target {target}: times no kernels when it builds; omit the cache")
