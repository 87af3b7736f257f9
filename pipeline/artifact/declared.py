"""What a manifest declares, as the objects that a spec has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import cast

from pipeline.artifact.manifest import Manifest, ToleranceInfo
from pipeline.errors import ArtifactError
from pipeline.spec.dims import Dim, DimExpr, Size
from pipeline.spec.model import Input, ModelSpec, Tolerance
from pipeline.spec.padding import Align, Padding, PaddingMode
from pipeline.spec.profiles import Profile


def dims_of(manifest: Manifest) -> dict[str, Dim]:
    """The dims by name."""
    return {
        d.name: Dim(d.name, d.min, d.opt, d.max, d.multiple_of, d.offset) for d in manifest.dims
    }


def inputs_of(manifest: Manifest) -> tuple[Input, ...]:
    """The inputs, their sizes dims again."""
    dims = dims_of(manifest)

    def size(value: int | str) -> Size:
        if isinstance(value, int):
            return value
        if value in dims:
            return dims[value]
        return DimExpr(value, tuple(d for n, d in dims.items() if n in DimExpr(value).names))

    return tuple(
        Input(i.name, tuple(size(s) for s in i.shape), i.dtype, i.low, i.high)
        for i in manifest.inputs
    )


def profiles_of(manifest: Manifest) -> tuple[Profile, ...]:
    """The profiles, with a range for every dim."""
    return tuple(Profile(p.name, dict(p.ranges)) for p in manifest.profiles)


def padding_of(manifest: Manifest) -> Padding | None:
    """The padding, if there is one."""
    p = manifest.padding
    return (
        None if p is None else Padding(p.multiples, cast(PaddingMode, p.mode), cast(Align, p.align))
    )


def tolerances_of(manifest: Manifest) -> dict[str, Tolerance]:
    """The tolerance that every comparison of an output is held to, by its name."""
    found = {}
    for output in manifest.outputs:
        t = output.tolerance or manifest.tolerance
        if t is None:
            raise ArtifactError(f"output {output.name} has no tolerance: export it again")
        found[output.name] = Tolerance(**asdict(t))
    return found


def engine_tolerance_of(manifest: Manifest) -> Tolerance | None:
    """What all outputs of an engine of the manifest's precision are held to; None where that
    precision has no tolerance of its own, and `tolerances_of` holds."""
    t = manifest.engine_tolerance.get(manifest.precision)
    return None if t is None else Tolerance(**asdict(t))


def engine_tolerances_of(manifest: Manifest) -> dict[str, Tolerance]:
    """The tolerance that every output of the engine is held to, by its name."""
    own = engine_tolerance_of(manifest)
    return {name: own or tolerance for name, tolerance in tolerances_of(manifest).items()}


def tolerance_info(tolerance: Tolerance | None) -> ToleranceInfo | None:
    """A tolerance as a manifest has it."""
    if tolerance is None:
        return None
    return ToleranceInfo(**asdict(tolerance))


def engine_tolerance_info(tolerances: Mapping[str, Tolerance]) -> dict[str, ToleranceInfo]:
    """Tolerances of engines by precision, as a manifest has them."""
    return {p: ToleranceInfo(**asdict(t)) for p, t in tolerances.items()}


def with_tolerances(manifest: Manifest, spec: ModelSpec) -> Manifest:
    """The manifest with the spec's tolerances; with its own where the spec states none."""
    own = {o.name: tolerance_info(o.tolerance) for o in spec.outputs}
    manifest = replace(manifest, engine_tolerance=engine_tolerance_info(spec.engine_tolerance))
    if spec.tolerance is None:
        return manifest
    outputs = tuple(replace(o, tolerance=own.get(o.name)) for o in manifest.outputs)
    return replace(manifest, tolerance=tolerance_info(spec.tolerance), outputs=outputs)
