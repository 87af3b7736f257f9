"""Runs a whole conversion (`run`), or one of its stages alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest, now
from pipeline.artifact.stored import has_stored
from pipeline.build.settings import BuildOptions
from pipeline.compare.plan import CompareOptions
from pipeline.compare.regression import regression
from pipeline.compare.run_names import TORCH
from pipeline.convert.add_engine import add_engine
from pipeline.convert.disagreement import check_code, disagreement
from pipeline.convert.failed import failed_place, forget_failed, kept_if_failed
from pipeline.convert.options import (
    AS_BEFORE,
    STORED,
    Rebuild,
    RewriteOptions,
    Verify,
    stage_options,
)
from pipeline.convert.plan import (
    ConversionPlan,
    chosen_profiles,
    initial_manifest,
    plan_conversion,
    with_profiles,
)
from pipeline.convert.recipe import Search, precision_and_recipe
from pipeline.convert.reference import needed_options, rebuilt, reference_runner
from pipeline.convert.report import Report
from pipeline.convert.reuse import drop_damaged, keep_timings, refuse_other, sizes_compared
from pipeline.convert.shared import push_result
from pipeline.convert.stages import BUILD, COMPARE, EXPORT, REWRITE
from pipeline.convert.workspace import Workspace, new_artifact, opened_artifact
from pipeline.errors import ArtifactError, InputError
from pipeline.graph.external_data import check_models
from pipeline.machine.gpu import check_capabilities, parse_capabilities
from pipeline.machine.progress import Announce, silent
from pipeline.machine.target import find_target, require
from pipeline.probe.state import left_as_given
from pipeline.runtime.trust import check_given
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import check_rules
from pipeline.spec.effort import check_effort
from pipeline.spec.file_names import PLAN, RECIPE
from pipeline.spec.model import ModelSpec
from pipeline.spec.plan_flags import NO_FLAGS, check_flags
from pipeline.spec.precision import AUTO, check_precision
from pipeline.spec.profiles import Profile, parse_sizes
from pipeline.spec.runner import Runner

LEFT_OUT = (
    f"{RECIPE}, the artifact's recipe: --precision replaces it. Leave out --precision to keep a "
    "recipe, or apply one with --recipe FILE"
)


def run(config: Config | str | ModelSpec, announce: Announce = silent) -> Report:
    """Converts a model (export, rewrite, build, compare) and writes the artifact.

    Args:
        config: What to convert. A model's name or a spec alone uses the defaults.
        announce: Called with each step that begins: ``rewrite``, ``export: trying sizes``. If the
            artifact exists, the text of a stage has its last time: ``build (last time 117 s)``.

    Returns:
        The report. `Report.unchanged` is True if the artifact was up to date.

    Raises:
        CompareError: Results differ beyond the tolerance. If only half precision does, the
            artifact is written, and its manifest says that the comparison failed. It does not
            replace an artifact whose comparison passed.
        PipelineError: See `pipeline.errors`. The old artifact stays. It is an `InputError` if the
            old artifact was made from another source and `Config.force` is not set. If the last
            line of another error begins with ``kept:``, it names files for you to look at.
    """
    config = config if isinstance(config, Config) else Config(config)
    with ExitStack() as stack:
        plan = plan_conversion(config, stack, announce)
        if plan.old is not None and not plan.todo:
            unchanged = Report(plan.place, plan.old.manifest, unchanged=True, ran=())
            return push_result(unchanged, plan.shared, announce)
        options, spec = plan.options, stack.enter_context(left_as_given(plan.spec))
        work = _workspace(plan, stack, announce)
        stack.enter_context(kept_if_failed(work, plan.todo[0]))
        if EXPORT.name in plan.todo:
            if not config.force:
                refuse_other(plan.place, plan.manifest)
            if plan.old is not None:
                keep_timings(plan.place, work.folder)
        exported = work.do(EXPORT, spec, options.export, announce)
        work.do(REWRITE, options.rewrite)
        declared = with_profiles(work.manifest, plan.spec.profiles)
        search = Search(replace(work.manifest, interface=declared), options.compare, announce)
        work.do(BUILD, search, options.build)
        module = exported.module if exported is not None else None
        reference = reference_runner(spec, work.manifest, options.export.weights, module)
        work.do(COMPARE, work.manifest, reference, options.compare, announce)
        failed = disagreement(work)
        if failed is not None and not failed.written:
            raise failed
        announce("package")
        # without its key, the comparison runs again in the next conversion
        keys = {name: key for name, key in plan.keys.items() if not failed or name != COMPARE.name}
        report = Report(plan.place, work.finish(keys=keys, created=now()), ran=plan.todo)
        with suppress(OSError):
            forget_failed(failed_place(plan.place))
    if failed is not None:
        raise failed
    report = replace(report, removed=tuple(work.removed))  # known when the folder is replaced
    return push_result(report, plan.shared, announce)


def _workspace(plan: ConversionPlan, stack: ExitStack, announce: Announce) -> Workspace:
    if plan.shared is not None and plan.shared.work is not None:
        plan.shared.work.resume(plan.manifest, plan.todo)
        return plan.shared.work
    if EXPORT.name in plan.todo:
        return stack.enter_context(new_artifact(plan.place, plan.manifest, announce))
    assert plan.old is not None
    return stack.enter_context(opened_artifact(plan.old, announce, plan.manifest, plan.todo))


def run_export(config: Config, announce: Announce = silent) -> Report:
    """Runs the export stage alone. The new artifact contains exported.onnx and a manifest.

    Raises:
        PipelineError: See `pipeline.errors`. It is an `InputError` for a recipe, or a search for
            one: these belong to the build.
    """
    if config.recipe is not None or config.precision == AUTO:
        raise InputError("the build applies a recipe. Pass precision auto or a recipe to run_build")
    spec = find_source(config)
    target = find_target(config.target)
    check_precision(config.engine_precision, target)
    profiles = chosen_profiles(config, spec)
    options = stage_options(config, target)
    place, manifest = config.place(spec), initial_manifest(config, spec)
    with left_as_given(spec) as spec, new_artifact(place, manifest, announce) as work:
        if not config.force:
            refuse_other(place, manifest)
        work.do(EXPORT, replace(spec, profiles=profiles), options.export, announce)
        return Report(place, work.finish(), stage=EXPORT.name)


def run_rewrite(
    place: Path,
    target: str | None = None,
    announce: Announce = silent,
    *,
    own: Sequence[Path | str] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> Report:
    """Runs the rewrite stage alone.

    Args:
        place: The artifact's folder.
        target: A name in `pipeline.machine.target.TARGETS`; the artifact's target by default.
        announce: Called with the name of the stage.
        own: Python files with one user-supplied pass each.
        only, skip: Names of passes; see `pipeline.rewrite.choose.to_skip`.
        plugins: Plugins whose ops the rewrite keeps.
    """
    artifact = Artifact.open(place)
    check_models(place, artifact.manifest.files, artifact.manifest.interface)
    options = RewriteOptions(
        target=find_target(target or artifact.manifest.target.name),
        own=tuple(Path(path) for path in own),
        only=tuple(only),
        skip=tuple(skip),
        plugins=tuple(plugins),
    )
    with opened_artifact(artifact, announce) as work:
        work.do(REWRITE, options)
        return Report(place, work.finish(keys={}), stage=REWRITE.name)


def run_build(
    place: Path | str, how: Rebuild = AS_BEFORE, announce: Announce = silent, **fields: Any
) -> Report:
    """Runs the build stage alone, or adds an engine for another target or other GPUs.

    Only the files that the build reads must be undamaged. A damaged plan is built again, and
    damaged files of the comparison are removed.

    Args:
        place: The artifact's folder.
        how: The options of the build. With `target` or `gpus`, the new engine gets its own folder
            in the artifact's ``engines`` (`pipeline.convert.add_engine`).
        announce: Called with the name of the stage, and with each removed file.
        **fields: Fields of `how` that are other than in it, such as ``precision``.
    """
    place, how = Path(place), replace(how, **fields)
    artifact = Artifact.open(place, built=False)
    check_models(place, artifact.manifest.files, artifact.manifest.interface)
    parsed = [Profile.parse(text, f"profile{n}") for n, text in enumerate(how.profiles)]
    target = find_target(how.target or artifact.manifest.target.name)
    require(target)
    precision, recipe = precision_and_recipe(artifact, how.precision, how.recipe)
    left = not how.beside and how.precision not in (None, AUTO) and how.recipe is None
    removed = [LEFT_OUT] if left and RECIPE in artifact.manifest.files else []
    before = artifact.manifest.precision
    if not how.beside and precision != before and PLAN in artifact.manifest.files:
        removed.append(f"the engine in {before}: this one replaces it. --gpu adds one beside it")
    options = BuildOptions(
        target, precision, how.effort, tuple(how.plugins), recipe, how.precision == AUTO,
        gpus=parse_capabilities(how.gpus) if how.beside else artifact.manifest.target.gpus,
        flags=how.flags or (NO_FLAGS if how.beside else artifact.manifest.flags),
    )  # fmt: skip
    report = build_artifact(artifact, options, parsed, announce, beside=how.beside)
    return replace(report, removed=tuple(removed))


def build_artifact(
    artifact: Artifact,
    options: BuildOptions,
    profiles: Sequence[Profile] = (),
    announce: Announce = silent,
    *,
    beside: bool = False,
) -> Report:
    """Runs the build stage alone; see `run_build`.

    Args:
        artifact: The artifact, opened without its built files.
        options: The options of the build.
        profiles: Profiles in place of the artifact's; none to keep these.
        announce: Called with the name of the stage, and with each removed file.
        beside: Whether to keep the artifact's engine, and to put the new one in ``engines``.
    """
    interface = artifact.manifest.interface
    if profiles:
        interface = with_profiles(artifact.manifest, profiles)
    for profile in interface.profiles:
        profile.resolve(interface.dims)
    check_precision(options.precision, options.target)
    check_effort(options.effort, options.target)
    check_capabilities(options.gpus, options.target)
    check_flags(options.flags, options.target)
    if beside:
        return add_engine(artifact, interface, options, announce)
    with opened_artifact(artifact, announce) as work:
        for name in drop_damaged(work.folder, work.manifest):
            announce(f"removed {name}: the file was changed or damaged")
        manifest = replace(work.manifest, interface=interface)
        work.do(BUILD, Search(manifest, CompareOptions(), announce), options)
        return Report(artifact.path, work.finish(keys={}), stage=BUILD.name)


def compare_again(
    artifact: Artifact,
    manifest: Manifest,
    reference: Runner | None,
    options: CompareOptions,
    announce: Announce,
    *,
    code: bool = False,
) -> Manifest:
    """Runs the comparison of an artifact, and writes the result into it, also if it fails.

    Args:
        artifact: The artifact.
        manifest: Its manifest, or one with other tolerances.
        reference: See `pipeline.compare.stage.compare_artifact`.
        options: The options of the comparison.
        announce: Called with each step that begins.
        code: Whether `reference` is made from the source that the manifest names. If the comparison
            fails, and that code was changed, an error says so and nothing is written.
    """
    stated = artifact.manifest
    with opened_artifact(artifact, announce, manifest) as work:
        work.do(COMPARE, work.manifest, reference, options, announce, artifact.path)
        done = work.manifest
        assert done.comparison is not None
        passed = done.comparison.passed
        if code and not passed:
            check_code(stated, done.comparison, artifact.path)
        # without its keys, the artifact is compared again by the next conversion
        good = passed and sizes_compared(stated) <= sizes_compared(done) and manifest == stated
        return work.finish(keys=done.keys if good else {})


def verify(
    place: Path | str, how: Verify = STORED, announce: Announce = silent, **fields: Any
) -> Report:
    """Runs the comparison alone, also for an artifact from another machine.

    Writes the result into the artifact, also if the comparison fails.

    Args:
        place: The artifact's folder.
        how: The reference, the sizes, and the other artifact to compare with.
        announce: Called with each step that begins.
        **fields: Fields of `how` that are other than in it, such as ``against``.

    Raises:
        PipelineError: See `pipeline.errors`.
    """
    if not isinstance(how, Verify):
        raise InputError(f"verify: {how!r} is not a Verify. Write a name, such as against={how!r}")
    place, how = Path(place), replace(how, **fields)
    artifact = Artifact.open(place)
    check_models(place, artifact.manifest.files, artifact.manifest.interface)
    stated = artifact.manifest
    check_given(stated, how.plugins, str(place))
    if how.weights is not None and not how.torch_model:
        raise InputError(
            f"weights {how.weights}: only the torch model reads weights. Pass --torch too"
        )
    if how.trust and not how.torch_model:
        raise InputError("--trust: only the torch model runs a source. Pass --torch too")
    if stated.reference == TORCH and not how.torch_model and not has_stored(place, TORCH):
        raise ArtifactError(
            f"{place}: no outputs of torch are stored to compare with; pass "
            f"{' '.join(needed_options(stated))} to run it"
        )
    old = Artifact.open(how.against) if how.against is not None else None
    for text in how.shapes:
        sizes = parse_sizes(text, stated.interface.dims, stated.merged)
        check_rules(stated.interface.rules, sizes, f"shape {text!r}")
    options = CompareOptions(
        memory_limit=how.memory_limit, seed=0, shapes=how.shapes, plugins=how.plugins,
        host_code=how.host_code,
    )  # fmt: skip
    manifest = stated
    if how.engine_tolerance is not None:
        own = {**stated.interface.engine_tolerance, stated.precision: how.engine_tolerance}
        manifest = replace(stated, interface=replace(stated.interface, engine_tolerance=own))
    with ExitStack() as stack:
        if how.spec is not None:
            how = replace(how, spec=stack.enter_context(left_as_given(how.spec)))
        reference = rebuilt(stated, how, str(place)) if how.torch_model else None
        named = how.torch_model and how.spec is None
        done = compare_again(artifact, manifest, reference, options, announce, code=named)
    if old is None:
        return Report(place, done, stage=COMPARE.name)
    found = regression(Artifact.open(place), old, announce, how.plugins, how.host_code)
    return Report(place, done, regressions=found.worse, notes=found.notes, stage=COMPARE.name)
