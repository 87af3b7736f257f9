"""Profiles, and the points for verifying a conversion."""

from __future__ import annotations

import pytest

from pipeline.errors import InputError
from pipeline.spec.dims import Dim
from pipeline.spec.profiles import Profile, parse_sizes, points

SETS = {
    "raft": (Dim("h", 135, 440, 2160), Dim("w", 135, 1024, 3840)),
    "multiples": (Dim("h", 16, 64, 512, 8), Dim("w", 24, 96, 960, 24)),
    "single": (Dim("t", 2, 10, 64),),
    "static": (Dim("h", 135, 440, 2160), Dim("c", 3, 3, 3)),
    "none": (),
    "batch": (Dim("b", 1, 4, 32), Dim("h", 135, 440, 2160), Dim("w", 135, 1024, 3840)),
    "opt at min": (Dim("h", 8, 8, 512), Dim("w", 8, 512, 512)),
    "two sizes": (Dim("h", 7, 7, 8), Dim("w", 8, 8, 9)),
}


@pytest.mark.parametrize("name", SETS)
def test_points_are_legal_and_hold_the_corners(name) -> None:
    dims = {dim.name: dim for dim in SETS[name]}
    found = points(dims, [Profile("p").resolve(dims)])
    labels = [point.label for point in found]
    assert len(set(labels)) == len(labels)
    for point in found:
        assert point.sizes.keys() == dims.keys()
        for key, dim in dims.items():
            dim.check(point.sizes[key])
    every = [dict(point.sizes) for point in found]
    assert all(every.count(sizes) == 1 for sizes in every)
    for at in ("min", "opt", "max"):
        assert {key: getattr(dim, at) for key, dim in dims.items()} in every
    if len(dims) > 1:
        first, *rest = dims.values()
        corner = {first.name: first.min, **{d.name: d.max for d in rest}}
        assert corner in every
        assert {first.name: first.max, **{d.name: d.min for d in rest}} in every
    for key, dim in dims.items():
        if dim.multiple_of % 2 and dim.max > dim.min + 2:
            assert any(p.sizes[key] % 2 for p in found if "odd" in p.label)


def test_points_of_a_narrow_profile_stay_in_it() -> None:
    dims = {dim.name: dim for dim in SETS["raft"]}
    narrow = Profile.parse("h=440:440:441,w=1000", "n").resolve(dims)
    for point in points(dims, [narrow]):
        assert narrow.allows(point.sizes), str(point)
    assert not narrow.allows({"h": 439, "w": 1000})
    both = points(dims, [narrow, Profile("all").resolve(dims)], [{"h": 136, "w": 137}])
    assert both[-1].label == "asked for"
    assert {p.label.split(":")[0] for p in both[:-1]} == {"n", "all"}
    assert str(both[-1]) == "asked for (h=136,w=137)"


def test_parse() -> None:
    profile = Profile.parse("h=135:440:2160, w=512", "p")
    assert profile.ranges == {"h": (135, 440, 2160), "w": (512, 512, 512)}
    for text in ("", "h", "h=", "h=1:2", "h=1:2:3:4", "h=a", "h=1,,w=2", "=5", "h:1:2:3", "h=1.5"):
        with pytest.raises(InputError, match="is not DIM=MIN:OPT:MAX or DIM=SIZE"):
            Profile.parse(text, "p")
    with pytest.raises(InputError, match="h is given twice"):
        Profile.parse("h=1,h=2", "p")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("z=200", "profile p: no dim 'z'; the model's dims: h, w"),
        ("h=130:440:2160", "profile p: h=130 is outside 135..2160"),
        ("h=300:200:400", "profile p: h: opt=200 is outside 300..400"),
        ("h=400:300:200", "profile p: h: min=400 is greater than 200"),
        ("h=135:440:2161", "profile p: h=2161 is outside"),
    ],
)
def test_a_profile_beyond_its_dim_is_refused(text, words) -> None:
    dims = {dim.name: dim for dim in SETS["raft"]}
    with pytest.raises(InputError) as caught:
        Profile.parse(text, "p").resolve(dims)
    assert words in str(caught.value)


def test_shapes_of_a_profile_and_multiples() -> None:
    dims = {dim.name: dim for dim in SETS["multiples"]}
    with pytest.raises(InputError, match="h=20 is not a multiple of 8; nearest: 16, 24"):
        Profile.parse("h=16:20:64", "p").resolve(dims)
    profile = Profile.parse("h=16:32:64", "p").resolve(dims)
    shapes = profile.shapes({"x": (1, dims["h"], dims["w"]), "y": (dims["w"],)})
    assert shapes == {
        "x": ((1, 16, 24), (1, 32, 96), (1, 64, 960)),
        "y": ((24,), (96,), (960,)),
    }


def test_parse_sizes() -> None:
    dims = {dim.name: dim for dim in SETS["raft"]}
    assert parse_sizes("h=441", dims) == {"h": 441, "w": 1024}
    assert parse_sizes("w=135,h=137", dims) == {"h": 137, "w": 135}
    for text, words in (
        ("h=130", "shape 'h=130': h=130 is outside 135..2160"),
        ("z=3", "no dim 'z'; the model's dims: h, w"),
        ("h", "'h' is not DIM=SIZE"),
        ("h=-200", "is not DIM=SIZE"),
        ("h=٢٠٠", "is not DIM=SIZE"),
        ("", "no dim ''"),
    ):
        with pytest.raises(InputError) as caught:
            parse_sizes(text, dims)
        assert words in str(caught.value)


def test_dims_of_the_same_range_differ_somewhere() -> None:
    dims = {name: Dim(name, 16, 64, 512) for name in ("n", "h", "w")}
    found = points(dims, [Profile("p").resolve(dims)])
    for a, b in (("n", "h"), ("n", "w"), ("h", "w")):
        assert sum(point.sizes[a] != point.sizes[b] for point in found) >= 3
