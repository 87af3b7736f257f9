"""Which plan may be loaded: one whose bytes, TensorRT and GPU are those of its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact import PLAN, Artifact
from pipeline.errors import ArtifactError, InputError, TargetMissing
from pipeline.gpu import Gpu, why_not
from pipeline.manifest import Manifest
from pipeline.target import Target, find_target, installed_version

if TYPE_CHECKING:
    from types import ModuleType

_ATTEMPTS = 5


def read_plan(path: Path) -> tuple[Manifest, bytes]:
    """An artifact's manifest and its plan, whose hash is the manifest's.

    They belong together even if the folder is replaced meanwhile.

    Raises:
        ArtifactError: no artifact, no plan in it, or a plan that was cut or changed.
    """
    for attempt in range(_ATTEMPTS):
        artifact = Artifact.open(path, check=False)
        if artifact.manifest.build is None or PLAN not in artifact.manifest.files:
            raise ArtifactError(
                f"{path}: holds no {PLAN} yet; run `pipeline build {path}` on the machine that is "
                "to run it"
            )
        try:
            return artifact.manifest, artifact.read(PLAN)
        except ArtifactError:
            replaced = Artifact.open(path, check=False).manifest != artifact.manifest
            if not replaced or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


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


def load_plugins(trt: ModuleType, manifest: Manifest, target: Target, where: str) -> None:
    """Loads the plugins that the plan needs into this process.

    Raises:
        InputError: one of them is missing or does not load.
    """
    names = manifest.build.plugins if manifest.build is not None else ()
    if not names:
        if hasattr(trt, "init_libnvinfer_plugins"):  # NVIDIA's own, which a parser may have used
            trt.init_libnvinfer_plugins(None, "")
        return
    from pipeline import custom_ops  # onnx comes with it

    asked: Any = ()
    try:
        asked = custom_ops.find_plugins(names, target)
        custom_ops.load_plugins(trt, asked, target)
    except InputError as error:
        raise InputError(f"{where}: its engine needs a plugin: {error}") from error
