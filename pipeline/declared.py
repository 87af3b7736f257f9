"""What a manifest declares, as the objects that a spec has."""

from __future__ import annotations

from typing import cast

from pipeline.dims import Dim, Size
from pipeline.manifest import Manifest
from pipeline.profiles import Profile
from pipeline.spec import Align, Input, Padding, PaddingMode, Tolerance


def dims_of(manifest: Manifest) -> dict[str, Dim]:
    """The dims by name."""
    return {d.name: Dim(d.name, d.min, d.opt, d.max, d.multiple_of) for d in manifest.dims}


def inputs_of(manifest: Manifest) -> tuple[Input, ...]:
    """The inputs, their sizes dims again."""
    dims = dims_of(manifest)

    def size(value: int | str) -> Size:
        return dims[value] if isinstance(value, str) else value

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


def tolerance_of(manifest: Manifest) -> Tolerance:
    """The tolerance that every comparison is held to."""
    t = manifest.tolerance
    return Tolerance(t.rtol, t.atol, t.why)
