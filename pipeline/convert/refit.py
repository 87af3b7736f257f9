"""Replaces the weights of an artifact's engine, and compares it like a new build.

Passes fold and merge constants, so the new weights go through the export and the rewrite too. The
new ONNX file must have the same structure as the artifact's. Then TensorRT replaces the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.engines import outer_artifact
from pipeline.artifact.manifest import BuildInfo, now
from pipeline.artifact.values import filled
from pipeline.build import refit as refitting
from pipeline.build.build import Built
from pipeline.build.settings import BuildOptions
from pipeline.compare.engine_runs import why_not_run
from pipeline.compare.plan import CompareOptions
from pipeline.convert.disagreement import disagreement, unwritten
from pipeline.convert.options import ExportOptions, RewriteOptions
from pipeline.convert.plan import initial_manifest
from pipeline.convert.recipe import Search, decided, precision_and_recipe
from pipeline.convert.reference import reference_runner
from pipeline.convert.report import Report
from pipeline.convert.reuse import check_not_replaced, refuse_other
from pipeline.convert.stages import BUILD, COMPARE, EXPORT, REWRITE, BuiltEngine, record_build
from pipeline.convert.workspace import Stage, Workspace, new_artifact
from pipeline.errors import CompareError, InputError, TargetMissing
from pipeline.graph.external_data import check_models
from pipeline.machine.progress import Announce, silent
from pipeline.machine.target import find_target
from pipeline.models import MODELS
from pipeline.passes import DEFAULT_PASSES
from pipeline.probe.state import left_as_given
from pipeline.runtime.trust import allowed_plugins, check_given
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.effort import Effort
from pipeline.spec.file_names import HALF, MODEL, PLAN
from pipeline.spec.given import check_texts, named_fields
from pipeline.spec.model import ModelSpec, holds_weights
from pipeline.spec.plan_flags import check_flags


@named_fields
@dataclass(frozen=True, kw_only=True)
class Refit:
    """The options of a refit.

    Args:
        out: The folder of the new artifact; by default the artifact is replaced.
        trust: Whether to run the source that the manifest names. Without it, only models that come
            with pipeline run.
        plugins: Files that the engine may load; see `pipeline.load`.
    """

    out: Path | str | None = None
    trust: bool = False
    plugins: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        check_texts("plugins", tuple(self.plugins), "PLUGIN", (Path,))


IN_PLACE = Refit()


def refit(
    place: Path | str,
    weights: Path | str,
    how: Refit = IN_PLACE,
    announce: Announce = silent,
    **fields: Any,
) -> Report:
    """Replaces the weights of an artifact's engine, and compares the result like a build.

    Args:
        place: The artifact's folder. Its engine was built with `PlanFlags.refit`.
        weights: A weights file or a checkpoint's folder, as for a conversion. For an artifact of an
            ``.onnx`` file or a ``.pt2`` program: that file with the new weights.
        how: Where the result goes, and what may run.
        announce: Called with the name of each stage.
        **fields: Fields of `how` that are other than in it, such as ``out``.

    Returns:
        The report on the new artifact.

    Raises:
        InputError: The engine can't be refitted, the weights do not fit the model, or they make a
            graph of another structure. The message says what to do.
        TargetMissing: The engine does not run here.
        CompareError: Results differ beyond the tolerance, or a profile of the engine was not
            compared. Nothing is written, and the old artifact stays.
        PipelineError: See `pipeline.errors`. The old artifact stays.
    """
    place, weights, how = Path(place), Path(weights), replace(how, **fields)
    artifact = Artifact.open(place)
    check_models(place, artifact.manifest.files, artifact.manifest.interface)
    built = _refittable(artifact, how)
    config = _config(artifact, weights, how)
    old, target = artifact.manifest, find_target(artifact.manifest.target.name)
    plugins = allowed_plugins(old, how.plugins, str(place))
    precision, recipe = precision_and_recipe(artifact, None, None)
    options = BuildOptions(
        target, precision, Effort(built.optimization_level), plugins, recipe, flags=built.flags
    )
    out = Path(how.out or place)
    with ExitStack() as stack:
        spec = stack.enter_context(left_as_given(_spec(config, artifact)))
        manifest = replace(initial_manifest(config, spec), name=old.name, precision=precision)
        work = stack.enter_context(new_artifact(out, manifest, announce))
        if out.resolve() == place.resolve():
            check_not_replaced(place, old, place)
        else:
            refuse_other(out, manifest)
        export = ExportOptions(weights=config.weights_path)
        exported = work.do(EXPORT, spec, export, announce)
        skip = tuple(p.name for p in old.rewrite.passes if p.skipped) if old.rewrite else ()
        work.do(REWRITE, RewriteOptions(target=target, skip=skip, plugins=plugins))
        refit_engine(work, artifact, options, announce)
        module = exported.module if exported is not None else None
        reference = reference_runner(spec, work.manifest, export.weights, module)
        compared = CompareOptions(plugins=tuple(map(str, how.plugins)))
        work.do(COMPARE, work.manifest, reference, compared, announce)
        if failed := disagreement(work, keep=False):
            raise failed
        if not work.manifest.engine_compared:
            raise CompareError(
                f"model {old.name}: the refitted engine was not compared "
                f"({work.manifest.engine_compared_why}); {out} {unwritten(out)}"
            )
        return Report(out, work.finish(keys={}, created=now()))


def refit_engine(
    work: Workspace, artifact: Artifact, options: BuildOptions, announce: Announce
) -> None:
    """Refits an artifact's engine with the rewritten model of a workspace, in place of a build.

    Args:
        work: The workspace, after the rewrite.
        artifact: The artifact of the engine.
        options: The options of the engine's build.
        announce: Called with the name of the stage.

    Raises:
        InputError, BuildError: See `pipeline.build.refit.refit`; or model.onnx has another
            structure than the artifact's.
    """
    interface = artifact.manifest.interface.with_tolerances(work.manifest.interface)
    work.manifest = replace(work.manifest, interface=interface)
    work.do(_REFIT, artifact, options, Search(work.manifest, CompareOptions(), announce))


def _refitted(
    folder: Path, artifact: Artifact, options: BuildOptions, search: Search
) -> BuiltEngine:
    """Runs the refit in a folder with the new model.onnx."""
    old = artifact.manifest
    assert old.build is not None
    refitting.check_structure(artifact.path / MODEL, folder / MODEL)
    options, half = decided(folder, options, search)
    (folder / PLAN).write_bytes(artifact.read(PLAN))
    done = refitting.refit(folder / PLAN, folder / MODEL, artifact.path / HALF, options)
    plan = Built(
        str(old.target.version),
        done.plan_bytes,
        old.build.validity,
        old.build.layers,
        old.build.warnings,
        done.library_seconds,
        old.build.plugins,
        done.peak_memory,
    )
    return BuiltEngine(
        plan,
        search.manifest.interface,
        options,
        dict(old.build.plugin_hashes),
        old.build.gpu,
        old.target.compute_capabilities,
        half,
        old.files[PLAN].sha256,
    )


_REFIT = Stage(BUILD.name, _refitted, record_build)


def _refittable(artifact: Artifact, how: Refit) -> BuildInfo:
    """The facts of the build of an engine that can be refitted here.

    Raises:
        InputError, TargetMissing: It can't be.
    """
    manifest, place = artifact.manifest, artifact.path
    again = "Convert again with the new weights"
    target = find_target(manifest.target.name)
    built = manifest.build
    if built is None or PLAN not in manifest.files:
        raise InputError(f"{place}: has no {PLAN} yet. {again}")
    if target.flavour == "tensorrt_rtx":
        raise InputError(f"{place}: plans of {target} are not refitted. {again}")
    if not built.flags.refit:
        raise InputError(
            f"{place}: its engine was built without --refit, so its weights are fixed. Run "
            f"`pipeline build {quote(str(place))} --refit`, then refit"
        )
    check_flags(built.flags, target)
    outer = outer_artifact(place)
    if outer is not None and how.out is None:
        raise InputError(f"{place}: is an engine of {outer}. Pass another folder with --out DIR")
    known = {one.name for one in DEFAULT_PASSES}
    passes = manifest.rewrite.passes if manifest.rewrite is not None else ()
    foreign = [one.name for one in passes if one.name not in known]
    if foreign:
        raise InputError(
            f"{place}: was rewritten with your own pass {foreign[0]}, which is not in the "
            f"artifact. {again}"
        )
    check_given(manifest, how.plugins, str(place))
    if why := why_not_run(place, target, manifest):
        raise TargetMissing(f"{place}: a refit needs the engine to run here, but {why}")
    return built


def _config(artifact: Artifact, weights: Path, how: Refit) -> Config:
    """The conversion of the artifact's source, with other weights.

    Raises:
        InputError: The source can't be made again, or may not run, or does not take these weights.
    """
    manifest, place = artifact.manifest, artifact.path
    info = manifest.model
    if info.source.startswith("spec:"):
        raise InputError(
            f"{place}: was made from a spec object, {info.source}. Convert that object again with "
            "the new weights"
        )
    if manifest.reference == "reference":
        raise InputError(
            f"{place}: was compared with another ONNX file, which the artifact does not have. "
            "Convert again with --reference"
        )
    if not weights.exists():
        raise InputError(f"weights {weights}: no such file")
    own = holds_weights(info.source)
    suffix = Path(info.source).suffix
    if own and weights.suffix != suffix:
        raise InputError(
            f"weights {weights}: {info.source} holds its weights. Pass a {suffix} file with the "
            "new ones"
        )
    if not own and info.source not in MODELS and not how.trust:
        raise InputError(
            f"{place}: a refit would run {info.source}, which the artifact's manifest names. If "
            "you trust it, add --trust (in Python: trust=True)"
        )
    return Config(
        str(weights) if own else info.source,
        options=info.options,
        weights=None if own else weights,
        target=manifest.target.name,
        inputs=info.inputs,
        dims=info.dims,
        ranges=info.ranges,
        dtype=info.dtype,
        trust=how.trust,
    )


def _spec(config: Config, artifact: Artifact) -> ModelSpec:
    """The spec of the source, with what the artifact records beside the source."""
    manifest = filled(artifact.manifest, artifact.path)
    interface = manifest.interface
    spec = find_source(config)
    values = {i.name: i.values for i in interface.inputs}
    names = tuple(output.name for output in interface.outputs)
    return replace(
        spec,
        inputs=tuple(replace(i, values=values.get(i.name)) for i in spec.inputs),
        rules=tuple(dict.fromkeys((*spec.rules, *interface.rules))),
        profiles=interface.profiles,
        engine_tolerance=interface.engine_tolerance,
        output_names=spec.output_names if spec.outputs or spec.onnx is not None else names,
    )
