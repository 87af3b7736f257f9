"""The four stages: what each does in an artifact's folder, and what it writes into the manifest.

A stage reads the files that the stage before left in the folder and adds its own. So each can be
run alone, on another machine, later. `pipeline.convert.workspace` runs and measures them.
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
from pipeline.build import build as building
from pipeline.build.build import Built
from pipeline.build.settings import BuildOptions
from pipeline.compare.stage import compare_artifact, record
from pipeline.convert.keys import STAGES
from pipeline.convert.options import ExportOptions, RewriteOptions
from pipeline.convert.reuse import remove_half
from pipeline.convert.workspace import Stage
from pipeline.errors import ArtifactError
from pipeline.machine.files import fresh, hash_file, write_whole
from pipeline.machine.gpu import find_gpu
from pipeline.machine.libraries import versions
from pipeline.machine.resources import Stopwatch, release_memory
from pipeline.machine.target import Target, find_target
from pipeline.plugins import PLUGINS
from pipeline.plugins.loading import provided_ops
from pipeline.rewrite import rewrite as rewriting
from pipeline.rewrite.choose import all_passes, to_skip
from pipeline.rewrite.rewrite import Rewritten, raise_refused
from pipeline.source.onnx.importing import import_onnx
from pipeline.source.onnx.tolerance import with_onnx_tolerance
from pipeline.spec.effort import check_effort
from pipeline.spec.file_names import EXPORTED, MODEL, PLAN, TIMING
from pipeline.spec.interface import Interface
from pipeline.spec.model import ModelSpec

if TYPE_CHECKING:
    from pipeline.export.exported import Exported

PACKAGES = (
    "torch", "onnx", "onnxscript", "onnxruntime", "onnx-graphsurgeon", "polygraphy", "numpy",
)  # fmt: skip


def export(folder: Path, spec: ModelSpec, options: ExportOptions) -> Exported:
    """torch -> exported.onnx, or an ONNX file as it is.

    Args:
        folder: the artifact's.
        spec: the model, with the profiles that it is going to be built for.
        options: the weights and the seed.

    Raises:
        PipelineError: see `pipeline.export.export.export` and
            `pipeline.source.onnx.importing.import_onnx`.
    """
    watch = Stopwatch()
    path = fresh(folder / EXPORTED)
    if spec.onnx is not None:
        done = import_onnx(spec, path, seed=options.seed)
        done = replace(done, spec=with_onnx_tolerance(done.spec, path, options.seed))
    else:
        with watch("import torch"):
            from pipeline.export.export import export as from_torch
        done = from_torch(spec, options.weights, path, seed=options.seed)
    release_memory()
    return replace(done, library_seconds={**watch.seconds, **done.library_seconds})


def record_export(manifest: Manifest, done: Exported) -> Manifest:
    """The manifest with the interface that the export found, and how it went."""
    source = done.spec.onnx
    here = versions(PACKAGES)
    return replace(
        manifest,
        interface=done.interface,
        reference="torch" if source is None else "exported",
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
    """exported.onnx -> model.onnx.

    Raises:
        ArtifactError: there is no exported.onnx.
        RewriteError: a pass broke its contract, or refused a node that the target would get
            wrong.
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
    """The manifest with the target that the model was rewritten for, and what the passes did."""
    return replace(
        manifest,
        target=TargetInfo(done.target, find_target(done.target).flavour, None),
        rewrite=RewriteInfo(done.passes, done.warnings, done.nodes_before, done.nodes_after),
    )


@dataclass(frozen=True)
class BuiltEngine:
    """The plan in an artifact.

    Args:
        plan: what TensorRT made, and what it said.
        interface: the model's, with the profiles of the plan.
        options: what was asked for.
        plugin_hashes: sha256 of each plugin file that the plan needs.
        gpu: name of the GPU that the plan was built on; empty for a portable plan.
        compute_capability: of that GPU (``9.0``); None for a portable plan.
    """

    plan: Built
    interface: Interface
    options: BuildOptions
    plugin_hashes: dict[str, str] = field(default_factory=dict)
    gpu: str = ""
    compute_capability: str | None = None

    @property
    def library_seconds(self) -> dict[str, float]:
        """Seconds inside TensorRT and Polygraphy."""
        return dict(self.plan.library_seconds)

    @property
    def peak_memory(self) -> int:
        """Bytes, of the process that built."""
        return self.plan.peak_memory


def build(folder: Path, interface: Interface, options: BuildOptions) -> BuiltEngine:
    """model.onnx -> engine.plan, and half.onnx in fp16.

    Args:
        folder: the artifact's.
        interface: of the exported model, with the profiles to build.
        options: the target, and what else changes the engine. A timing cache that
            is given takes the place of the artifact's own, and gets its timings afterwards.

    Raises:
        ArtifactError: there is no model.onnx.
        PipelineError: see `pipeline.build.build.build`.
    """
    _need(folder, MODEL, "rewrite")
    target, effort = options.target, options.effort
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
    remove_half(folder)
    options = replace(options, effort=replace(effort, timing_cache=kept))
    profiles = tuple(profile.resolve(interface.dims) for profile in interface.profiles)
    interface = replace(interface, profiles=profiles)
    plan = building.build(folder / MODEL, fresh(folder / PLAN), interface, options)
    if shared is not None and own.is_file():
        write_whole(shared, own.read_bytes())
    needed = {name: hashes[name] for name in plan.plugins if name in hashes}
    return BuiltEngine(plan, interface, options, needed, *_built_on(target))


def _built_on(target: Target) -> tuple[str, str | None]:
    """Name and compute capability of the GPU that a plan built here is for; ("", None) for a
    portable plan."""
    gpu = find_gpu()
    if target.flavour == "tensorrt_rtx" or isinstance(gpu, str):
        return "", None
    major, minor = gpu.capability
    return gpu.name, f"{major}.{minor}"


def record_build(manifest: Manifest, done: BuiltEngine) -> Manifest:
    """The manifest with the plan: its profiles, its precision, and how it was built."""
    plan, target = done.plan, done.options.target
    return replace(
        manifest,
        target=TargetInfo(target.name, target.flavour, plan.version, done.compute_capability),
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
        ),
        versions={**manifest.versions, target.flavour: plan.version},
    )


def _need(folder: Path, name: str, stage: str) -> None:
    if not (folder / name).is_file():
        raise ArtifactError(f"the artifact holds no {name}: run `pipeline {stage}` first")


EXPORT = Stage(STAGES[0], export, record_export)
REWRITE = Stage(STAGES[1], rewrite, record_rewrite)
BUILD = Stage(STAGES[2], build, record_build)
COMPARE = Stage(STAGES[3], compare_artifact, record)
