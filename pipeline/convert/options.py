"""The options of each stage, one class a stage.

The cache key of a stage includes all fields of its options. `pipeline.convert.keys.EXEMPT` lists
the fields that do not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.build.settings import BuildOptions
from pipeline.compare.plan import CompareOptions
from pipeline.machine.gpu import check_capabilities, parse_capabilities
from pipeline.machine.target import Target
from pipeline.rewrite.choose import pass_file
from pipeline.spec.config import Config
from pipeline.spec.effort import DEFAULT_EFFORT, Effort
from pipeline.spec.given import check_texts, named_fields
from pipeline.spec.model import ModelSpec
from pipeline.spec.plan_flags import PlanFlags, check_flags
from pipeline.spec.precision import AUTO, Asked
from pipeline.spec.tensors import Tolerance, check_tolerance


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of the export.

    Args:
        weights: A weights file or a checkpoint's folder; None for seeded random weights.
        seed: The seed of the example inputs' values.
        quick: Whether to look less far for branches behind other branches of the model.
    """

    weights: Path | None = None
    seed: int = 0
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """The options of the rewrite.

    Args:
        target: The TensorRT that the result is for.
        own: Python files with one user-supplied pass each.
        only, skip: Names of passes; see `pipeline.rewrite.choose.to_skip`.
        plugins: Plugins whose ops the rewrite keeps.
    """

    target: Target
    own: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageOptions:
    """The options of the four stages, in order."""

    export: ExportOptions
    rewrite: RewriteOptions
    build: BuildOptions
    compare: CompareOptions

    @property
    def by_stage(self) -> Mapping[str, object]:
        """The options by stage name."""
        return {name: getattr(self, name) for name in ("export", "rewrite", "build", "compare")}


def stage_options(config: Config, target: Target) -> StageOptions:
    """Returns the options of each stage for a config.

    Raises:
        InputError: The target does not build for a GPU that the config names, or lacks a flag.
    """
    gpus = parse_capabilities(config.gpus)
    check_capabilities(gpus, target)
    check_flags(config.flags, target)
    return StageOptions(
        ExportOptions(weights=config.weights_path, seed=config.seed, quick=config.quick),
        RewriteOptions(
            target=target,
            own=tuple(map(pass_file, config.passes)),
            skip=tuple(config.skip),
            plugins=tuple(config.plugins),
        ),
        BuildOptions(
            target,
            config.engine_precision,
            config.effort,
            tuple(config.plugins),
            config.stored_recipe,
            config.precision == AUTO,
            gpus=gpus,
            flags=config.flags,
        ),
        CompareOptions(
            memory_limit=config.memory_limit,
            seed=config.seed,
            shapes=tuple(config.shapes),
            quick=config.quick,
            plugins=tuple(config.plugins),
            host_code=config.flags.version_compatible,
        ),
    )


@named_fields
@dataclass(frozen=True, kw_only=True)
class Verify:
    """The options of a repeated comparison.

    Args:
        against: Another artifact, for the regression check.
        torch_model: Whether to make the torch model again and run it. Otherwise torch's stored
            outputs are the reference.
        spec: With `torch_model`: the spec object that the artifact was made from, if any.
        weights: With `torch_model`: the weights file that the artifact was made with.
        trust: With `torch_model`: whether to run the source that the manifest names. Without it,
            only models that come with pipeline run. A `spec` is your own.
        shapes: With `torch_model`: further sizes.
        memory_limit: The largest estimated memory of one run, in bytes.
        engine_tolerance: The new tolerance of the engine in the artifact's precision.
        plugins, host_code: The code that the engine may run; see `pipeline.load`.

    Raises:
        InputError: A field is unknown, or its value is of another kind.
    """

    against: Path | None = None
    torch_model: bool = False
    spec: ModelSpec | None = None
    weights: Path | None = None
    trust: bool = False
    shapes: tuple[str, ...] = ()
    memory_limit: int | None = None
    engine_tolerance: Tolerance | None = None
    plugins: tuple[str, ...] = ()
    host_code: bool = False

    def __post_init__(self) -> None:
        check_texts("shapes", self.shapes, "b=3")
        check_texts("plugins", self.plugins, "PLUGIN", (Path,))
        check_tolerance(self.engine_tolerance, "engine_tolerance")


STORED = Verify()  # the stored sizes and torch's stored outputs


@named_fields
@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """The options of a build of an artifact.

    Args:
        profiles: Profiles as text, in place of the artifact's.
        precision: The engine's precision; ``auto`` searches for a recipe. By default the
            artifact's precision, with its recipe.
        recipe: A recipe's file (`pipeline.spec.recipe`), in place of `precision`.
        target: The TensorRT that the engine is for; by default that of the artifact's rewrite.
        gpus: The kinds of GPU that the engine is for (``sm86``); see `Config.gpus`.
        plugins: The plugins that TensorRT loads first; see `pipeline.plugins.loading`.
        effort: The builder's effort, and a timing cache to share.
        flags: Where the plan runs, and whether its weights can be replaced. By default those
            of the artifact's engine; none for an engine beside it.

    Raises:
        InputError: A field is unknown, or its value is of another kind.
    """

    profiles: Sequence[str] = ()
    precision: Asked | None = None
    recipe: Path | None = None
    target: str | None = None
    gpus: Sequence[str] = ()
    plugins: Sequence[str] = ()
    effort: Effort = DEFAULT_EFFORT
    flags: PlanFlags | None = None

    @property
    def beside(self) -> bool:
        """True for an engine beside the artifact's own, which stays."""
        return self.target is not None or bool(self.gpus)

    def __post_init__(self) -> None:
        check_texts("profiles", self.profiles, "b=1:4:8")
        check_texts("gpus", self.gpus, "sm86")
        check_texts("plugins", self.plugins, "PLUGIN", (Path,))


AS_BEFORE = Rebuild()  # the artifact's own options
