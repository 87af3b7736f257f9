"""The stages: each takes an artifact's folder and manifest and returns the manifest with its part.

A stage reads the files that the stage before left in the folder and adds its own, so that each
can be run alone, on another machine, later. What a stage makes stale it removes. The comparison
is in `pipeline.compare.stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import (
    BuildInfo,
    DynamicInfo,
    ExportInfo,
    Manifest,
    RewriteInfo,
    StageInfo,
    TargetInfo,
)
from pipeline.build.build import build
from pipeline.build.settings import BuildOptions
from pipeline.errors import ArtifactError
from pipeline.machine.files import fresh, hash_file, write_whole
from pipeline.machine.gpu import find_gpu
from pipeline.machine.libraries import versions
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch, peak_memory, release_memory, reset_peak_memory
from pipeline.machine.target import Target, find_target
from pipeline.plugins import PLUGINS
from pipeline.spec.effort import DEFAULT_EFFORT, Effort, check_effort
from pipeline.spec.file_names import COMPARISON, EXPORTED, HALF, MODEL, PLAN, REPRODUCE, TIMING
from pipeline.spec.model import ModelSpec
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Precision

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "onnx", "onnxscript", "onnxruntime", "onnx-graphsurgeon", "polygraphy", "numpy",
)  # fmt: skip


def measured(
    name: str, announce: Announce, work: Callable[[], tuple[Manifest, Mapping[str, float]]]
) -> Manifest:
    """Runs a stage and adds its seconds and its peak memory to the manifest that it returns."""
    reset_peak_memory()
    announce(name)
    watch = Stopwatch()
    with watch(name):
        manifest, libraries = work()
    peak = peak_memory()
    if name == "build" and manifest.build is not None:  # TensorRT runs in a process of its own
        peak = manifest.build.peak_bytes
    info = StageInfo(name, watch.seconds[name], dict(libraries), peak)
    others = tuple(stage for stage in manifest.stages if stage.name != name)
    return replace(manifest, stages=(*others, info))


def export_stage(
    folder: Path,
    manifest: Manifest,
    spec: ModelSpec,
    profiles: Sequence[Profile],
    weights: Path | None,
    seed: int,
) -> tuple[Manifest, torch.nn.Module | None, Mapping[str, float]]:
    """torch -> exported.onnx, or an ONNX file as it is.

    Also returns the torch module, and seconds spent inside libraries.
    """
    watch = Stopwatch()
    spec = replace(spec, profiles=tuple(profiles))  # dims that must be equal become one, here too
    if spec.onnx is not None:
        from pipeline.source.onnx.importing import import_onnx
        from pipeline.source.onnx.tolerance import with_onnx_tolerance

        done = import_onnx(spec, fresh(folder / EXPORTED), seed=seed)
        done = replace(done, spec=with_onnx_tolerance(done.spec, folder / EXPORTED, seed))
        exporter = f"none: {spec.onnx.name} as it is"
    else:
        with watch("import torch"):
            import torch

        from pipeline.export.export import export

        done = export(spec, weights, fresh(folder / EXPORTED), seed=seed)
        exporter = f"torch {torch.__version__}"
    release_memory()
    manifest = replace(
        forget(folder, manifest, "rewrite"),
        interface=done.interface,
        reference="torch" if done.module is not None else "exported",
        export=ExportInfo(
            done.opset,
            exporter,
            sum(done.library_seconds.values()),
            tuple(rule.applied() for rule in done.refinements),
            {name: DynamicInfo(where) for name, where in done.free.items()},
            tuple(done.notes),
        ),
        versions={**manifest.versions, **versions(PACKAGES)},
    )
    return manifest, done.module, {**watch.seconds, **done.library_seconds}


def rewrite_stage(
    folder: Path,
    manifest: Manifest,
    target: Target,
    *,
    own: Sequence[Path | str] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> tuple[Manifest, Mapping[str, float]]:
    """exported.onnx -> model.onnx.

    Args:
        own, only, skip: see `pipeline.rewrite.choose`.
        plugins: ops that stay since the target has a plugin for them.

    Raises:
        RewriteError: a pass broke its contract, or refused a node that the target would get
            wrong.
    """
    from pipeline.plugins.loading import provided_ops
    from pipeline.rewrite.choose import all_passes, to_skip
    from pipeline.rewrite.rewrite import raise_refused, rewrite

    _need(folder, EXPORTED, "export")
    passes = all_passes(own)
    result = rewrite(
        folder / EXPORTED,
        fresh(folder / MODEL),
        target,
        passes,
        skip=to_skip(passes, only, skip),
        keep_functions=provided_ops(plugins, target) if plugins else (),
    )
    raise_refused(result)
    manifest = replace(
        forget(folder, manifest, "build"),
        target=TargetInfo(target.name, target.flavour, None),
        rewrite=RewriteInfo(
            result.passes, result.warnings, result.nodes_before, result.nodes_after
        ),
    )
    return manifest, {}


def build_stage(
    folder: Path,
    manifest: Manifest,
    precision: Precision,
    profiles: Sequence[Profile] = (),
    plugins: Sequence[str] = (),
    effort: Effort = DEFAULT_EFFORT,
) -> tuple[Manifest, Mapping[str, float]]:
    """model.onnx -> engine.plan, and half.onnx in fp16, for the manifest's target.

    Args:
        profiles: in place of those in the manifest.
        plugins: what TensorRT loads first; see `pipeline.plugins.loading`.
        effort: its timing cache takes the place of the artifact's own, and gets it afterwards.
    """
    _need(folder, MODEL, "rewrite")
    target = find_target(manifest.target.name)
    interface = manifest.interface
    if profiles:
        resolved = tuple(profile.resolve(interface.dims) for profile in profiles)
        interface = replace(interface, profiles=resolved)
    shared, own = effort.timing_cache, folder / TIMING
    check_effort(effort, target)
    if shared is not None and shared.is_file():
        write_whole(own, shared.read_bytes())
    kept = None if target.flavour == "tensorrt_rtx" else own
    hashes = {
        name: hash_file(Path(name)).sha256
        for name in plugins
        if name not in PLUGINS and Path(name).is_file()
    }
    _remove_half(folder)
    options = BuildOptions(target, precision, replace(effort, timing_cache=kept), tuple(plugins))
    done = build(folder / MODEL, fresh(folder / PLAN), interface, options)
    if shared is not None and own.is_file():
        write_whole(shared, own.read_bytes())
    capability, gpu = _built_on(target)
    manifest = replace(
        forget(folder, manifest, "compare"),
        target=TargetInfo(target.name, target.flavour, done.version, capability),
        precision=precision,
        interface=interface,
        build=BuildInfo(
            sum(done.library_seconds.values()), done.plan_bytes, done.validity, done.layers,
            tuple(done.warnings), done.plugins, done.peak_memory, gpu=gpu,
            optimization_level=effort.level, timing_cache=done.timing_cache,
            plugin_hashes={name: hashes[name] for name in done.plugins if name in hashes},
        ),
        versions={**manifest.versions, target.flavour: done.version},
    )  # fmt: skip
    return manifest, done.library_seconds


def _built_on(target: Target) -> tuple[str | None, str]:
    """Compute capability and name of the GPU that a plan built here is for; (None, "") for a
    portable plan."""
    gpu = find_gpu()
    if target.flavour == "tensorrt_rtx" or isinstance(gpu, str):
        return None, ""
    major, minor = gpu.capability
    return f"{major}.{minor}", gpu.name


def forget(folder: Path, manifest: Manifest, since: str) -> Manifest:
    """Removes the files and the parts of the manifest of a stage and of all after it."""
    order = ("rewrite", "build", "compare")
    stale = order[order.index(since) :]
    if "rewrite" in stale:
        for path in folder.glob(f"{MODEL}*"):
            if path.name != MODEL or manifest.rewrite is not None:
                path.unlink()
        manifest = replace(manifest, rewrite=None)
    if "build" in stale:
        (folder / PLAN).unlink(missing_ok=True)
        _remove_half(folder)
        unbuilt = replace(manifest.target, compute_capability=None)
        manifest = replace(manifest, build=None, target=unbuilt)
    if "compare" in stale:
        (folder / REPRODUCE).unlink(missing_ok=True)
        for path in folder.glob(f"{COMPARISON}/*/*.json"):
            # torch's stored outputs stay good for a later verify, unless the export is new
            if "rewrite" in stale or path.stem not in ("inputs", "torch"):
                path.unlink()
        manifest = replace(
            manifest,
            comparison=None,
            engine_compared=False,
            engine_compared_why="not compared yet",
            engine_gpu="",
        )
    return replace(
        manifest, stages=tuple(stage for stage in manifest.stages if stage.name not in stale)
    )


def _remove_half(folder: Path) -> None:
    for path in folder.glob(f"{HALF}*"):  # and its external data
        path.unlink()


def _need(folder: Path, name: str, stage: str) -> None:
    if not (folder / name).is_file():
        raise ArtifactError(f"the artifact holds no {name}: run `pipeline {stage}` first")
