"""What each stage is asked to do beside its input: one object a stage.

The cache key of a stage is made of its object (`pipeline.convert.keys`). So a new field counts
for the key unless it is named there as one that does not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.build.settings import BuildOptions
from pipeline.compare.stage import CompareOptions
from pipeline.machine.target import Target
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec
from pipeline.spec.tensors import Tolerance


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a model becomes ONNX.

    Args:
        weights: a weights file or a checkpoint's folder; None for seeded random weights.
        seed: for the example inputs' values.
    """

    weights: Path | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """Which passes run, and for which TensorRT.

    Args:
        target: the TensorRT that the result is for.
        own: Python files with a user's pass each.
        only, skip: names of passes; see `pipeline.rewrite.choose.to_skip`.
        plugins: ops that stay because the target has a plugin for them.
    """

    target: Target
    own: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageOptions:
    """The options of the four stages, in their order."""

    export: ExportOptions
    rewrite: RewriteOptions
    build: BuildOptions
    compare: CompareOptions

    @property
    def by_stage(self) -> Mapping[str, object]:
        """Stage name to its options."""
        return {name: getattr(self, name) for name in ("export", "rewrite", "build", "compare")}


def stage_options(config: Config, target: Target) -> StageOptions:
    """What a conversion asks of each stage."""
    return StageOptions(
        ExportOptions(weights=config.weights_path, seed=config.seed),
        RewriteOptions(
            target=target,
            own=tuple(Path(path) for path in config.passes),
            skip=tuple(config.skip),
            plugins=tuple(config.plugins),
        ),
        BuildOptions(target, config.precision, config.effort, tuple(config.plugins)),
        CompareOptions(
            memory_limit=config.memory_limit,
            seed=config.seed,
            shapes=tuple(config.shapes),
            plugins=tuple(config.plugins),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Verify:
    """How an artifact is compared again.

    Args:
        against: another artifact, for the regression check.
        torch_model: True to make the torch model again and run it. Otherwise torch's stored
            outputs are the reference.
        spec: what the artifact was made from, for `torch_model`, if that is no model of the zoo.
        weights: the weights file that the artifact was made with, for `torch_model`.
        shapes: further sizes, for `torch_model`.
        memory_limit: bytes that a run may take by its estimate.
        engine_tolerance: the tolerance of an engine of the artifact's precision from now on.
        plugins: files that the engine may load; see `pipeline.load`.
    """

    against: Path | None = None
    torch_model: bool = False
    spec: ModelSpec | None = None
    weights: Path | None = None
    shapes: tuple[str, ...] = ()
    memory_limit: int | None = None
    engine_tolerance: Tolerance | None = None
    plugins: tuple[str, ...] = ()


STORED = Verify()  # at the stored sizes, with the stored outputs of torch
