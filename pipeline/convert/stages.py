"""The four stages: the work of each in an artifact's folder, and its record in the manifest.

A stage reads the files of the stage before and adds its own. So each stage can run alone, later, on
another machine. `pipeline.convert.workspace` runs and measures the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import (
    BuildInfo,
    DynamicInfo,
    ExportInfo,
    Manifest,
    RewriteInfo,
    TargetInfo,
)
from pipeline.artifact.values import store_values
from pipeline.build import build as building
from pipeline.build.build import Built
from pipeline.build.settings import BuildOptions
from pipeline.compare import run_names
from pipeline.compare.stage import compare_artifact, record
from pipeline.convert.options import ExportOptions, RewriteOptions
from pipeline.convert.recipe import Search, decided
from pipeline.convert.reuse import remove_built
from pipeline.convert.workspace import Stage
from pipeline.errors import ArtifactError
from pipeline.machine.files import fresh, hash_file, write_whole
from pipeline.machine.gpu import capability_text, find_gpu
from pipeline.machine.libraries import versions
from pipeline.machine.progress import Announce, silent
from pipeline.machine.resources import Stopwatch, release_memory
from pipeline.machine.target import Target, find_target
from pipeline.plugins import PLUGINS
from pipeline.plugins.loading import provided_ops
from pipeline.rewrite import rewrite as rewriting
from pipeline.rewrite.choose import all_passes, to_skip
from pipeline.rewrite.rewrite import Rewritten, raise_refused
from pipeline.source.imports import given_file, imports_of
from pipeline.source.onnx.importing import import_onnx
from pipeline.source.onnx.tolerance import with_onnx_tolerance
from pipeline.spec.closeness import check_has_effect
from pipeline.spec.effort import check_effort
from pipeline.spec.file_names import EXPORTED, MODEL, PLAN, TIMING
from pipeline.spec.interface import Interface
from pipeline.spec.model import ModelSpec
from pipeline.spec.noise import EQUAL
from pipeline.spec.recipe import HalfInfo
from pipeline.store.entry import STAGES

if TYPE_CHECKING:
    from pipeline.export.exported import Exported

PACKAGES = (
    "torch", "onnx", "onnxscript", "onnxruntime", "onnx-graphsurgeon", "polygraphy", "numpy",
)  # fmt: skip


def export(
    folder: Path, spec: ModelSpec, options: ExportOptions, announce: Announce = silent
) -> Exported:
    """Writes exported.onnx from torch, or from the source ONNX file, and the user's values.

    Args:
        folder: The artifact's folder.
        spec: The model, with the profiles that the build will use.
        options: The weights, the seed and how far to look.
        announce: Called with each step that begins.

    Raises:
        InputError: The stated tolerance of an output has no effect.
        PipelineError: See `pipeline.export.export.export` and
            `pipeline.source.onnx.importing.import_onnx`.
    """

    def step(name: str) -> None:
        announce(f"export: {name}")

    watch = Stopwatch(step)
    path = fresh(folder / EXPORTED)
    if spec.onnx is not None:
        done = import_onnx(spec, path, seed=options.seed)
        measured = with_onnx_tolerance(done.spec, path, options.seed, done.output_shapes)
        done = replace(done, spec=measured)
    else:
        with watch("import torch"):
            from pipeline.export.export import export as from_torch
        done = from_torch(
            spec,
            options.weights,
            path,
            seed=options.seed,
            quick=options.quick,
            announce=step,
        )
    stated = spec.output_tolerances.keys() | {o.name for o in spec.outputs if o.tolerance}
    for output in done.interface.outputs:
        if output.name in stated and output.tolerance not in (None, EQUAL) and output.dtype:
            check_has_effect(output.name, output.dtype, output.tolerance)
    store_values(folder, done.interface.inputs)
    release_memory()
    return replace(done, library_seconds={**watch.seconds, **done.library_seconds})


def record_export(manifest: Manifest, done: Exported) -> Manifest:
    """Adds the exported interface and the facts of the export to the manifest."""
    source = done.spec.onnx
    reference = run_names.TORCH if source is None else run_names.EXPORTED
    if done.spec.reference is not None:
        reference = run_names.REFERENCE
    here = versions(PACKAGES)
    modules, packages = imports_of(manifest.model.source, done.module)
    modules = {**given_file(manifest.model.source), **modules}
    packages = {n: v for n, v in packages.items() if n not in manifest.model.libraries}
    return replace(
        manifest,
        model=replace(manifest.model, modules=modules, packages=packages),
        interface=done.interface,
        reference=reference,
        export=ExportInfo(
            done.opset,
            f"torch {here['torch']}" if source is None else f"none: {source.name} as it is",
            sum(done.library_seconds.values()),
            tuple(rule.applied() for rule in done.refinements),
            {name: DynamicInfo(where) for name, where in done.free.items()},
            tuple(done.notes),
        ),
        versions={**manifest.versions, **here},
    )


def rewrite(folder: Path, options: RewriteOptions) -> Rewritten:
    """Rewrites exported.onnx to model.onnx.

    Raises:
        ArtifactError: There is no exported.onnx.
        RewriteError: A pass broke its contract, or a pass refused a node that the target refuses or
            computes wrongly.
    """
    _need(folder, EXPORTED, "export")
    passes = all_passes(options.own)
    target, plugins = options.target, options.plugins
    done = rewriting.rewrite(
        folder / EXPORTED,
        fresh(folder / MODEL),
        target,
        passes,
        skip=to_skip(passes, options.only, options.skip),
        keep_functions=provided_ops(plugins, target) if plugins else (),
    )
    raise_refused(done)
    return done


def record_rewrite(manifest: Manifest, done: Rewritten) -> Manifest:
    """Adds the target and the record of each pass to the manifest."""
    return replace(
        manifest,
        target=TargetInfo(done.target, find_target(done.target).flavour, None),
        rewrite=RewriteInfo(done.passes, done.warnings, done.nodes_before, done.nodes_after),
    )


@dataclass(frozen=True)
class BuiltEngine:
    """The plan in an artifact.

    Args:
        plan: The plan's size, warnings and other facts of the build.
        interface: The model's interface, with the profiles of the plan.
        options: The options of the build.
        plugin_hashes: sha256 of each plugin file that the plan needs.
        gpu: The name of the GPU that the plan was built on; empty for a portable plan.
        compute_capabilities: Those of the GPUs that the plan is for (``9.0``); empty for a
            portable plan.
        half: What the recipe of half precision does; None without a recipe.
        refitted_from: The sha256 of the plan whose weights were replaced; empty after a build.
    """

    plan: Built
    interface: Interface
    options: BuildOptions
    plugin_hashes: dict[str, str] = field(default_factory=dict)
    gpu: str = ""
    compute_capabilities: tuple[str, ...] = ()
    half: HalfInfo | None = None
    refitted_from: str = ""

    @property
    def library_seconds(self) -> dict[str, float]:
        """Seconds in TensorRT and Polygraphy, and in the search for a recipe."""
        searched = {"search": self.half.seconds} if self.half and self.half.runs else {}
        return {**searched, **self.plan.library_seconds}

    @property
    def peak_memory(self) -> int:
        """Peak memory of the build process in bytes."""
        return self.plan.peak_memory


def build(folder: Path, search: Search, options: BuildOptions) -> BuiltEngine:
    """Builds engine.plan from model.onnx, and writes half.onnx for fp16 and bf16.

    With a recipe, given or found by a search, writes half.recipe too.

    Args:
        folder: The artifact's folder.
        search: The manifest, with the profiles to build, and what a search for a recipe needs.
        options: The options of the build. A given timing cache replaces the artifact's own cache,
            and gets the new timings afterwards.

    Raises:
        ArtifactError: There is no model.onnx.
        PipelineError: See `pipeline.build.build.build`.
    """
    _need(folder, MODEL, "rewrite")
    target, effort, interface = options.target, options.effort, search.manifest.interface
    shared, own = effort.timing_cache, folder / TIMING
    check_effort(effort, target)
    if shared is not None and shared.is_file():
        write_whole(own, shared.read_bytes())
    kept = None if target.flavour == "tensorrt_rtx" else own
    hashes = {
        name: hash_file(Path(name)).sha256
        for name in options.plugins
        if name not in PLUGINS and Path(name).is_file()
    }
    remove_built(folder)
    options = replace(options, effort=replace(effort, timing_cache=kept))
    profiles = tuple(profile.resolve(interface.dims) for profile in interface.profiles)
    interface = replace(interface, profiles=profiles)
    manifest = replace(search.manifest, interface=interface)
    options, half = decided(folder, options, replace(search, manifest=manifest))
    plan = building.build(folder / MODEL, fresh(folder / PLAN), interface, options)
    if shared is not None and own.is_file():
        write_whole(shared, own.read_bytes())
    needed = {name: hashes[name] for name in plan.plugins if name in hashes}
    return BuiltEngine(plan, interface, options, needed, *_built_for(target, plan), half)


def _built_for(target: Target, plan: Built) -> tuple[str, tuple[str, ...]]:
    """Returns the GPU that a plan was built on, and the compute capabilities that it is for."""
    gpu = find_gpu()
    if target.flavour == "tensorrt_rtx" or isinstance(gpu, str):
        return "", tuple(map(capability_text, plan.gpus))
    return gpu.name, (capability_text(gpu.capability),)


def record_build(manifest: Manifest, done: BuiltEngine) -> Manifest:
    """Adds the plan's profiles, precision and build facts to the manifest."""
    plan, target = done.plan, done.options.target
    return replace(
        manifest,
        target=TargetInfo(target.name, target.flavour, plan.version, done.compute_capabilities),
        precision=done.options.precision,
        interface=done.interface,
        build=BuildInfo(
            seconds=sum(plan.library_seconds.values()),
            plan_bytes=plan.plan_bytes,
            validity=plan.validity,
            layers=plan.layers,
            warnings=tuple(plan.warnings),
            plugins=plan.plugins,
            peak_bytes=plan.peak_memory,
            optimization_level=done.options.effort.level,
            timing_cache=plan.timing_cache,
            gpu=done.gpu,
            plugin_hashes=done.plugin_hashes,
            half=done.half,
            flags=done.options.flags,
            refitted_from=done.refitted_from,
        ),
        versions={**manifest.versions, target.flavour: plan.version},
    )


def _need(folder: Path, name: str, stage: str) -> None:
    if not (folder / name).is_file():
        raise ArtifactError(f"the artifact has no {name}. Run `pipeline {stage}` first")


EXPORT = Stage(STAGES[0], export, record_export)
REWRITE = Stage(STAGES[1], rewrite, record_rewrite)
BUILD = Stage(STAGES[2], build, record_build)
COMPARE = Stage(STAGES[3], compare_artifact, record)
