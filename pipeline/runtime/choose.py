"""Chooses the engine of an artifact that runs on the GPU here; see `pipeline.artifact.engines`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from pipeline.artifact.artifact import Artifact, read_again
from pipeline.artifact.engines import engine_places, why_not_of
from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.gpu import Gpu, capability_text, why_not
from pipeline.machine.target import find_target, installed_version
from pipeline.spec.precision import check_precision


def choose(
    path: Path, gpu: Gpu | str, precision: str | None = None, *, host_code: bool = False
) -> Path:
    """Returns the folder of the engine to load: the artifact's own, or one in ``engines``.

    Among the engines that run on the GPU, one whose comparison failed comes last. An engine in the
    precision of the artifact's own comes first, then one with its profiles, then one that was built
    for this kind of GPU, and then the artifact's own. Further ones are taken by name. A
    hardware-compatible engine counts as built for the kind of GPU that built it.

    Args:
        path: The artifact's folder.
        gpu: The GPU, or the reason why there is none.
        precision: The precision to take; by default any.
        host_code: Whether a plan may run its own code on the CPU. A version-compatible engine is
            not taken without it, except where it is the only one.

    Raises:
        ArtifactError: There is no artifact.
        InputError: No engine has that precision and runs here. The message has each one's reason.
    """
    if precision is not None:
        check_precision(precision)
    return read_again(path, lambda: _choose(path, gpu, precision, host_code))


def _choose(path: Path, gpu: Gpu | str, precision: str | None, host_code: bool) -> Path:
    own = Artifact.open(path, check=False).manifest
    others = engine_places(path)
    if isinstance(gpu, str) or (not others and precision in (None, own.precision)):
        return path  # `load` has a message of its own for each reason
    fit: list[tuple[tuple[bool, ...], str, Path]] = []
    reasons = []
    for place in (path, *others):
        name = place.relative_to(path).as_posix() if place != path else "its own engine"
        try:
            manifest = own if place == path else Artifact.open(place, check=False).manifest
            why = "" if place == path else why_not_of(manifest, own)
            why = why or _why_not(manifest, gpu, precision, host_code)
        except ArtifactError as error:
            why = str(error)
        if why:
            reasons.append(f"{name}: {why}")
        else:
            rank = (
                manifest.comparison is not None and not manifest.comparison.passed,
                manifest.precision != own.precision,
                manifest.interface.profiles != own.interface.profiles,
                capability_text(gpu.capability) not in manifest.target.compute_capabilities,
                place != path,
            )
            fit.append((rank, name, place))
    if fit:
        return min(fit)[-1]
    wanted = f" in {precision}" if precision is not None else ""
    raise InputError(
        f"{path}: no engine{wanted} runs here (the GPU is {gpu.text}): {'; '.join(reasons)}. Build "
        f"one with `pipeline build {quote(str(path))}` and --gpu, --target or --precision"
    )


def _why_not(manifest: Manifest, gpu: Gpu, precision: str | None, host_code: bool) -> str:
    """Why an engine can't be loaded here; empty if it can."""
    target = find_target(manifest.target.name)
    if manifest.build is None:
        return "it was not built yet"
    if precision not in (None, manifest.precision):
        return f"it is {manifest.precision}"
    here = installed_version(target)
    if not manifest.loads_in(here):
        there = f"{here} is installed" if here else "it is not installed"
        return f"it needs {target.flavour} {manifest.target.version}, but {there}"
    if manifest.flags.version_compatible and not host_code:
        return "it is version-compatible, so it needs host_code=True"
    return why_not(
        target,
        gpu,
        manifest.target.compute_capabilities,
        compatible=manifest.flags.hardware_compatible,
    )
