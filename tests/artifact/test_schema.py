"""The manifest's schema as text, so that a change of a stored class is noticed."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from test_artifact import BARE, FULL, H, W

from pipeline.artifact.manifest import SCHEMA, Manifest
from pipeline.artifact.stored_interface import DIM_HINTS, HINTS, read_interface
from pipeline.errors import ArtifactError
from pipeline.spec.dims import Dim, DimExpr, Size
from pipeline.spec.interface import Interface
from pipeline.spec.tensors import End, Input
from pipeline.spec.values import Values

GOLDEN = Path(__file__).with_name(f"manifest_schema_{SCHEMA}.txt")
_STORED = {Interface: HINTS, Dim: DIM_HINTS}  # these are not stored field by field


def lines_of(kind: Any, path: str) -> Iterator[str]:
    """Every path below `path`, with its type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind == Size:
        yield f"{path}: int | text of a dim or of an expression"
    elif kind == End:
        yield f"{path}: float | text of a dim or of an expression"
    elif origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        yield f"{path}: null or"
        yield from lines_of(next(a for a in arguments if a is not NoneType), path)
    elif origin in (Union, UnionType):
        yield f"{path}: {' | '.join(argument.__name__ for argument in arguments)}"
    elif origin is tuple and arguments[-1] is ...:
        yield from lines_of(arguments[0], f"{path}[]")
    elif origin is tuple:
        for place, argument in enumerate(arguments):
            yield from lines_of(argument, f"{path}[{place}]")
    elif origin is Mapping:
        yield from lines_of(arguments[1], f"{path}{{}}")
    elif origin is Literal:
        yield f"{path}: {' | '.join(map(repr, arguments))}"
    elif dataclasses.is_dataclass(kind):
        hints = _STORED.get(kind) or get_type_hints(kind)  # type: ignore[call-overload]
        for name, hint in hints.items():
            yield from lines_of(hint, f"{path}.{name}" if path else name)
    else:
        yield f"{path}: {kind.__name__}"


def test_the_schema_is_the_one_on_file() -> None:
    now, known = list(lines_of(Manifest, "")), GOLDEN.read_text().splitlines()
    diff = "\n".join(difflib.unified_diff(known, now, GOLDEN.name, "now", n=0, lineterm=""))
    assert not diff, (
        f"what a manifest stores has changed: raise SCHEMA in pipeline/artifact/manifest.py and "
        f"write a new {GOLDEN.name}\n{diff}"
    )


def test_a_stored_class_that_changes_shows() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(Manifest):
        more: tuple[int, ...] = ()

    assert set(lines_of(Wider, "")) - set(lines_of(Manifest, "")) == {"more[]: int"}


def test_a_manifest_survives_write_and_read() -> None:
    read = Manifest.from_json(FULL.to_json())
    assert read == FULL
    assert read.interface == FULL.interface
    assert read.to_json() == FULL.to_json()
    image, half = read.interface.inputs
    h, w = image.shape[2:]
    # one object for each dim, also inside of expressions
    assert half.shape == (H // 2, W + H) and isinstance(half.shape[0], DimExpr)
    assert isinstance(h, Dim) and isinstance(w, Dim) and isinstance(half.shape[1], DimExpr)
    assert half.shape[0].dims[0] is h
    assert [id(dim) for dim in half.shape[1].dims] == [id(h), id(w)]
    assert list(read.interface.dims.values()) == [H, W]
    assert h.defaulted == H.defaulted == ("opt",)
    flow, seen = read.interface.outputs
    assert flow.shape is not None and flow.shape[2] is h
    assert seen.shape == (DimExpr("found"),)
    assert read.interface.sizes_of({"image": (1, 3, 144, 200), "half": (72, 344)}) == {
        "h": 144,
        "w": 200,
    }


def test_ranges_and_values_survive_write_and_read() -> None:
    image = FULL.interface.inputs[0]
    lengths = Input("lengths", (H,), "int64", 1, H + 1)
    mask = Input("mask", (H,), "bool", pattern="prefix", values=Values("0" * 64, (7,)))
    interface = dataclasses.replace(FULL.interface, inputs=(image, lengths, mask))
    text = dataclasses.replace(BARE, interface=interface).to_json()
    read = Manifest.from_json(text).interface
    assert read.inputs == interface.inputs
    assert isinstance(read.inputs[1].high, DimExpr)
    assert read.inputs[1].high.dims == (read.dims["h"],)
    with pytest.raises(ArtifactError, match=r"inputs\[1\]\.high: no dim is called z"):
        read_interface(json.loads(text.replace("h + 1", "z + 1"))["interface"], "m", "interface")


def test_what_the_pipeline_may_narrow_is_not_stored() -> None:
    free = dataclasses.replace(H, auto=True)
    image = dataclasses.replace(FULL.interface.inputs[0], shape=(1, 3, free, 8))
    declared = Interface((image,), profiles=())
    settled = declared.settled({}, {})
    assert settled != declared
    read = Manifest.from_json(dataclasses.replace(BARE, interface=settled).to_json())
    assert read.interface == settled
    assert not read.interface.dims["h"].auto
