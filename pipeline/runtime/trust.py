"""Decides which plans and plugins may be loaded.

A plan's bytes, TensorRT and GPU have to match its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pipeline.artifact.artifact import Artifact, read_again
from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, InputError, TargetMissing
from pipeline.machine.files import hash_file
from pipeline.machine.gpu import Gpu, capability_text, why_not
from pipeline.machine.target import Target, find_target, installed_version
from pipeline.plugins import PLUGINS
from pipeline.plugins import loading as custom_ops
from pipeline.spec.file_names import PLAN

if TYPE_CHECKING:
    from types import ModuleType


def read_plan(path: Path) -> tuple[Manifest, bytes]:
    """Reads an artifact's manifest, and the plan with the hash in that manifest.

    Raises:
        ArtifactError: there is no artifact, it has no plan, or the plan was cut or changed.
    """
    return read_again(path, lambda: _read_plan(path))


def _read_plan(path: Path) -> tuple[Manifest, bytes]:
    artifact = Artifact.open(path, check=False)
    if artifact.manifest.build is None or PLAN not in artifact.manifest.files:
        raise ArtifactError(
            f"{path}: has no {PLAN} yet; run `pipeline build {quote(str(path))}` on the machine "
            "that will run it"
        )
    return artifact.manifest, artifact.read(PLAN)


def check_tensorrt(manifest: Manifest, where: str) -> Target:
    """Returns the plan's target, if a TensorRT that loads the plan is installed here.

    Only the version that wrote a plan loads it, except for a version-compatible plan
    (`Manifest.loads_in`).

    Raises:
        TargetMissing: TensorRT is not installed, or in another version.
    """
    target = find_target(manifest.target.name)
    here, built = installed_version(target), manifest.target.version
    if here is None:
        raise TargetMissing(
            f"{where}: its engine needs {target.flavour} {built}, which is not installed here; "
            f"pip install '{target.flavour.replace('_', '-')}=={built}'"
        )
    if not manifest.loads_in(here):
        raise TargetMissing(
            f"{where}: its engine was built with {target.flavour} {built}, but {here} is "
            f"installed; run `pipeline build {quote(where)}` here, or install {built}"
        )
    return target


def check_gpu(manifest: Manifest, where: str, gpu: Gpu) -> None:
    """Raises `InputError` if the plan is for another kind of GPU."""
    built, here = manifest.target.compute_capabilities, capability_text(gpu.capability)
    if manifest.flags.hardware_compatible:
        why = why_not(find_target(manifest.target.name), gpu, compatible=True)
        if why:
            raise InputError(f"{where}: {why}; run `pipeline build {quote(where)}` here")
    elif not built and manifest.target.flavour == "tensorrt_rtx":
        why = why_not(find_target(manifest.target.name), gpu)
        if why:
            raise InputError(f"{where}: {why}")
    elif not built:
        raise InputError(
            f"{where}: its manifest does not say which GPU its engine is for; run `pipeline build "
            f"{where}` here"
        )
    elif here not in built:
        raise InputError(
            f"{where}: its engine was built for compute capability {', '.join(built)}, but the "
            f"{gpu.name} here has {here}; run `pipeline build {quote(where)}` here"
        )


def check_host_code(manifest: Manifest, host_code: bool, where: str) -> None:
    """Raises `InputError` if the plan holds code for the CPU, and that code may not run."""
    if manifest.flags.version_compatible and not host_code:
        raise InputError(
            f"{where}: its engine is version-compatible, so it holds code that runs on the CPU. If "
            "you trust it, pass host_code=True (verify and bench: --host-code)"
        )


def check_given(manifest: Manifest, given: Sequence[str], where: str) -> None:
    """Raises `InputError` if a passed plugin does not exist, or if the engine does not need it."""
    needed, hashes = _needed(manifest)
    for name in given:
        if name in PLUGINS:
            known = name in needed
        elif (file := custom_ops.plugin_file(name)) is None or not file.is_file():
            own = ", ".join(PLUGINS)
            raise InputError(
                f"plugin {name}: no such file, and not one of the pipeline's own plugins: {own}"
            )
        else:
            known = hash_file(file).sha256 in hashes.values()
        alike = [other for other in hashes if Path(other).name == Path(name).name]
        if not known and alike:
            raise InputError(
                f"{where}: plugin {name}: its content differs from {alike[0]}, which the engine "
                f"was built with; pass that file, or run `pipeline build {quote(where)} --plugin "
                f"{quote(name)}`"
            )
        if not known:
            what = f"the plugins {', '.join(needed)}" if needed else "no plugin"
            raise InputError(f"{where}: plugin {name}: its engine needs {what}; leave it out")


def allowed_plugins(manifest: Manifest, given: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the plugins that the plan needs, in the form for `plugins.loading.find_plugins`.

    The pipeline's own plugins are loaded if the manifest names them. A manifest from somebody else
    could name any file, so a path in a manifest is never loaded. A plugin's file is loaded only if
    the caller passes it and its hash matches the file of the build.

    Args:
        given: the plugin files that the caller trusts.

    Raises:
        InputError: a needed file was not passed, or the manifest has no hash for it.
    """
    needed, hashes = _needed(manifest)
    paths = [path for name in given if (path := custom_ops.plugin_file(name)) is not None]
    files = {hash_file(path).sha256: str(path) for path in paths if path.is_file()}
    found = []
    for name in needed:
        if name in PLUGINS:
            found.append(name)
        elif name not in hashes:
            raise InputError(
                f"{where}: its manifest has no hash of the plugin {name}, so the plugin is not "
                f"loaded; run `pipeline build {quote(where)} --plugin FILE`"
            )
        elif hashes[name] not in files:
            raise InputError(
                f"{where}: its engine runs the code of the plugin {name} (sha256 "
                f"{hashes[name][:16]}...), which is loaded only if you pass it: if you trust "
                f"that file, pass plugins=({name!r},) or --plugin {quote(name)}"
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
        InputError: a plugin does not load.
    """
    if not names:
        if hasattr(trt, "init_libnvinfer_plugins"):  # the parser may have used NVIDIA's plugins
            trt.init_libnvinfer_plugins(None, "")
        return
    asked: Any = ()
    try:
        asked = custom_ops.find_plugins(names, target)
        custom_ops.load_plugins(trt, asked, target)
    except InputError as error:
        raise InputError(f"{where}: its engine needs a plugin: {error}") from error
