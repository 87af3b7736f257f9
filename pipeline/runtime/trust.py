"""Which plan may be loaded: one whose bytes, TensorRT and GPU are those of its manifest; and which
plugins it may load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact.artifact import Artifact, read_again
from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, InputError, TargetMissing
from pipeline.machine.files import hash_file
from pipeline.machine.gpu import Gpu, why_not
from pipeline.machine.target import Target, find_target, installed_version
from pipeline.plugins import PLUGINS
from pipeline.spec.file_names import PLAN

if TYPE_CHECKING:
    from types import ModuleType


def read_plan(path: Path) -> tuple[Manifest, bytes]:
    """An artifact's manifest and its plan, whose hash is the manifest's.

    Raises:
        ArtifactError: no artifact, no plan in it, or a plan that was cut or changed.
    """
    return read_again(path, lambda: _read_plan(path))


def _read_plan(path: Path) -> tuple[Manifest, bytes]:
    artifact = Artifact.open(path, check=False)
    if artifact.manifest.build is None or PLAN not in artifact.manifest.files:
        raise ArtifactError(
            f"{path}: holds no {PLAN} yet; run `pipeline build {path}` on the machine that is "
            "to run it"
        )
    return artifact.manifest, artifact.read(PLAN)


def check_tensorrt(manifest: Manifest, where: str) -> Target:
    """The target of a plan that was built with the very TensorRT that is installed here.

    Plans of 8.6, 10, 11 and RTX alike are read by the version that wrote them (the pipeline builds
    none that is version compatible).

    Raises:
        TargetMissing: none is installed, or another one.
    """
    target = find_target(manifest.target.name)
    here, built = installed_version(target), manifest.target.version
    if here is None:
        raise TargetMissing(
            f"{where}: its engine needs {target.flavour} {built}, which is not installed here; "
            f"pip install '{target.flavour.replace('_', '-')}=={built}'"
        )
    if here != built:
        raise TargetMissing(
            f"{where}: its engine was built with {target.flavour} {built}, here is {here}; "
            f"run `pipeline build {where}` here, or install {built}"
        )
    return target


def check_gpu(manifest: Manifest, where: str, gpu: Gpu) -> None:
    """Raises `InputError` where the plan is for another kind of GPU."""
    built = getattr(manifest.target, "compute_capability", None)
    here = ".".join(map(str, gpu.capability))
    if built is None and manifest.target.flavour == "tensorrt_rtx":
        why = why_not(find_target(manifest.target.name), gpu)
        if why:
            raise InputError(f"{where}: {why}")
    elif built is None:
        raise InputError(
            f"{where}: its manifest does not say which GPU its engine is for; run `pipeline build "
            f"{where}` here"
        )
    elif built != here:
        raise InputError(
            f"{where}: its engine was built for compute capability {built}, the {gpu.name} here "
            f"has {here}; run `pipeline build {where}` here"
        )


def check_given(manifest: Manifest, given: Sequence[str], where: str) -> None:
    """Raises `InputError` where a plugin is given that is none, or that no engine here needs."""
    needed, hashes = _needed(manifest)
    for name in given:
        if name in PLUGINS:
            known = name in needed
        elif not Path(name).is_file():
            own = ", ".join(PLUGINS)
            raise InputError(f"plugin {name}: no such file, and none of the pipeline's own: {own}")
        else:
            known = hash_file(Path(name)).sha256 in hashes.values()
        alike = [other for other in hashes if Path(other).name == Path(name).name]
        if not known and alike:
            raise InputError(
                f"{where}: plugin {name}: its content is not that of {alike[0]}, which the engine "
                f"was built with; give that file, or `pipeline build {where} --plugin {name}`"
            )
        if not known:
            what = f"the plugins {', '.join(needed)}" if needed else "no plugin"
            raise InputError(f"{where}: plugin {name}: its engine needs {what}; leave it out")


def allowed_plugins(manifest: Manifest, given: Sequence[str], where: str) -> tuple[str, ...]:
    """The plugins that the plan needs, as `pipeline.plugins.loading.find_plugins` takes them.

    The pipeline's own are loaded wherever a manifest names them. A file is code that somebody
    else's manifest could name: only a given file is loaded, never the path in the manifest, and
    only one whose hash is that of the file that the engine was built with.

    Args:
        given: the files that the caller lets run.

    Raises:
        InputError: a file that is needed is not given, or there is no hash to know it by.
    """
    needed, hashes = _needed(manifest)
    files = {
        hash_file(Path(name)).sha256: str(Path(name).resolve())
        for name in given
        if name not in PLUGINS and Path(name).is_file()
    }
    found = []
    for name in needed:
        if name in PLUGINS:
            found.append(name)
        elif name not in hashes:
            raise InputError(
                f"{where}: its manifest has no hash of the plugin {name}, so it is not loaded; run "
                f"`pipeline build {where} --plugin FILE`"
            )
        elif hashes[name] not in files:
            raise InputError(
                f"{where}: its engine runs the code of the plugin {name} (sha256 "
                f"{hashes[name][:16]}...), which is only loaded where it is given: if you trust "
                f"that file, plugins=({name!r},) or --plugin {name}"
            )
        else:
            found.append(files[hashes[name]])
    return tuple(found)


def _needed(manifest: Manifest) -> tuple[Sequence[str], Mapping[str, str]]:
    """The names of the plan's plugins, and the hashes of those that are files."""
    build = manifest.build
    return ((), {}) if build is None else (build.plugins, build.plugin_hashes)


def load_plugins(trt: ModuleType, names: Sequence[str], target: Target, where: str) -> None:
    """Loads plugins into this process.

    Args:
        names: from `allowed_plugins`.

    Raises:
        InputError: one of them does not load.
    """
    if not names:
        if hasattr(trt, "init_libnvinfer_plugins"):  # NVIDIA's own, which a parser may have used
            trt.init_libnvinfer_plugins(None, "")
        return
    from pipeline.plugins import loading as custom_ops

    asked: Any = ()
    try:
        asked = custom_ops.find_plugins(names, target)
        custom_ops.load_plugins(trt, asked, target)
    except InputError as error:
        raise InputError(f"{where}: its engine needs a plugin: {error}") from error
