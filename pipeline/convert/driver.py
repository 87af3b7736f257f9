"""run(): one conversion from a model to an artifact, and each of its stages alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact.artifact import Artifact, finish
from pipeline.artifact.manifest import Manifest, now
from pipeline.compare.regression import regression
from pipeline.compare.runners import failures
from pipeline.compare.stage import CompareOptions, compare_stage
from pipeline.convert import stages
from pipeline.convert.initial import chosen_profiles, draft
from pipeline.convert.keys import STAGES, stage_keys
from pipeline.convert.reference import rebuilt, reference_module
from pipeline.convert.reuse import (
    drop_damaged,
    first_changed,
    previous,
    refuse_other,
    sizes_compared,
    still,
)
from pipeline.convert.stages import measured
from pipeline.errors import CompareError, InputError
from pipeline.machine.files import write_whole
from pipeline.machine.progress import Announce
from pipeline.machine.resources import default_limit
from pipeline.machine.swap_folder import replacing
from pipeline.machine.target import find_target, require
from pipeline.runtime.trust import check_given
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import check_rules
from pipeline.spec.effort import DEFAULT_EFFORT, Effort, check_effort
from pipeline.spec.file_names import TIMING
from pipeline.spec.findings import Note
from pipeline.spec.model import ModelSpec
from pipeline.spec.precision import check_precision
from pipeline.spec.profiles import Profile, parse_sizes
from pipeline.spec.tensors import Precision, Tolerance

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Report:
    """What a conversion or a stage did; the same facts as the artifact's manifest.

    Args:
        path: the artifact's folder.
        manifest: what stands in its ``manifest.json``.
        unchanged: True if nothing had to be done.
        regressions: what got worse against another artifact.
        notes: what else that check found.
    """

    path: Path
    manifest: Manifest
    unchanged: bool = False
    regressions: Sequence[Note] = ()
    notes: Sequence[Note] = ()

    @property
    def ok(self) -> bool:
        """True if nothing that was compared disagreed."""
        comparison = self.manifest.comparison
        return not self.regressions and (comparison is None or comparison.passed)


def quiet(_: str) -> None:
    """Announces nothing."""


def run(config: Config | str | ModelSpec, announce: Announce = quiet) -> Report:
    """Converts a model: export, rewrite, build, compare, and leaves the artifact.

    Args:
        config: what to convert; a model's name or a spec alone takes the defaults.
        announce: is told in words what begins.

    Returns:
        The report; `Report.unchanged` where the artifact was already there.

    Raises:
        PipelineError: see `pipeline.errors`. The artifact that was there before stays.
            `InputError` where it was made from another source, unless `Config.force` is set.
    """
    if not isinstance(config, Config):
        config = Config(config)
    spec = find_source(config)
    target = find_target(config.target)
    require(target)
    check_precision(config.precision)
    check_effort(config.effort, target)
    profiles = chosen_profiles(config, spec)
    for text in config.shapes:
        check_rules(spec.rules, parse_sizes(text, spec.dims), f"shape {text!r}")
    place = config.place(spec)
    keys = stage_keys(config, spec, target, profiles)
    old = None if config.force else previous(place)
    first = first_changed(old, keys)
    if old is not None and first == len(STAGES):
        return Report(place, old.manifest, unchanged=True)
    manifest = draft(config, spec)
    if old is not None and first > 0:  # the spec's tolerance is no matter to the stages before
        interface = old.manifest.interface.with_tolerances(spec.interface)
        manifest = replace(old.manifest, interface=interface)
    todo = STAGES[first:]
    module: torch.nn.Module | None = None
    with replacing(place, keep=first > 0) as folder:
        if first == 0 and not config.force:
            refuse_other(place, manifest.model.source)
        if old is not None and first > 0:
            still(folder, old.manifest, place)
        elif old is not None and (place / TIMING).is_file():
            write_whole(folder / TIMING, (place / TIMING).read_bytes())
        if "export" in todo:

            def export() -> tuple[Manifest, Mapping[str, float]]:
                nonlocal module
                done, module, libraries = stages.export_stage(
                    folder, manifest, spec, profiles, config.weights_path, config.seed
                )
                return done, libraries

            manifest = measured("export", announce, export)
        if "rewrite" in todo:
            manifest = measured(
                "rewrite",
                announce,
                lambda: stages.rewrite_stage(
                    folder,
                    manifest,
                    target,
                    own=config.passes,
                    skip=config.skip,
                    plugins=config.plugins,
                ),
            )
        if "build" in todo:
            manifest = measured(
                "build",
                announce,
                lambda: stages.build_stage(
                    folder, manifest, config.precision, profiles, config.plugins, config.effort
                ),
            )
        options = CompareOptions(
            memory_limit=config.memory_limit or default_limit(),
            seed=config.seed,
            shapes=config.shapes,
            plugins=config.plugins,
        )
        manifest = measured(
            "compare",
            announce,
            lambda: compare_stage(
                folder,
                manifest,
                _reference(spec, manifest, config, module),
                options,
                announce,
            ),
        )
        assert manifest.comparison is not None
        if not manifest.comparison.passed:
            raise _disagreement(manifest, place)
        announce("package")
        manifest = finish(folder, replace(manifest, keys=keys, created=now()))
    return Report(place, manifest)


def run_export(config: Config, announce: Announce = quiet) -> Report:
    """The export stage alone: a new artifact that holds exported.onnx and nothing else."""
    spec = find_source(config)
    check_precision(config.precision)
    profiles = chosen_profiles(config, spec)
    place = config.place(spec)
    manifest = draft(config, spec)
    with replacing(place, keep=False) as folder:
        if not config.force:
            refuse_other(place, manifest.model.source)

        def export() -> tuple[Manifest, Mapping[str, float]]:
            done, _, libraries = stages.export_stage(
                folder, manifest, spec, profiles, config.weights_path, config.seed
            )
            return done, libraries

        done = finish(folder, measured("export", announce, export))
    return Report(place, done)


def run_rewrite(
    place: Path,
    target: str | None = None,
    announce: Announce = quiet,
    *,
    own: Sequence[Path | str] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> Report:
    """The rewrite stage alone, for the artifact's target or for another one.

    Args:
        place: the artifact.
        target: a name out of `pipeline.machine.target.TARGETS`.
        announce: is told in words what begins.
        own: Python files with a pass of one's own each.
        only, skip: names of passes; see `pipeline.rewrite.choose.to_skip`.
        plugins: ops that TensorRT shall run by a plugin.
    """
    manifest = Artifact.open(place).manifest
    chosen = find_target(target or manifest.target.name)
    with replacing(place, keep=True) as folder:
        still(folder, manifest, place)
        done = measured(
            "rewrite",
            announce,
            lambda: stages.rewrite_stage(
                folder, manifest, chosen, own=own, only=only, skip=skip, plugins=plugins
            ),
        )
        done = finish(folder, replace(done, keys={}))
    return Report(place, done)


def run_build(
    place: Path,
    profiles: Sequence[str] = (),
    precision: Precision | None = None,
    announce: Announce = quiet,
    plugins: Sequence[str] = (),
    effort: Effort = DEFAULT_EFFORT,
) -> Report:
    """The build stage alone, for the target that the artifact was rewritten for.

    Only what the build reads has to be whole: a damaged plan is built anew, and damaged files of
    the comparison go.
    """
    manifest = Artifact.open(place, built=False).manifest
    parsed = [Profile.parse(text, f"profile{n}") for n, text in enumerate(profiles)]
    for profile in parsed:
        profile.resolve(manifest.interface.dims)
    chosen: Any = precision or manifest.precision
    target = find_target(manifest.target.name)
    require(target)
    check_precision(chosen)
    check_effort(effort, target)
    with replacing(place, keep=True) as folder:
        still(folder, manifest, place)
        for name in drop_damaged(folder, manifest):
            announce(f"{name} is not as it was written: removed")
        done = measured(
            "build",
            announce,
            lambda: stages.build_stage(folder, manifest, chosen, parsed, plugins, effort),
        )
        done = finish(folder, replace(done, keys={}))
    return Report(place, done)


def run_verify(
    place: Path,
    *,
    against: Path | None = None,
    torch_model: bool = False,
    spec: ModelSpec | None = None,
    weights: Path | None = None,
    shapes: Sequence[str] = (),
    memory_limit: int | None = None,
    engine_tolerance: Tolerance | None = None,
    announce: Announce = quiet,
    plugins: Sequence[str] = (),
) -> Report:
    """The comparison alone, on an artifact, perhaps one made on another machine.

    The result is written into the artifact, whether it passed or not.

    Args:
        place: the artifact.
        against: another artifact, for the regression check.
        torch_model: make the torch model again and run it; otherwise torch's stored outputs
            are what everything is held against.
        spec: what the artifact was made from, for `torch_model`, where that is no model of
            the zoo.
        weights: the weights file that the artifact was made with, for `torch_model`.
        shapes: further sizes, for `torch_model`.
        memory_limit: bytes a run may take by its estimate.
        engine_tolerance: what an engine of the artifact's precision is held to from now on.
        announce: is told in words what begins.
        plugins: files that the engine may load; see `pipeline.load`.
    """
    artifact = Artifact.open(place)
    manifest = artifact.manifest
    check_given(manifest, plugins, str(place))
    if weights is not None and not torch_model:
        raise InputError(f"weights {weights}: they are for the torch model: give --torch as well")
    old = Artifact.open(against) if against is not None else None
    for text in shapes:
        sizes = parse_sizes(text, manifest.interface.dims)
        check_rules(manifest.interface.rules, sizes, f"shape {text!r}")
    module = rebuilt(manifest, spec, weights) if torch_model else None
    options = CompareOptions(
        memory_limit=memory_limit or default_limit(), seed=0, shapes=shapes, plugins=plugins
    )
    with replacing(place, keep=True) as folder:
        still(folder, manifest, place)
        held = manifest
        if engine_tolerance is not None:
            declared = manifest.interface
            own = {**declared.engine_tolerance, manifest.precision: engine_tolerance}
            held = replace(manifest, interface=replace(declared, engine_tolerance=own))
        done = measured(
            "compare",
            announce,
            lambda: compare_stage(
                folder,
                held,
                module,
                options,
                announce,
                place,
            ),
        )
        # otherwise the next conversion has something to do
        good = done.comparison is not None and done.comparison.passed
        good = good and sizes_compared(manifest) <= sizes_compared(done) and held == manifest
        done = finish(folder, done if good else replace(done, keys={}))
    if old is None:
        return Report(place, done)
    found = regression(Artifact.open(place), old, announce, plugins)
    return Report(place, done, regressions=found.worse, notes=found.notes)


def _reference(
    spec: ModelSpec, manifest: Manifest, config: Config, module: torch.nn.Module | None
) -> torch.nn.Module | None:
    """The torch reference; None where the source is an ONNX file."""
    if spec.onnx is not None:
        return None
    return reference_module(spec, manifest, config.weights_path, module)


def _disagreement(manifest: Manifest, place: Path) -> CompareError:
    assert manifest.comparison is not None
    lines = failures(manifest.comparison)
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return CompareError(
        f"model {manifest.name}: {lines[0]}{more}; {place} was "
        + ("left as it was" if place.exists() else "not made"),
        detail="\n".join(lines),
    )
