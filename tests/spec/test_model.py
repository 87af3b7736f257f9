"""The refusals of a spec, and its samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.padding import Padding, amounts
from pipeline.spec.profiles import Profile, points

H, W = Dim("h", 16, 64, 512), Dim("w", 1, 440, 512)
TOLERANCE = Tolerance(1e-3, 1e-4, "a test")


def spec(**changes) -> ModelSpec:
    given = {
        "name": "m",
        "build": lambda _: torch.nn.Identity(),
        "inputs": (Input("x", (1, 3, H, W)),),
        "outputs": (Output("y", (1, 3, H, 4 * W)),),
        "tolerance": TOLERANCE,
    }
    return ModelSpec(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outputs": (Output("x"),)}, "two inputs or outputs are called 'x'"),
        ({"inputs": ()}, "needs at least one input"),
        ({"outputs": (Output("y", (Dim("z", 1, 2, 3),)),)}, "output y: z: no dim z"),
        ({"inputs": (Input("x", (H, Dim("h", 1, 2, 3))),)}, "two different dims are called 'h'"),
        ({"padding": Padding({"z": 8})}, "padding names z, which is not its dim"),
        ({"padding": Padding({"h": 8}, mode="reflect")}, None),
        ({"padding": Padding({"w": 8}, mode="reflect")}, "dim w: 1 is too small to be reflected"),
        ({"padding": Padding({"w": 8}, mode="replicate")}, None),
    ],
)
def test_a_spec_refuses_what_can_not_be(changes, words) -> None:
    if words is None:
        spec(**changes)
        return
    with pytest.raises(InputError) as caught:
        spec(**changes)
    assert words in str(caught.value)


def test_padding_refuses_what_can_not_be() -> None:
    for arguments, words in (
        (({},), "at least one dim"),
        (({"h": 0},), "h=0: the multiple must be 2 or more"),
        (({"h": 8}, "edge"), "unknown mode 'edge'; known: replicate, reflect, constant"),
        (({"h": 8}, "reflect", "left"), "unknown align 'left'"),
    ):
        with pytest.raises(InputError) as caught:
            Padding(*arguments)
        assert words in str(caught.value)
    eight = Dim("h", 16, 64, 512, 8)
    for dim, words in (
        (eight, "padding to 8 has no effect on h in"),
        (Dim("h", 9, 9, 9), "padding needs a dim of several sizes"),
    ):
        with pytest.raises(InputError) as caught:
            spec(inputs=(Input("x", (dim, W)),), outputs=(Output("y"),), padding=Padding({"h": 8}))
        assert words in str(caught.value)
    with pytest.raises(InputError, match="h_padded"):
        other = Dim("h_padded", 1, 2, 3)
        spec(inputs=(Input("x", (H, other)),), outputs=(Output("y"),), padding=Padding({"h": 8}))


@pytest.mark.parametrize("align", ["center", "end"])
@pytest.mark.parametrize("multiple", [8, 16])
def test_reflect_is_refused_just_where_torch_refuses_it(align, multiple) -> None:
    def works(size: int) -> bool:
        low, high = amounts(size, multiple, align)
        try:
            torch.nn.functional.pad(torch.zeros(1, 1, size), (low, high), mode="reflect")
        except RuntimeError:
            return False
        return True

    for low in range(1, 2 * multiple):
        dim = Dim("h", low, 100, 100)
        given = {
            "inputs": (Input("x", (dim,)),),
            "outputs": (Output("y"),),
            "padding": Padding({"h": multiple}, mode="reflect", align=align),
        }
        if all(works(size) for size in range(low, 101)):
            spec(**given)
        else:
            with pytest.raises(InputError, match="too small to be reflected"):
                spec(**given)


def test_tolerance_has_no_way_to_pass_anything() -> None:
    for rtol, atol in ((1.0, 0), (-1e-3, 0), (0, -1), (float("nan"), 0), (0, float("inf"))):
        with pytest.raises(InputError, match="tolerance"):
            Tolerance(rtol, atol, "w")
    Tolerance(0, 0, "exact")


def test_input_refuses_what_can_not_be() -> None:
    for arguments, words in (
        (("x", 4), "x: shape 4 is not a tuple of sizes"),
        (("x", (0, H)), "x axis 0: size 0 must be at least 1"),
        (("x", (H,), "float33"), "x: unknown dtype 'float33'"),
        (("x", (H,), "str"), "is not a number or bool"),
        (("x", (H,), "bfloat16"), "float32"),
        (("x", (H,), "uint8"), "x: low=-1.0, high=1.0 is not a range of uint8"),
        (("x", (H,), "int64", 3, 3), "x: low=3 must be less than high=3"),
        (("x", (H,), "float32", 0, float("nan")), "x: low=0 must be less"),
    ):
        with pytest.raises(InputError) as caught:
            Input(*arguments)
        assert words in str(caught.value)


def test_samples_are_seeded_and_in_range() -> None:
    sizes = {"h": 40, "w": 50}
    image = Input("x", (2, H, W), low=-2, high=3)
    a = image.sample(sizes, 1)
    assert a.shape == (2, 40, 50)
    assert a.dtype == np.float32
    assert -2 <= a.min() < -1.9 < 2.9 < a.max() <= 3
    assert np.array_equal(a, image.sample(sizes, 1))
    assert not np.array_equal(a, image.sample(sizes, 2))
    assert not np.array_equal(a, Input("z", (2, H, W), low=-2, high=3).sample(sizes, 1))
    assert set(Input("i", (H, W), "int64", 0, 3).sample(sizes, 0).ravel()) == {0, 1, 2}
    assert set(Input("u", (H, W), "uint8", 0, 256).sample(sizes, 0).ravel()) == set(range(256))
    assert set(Input("b", (H, W), "bool").sample(sizes, 0).ravel()) == {False, True}
    assert Input("f", (H,), "float16").sample(sizes, 0).dtype == np.float16
    assert spec().sizes_of({"x": (1, 3, 20, 30)}) == {"h": 20, "w": 30}


@pytest.mark.parametrize(("low", "high", "share"), [(1, 2, 1.0), (-2, -1, 0.0), (-1, 1, 0.5)])
def test_bool_samples_keep_to_their_range(low: float, high: float, share: float) -> None:
    mask = Input("keep", (1000,), "bool", low=low, high=high).sample({}, 0)
    assert mask.dtype == bool
    assert abs(mask.mean() - share) < 0.06


@pytest.mark.parametrize("name", ["../evil", "", "a/b", ".hidden"])
def test_model_names_are_names_of_folders(name: str) -> None:
    with pytest.raises(InputError, match="model name"):
        ModelSpec(
            name,
            lambda _: None,
            (Input("x", (1,)),),
            (Output("y"),),
            Tolerance(1e-4, 1e-4, "a test"),
        )


def test_a_shape_of_neither_numbers_nor_dims() -> None:
    with pytest.raises(InputError, match="x axis 1: None is neither a number nor a dim"):
        Input("x", (1, None))


SEQ, PAST = Dim("seq", 1, 8, 32), Dim("past", 0, 16, 100)


def test_dims_in_expressions_alone_are_dims_of_the_spec() -> None:
    given = spec(
        inputs=(Input("x", (1, SEQ)), Input("mask", (1, PAST + SEQ))),
        outputs=(Output("y", (1, PAST + SEQ)),),
        rules=("past + seq <= 100",),
    )
    assert given.dims == {"seq": SEQ, "past": PAST}
    assert given.sizes_of({"x": (1, 3), "mask": (1, 8)}) == {"seq": 3, "past": 5}
    assert given.sample({"seq": 3, "past": 0}, 0)["mask"].shape == (1, 3)
    with pytest.raises(InputError, match="past \\+ seq <= 100 does not hold at past=98,seq=3"):
        given.sizes_of({"x": (1, 3), "mask": (1, 101)})
    assert not given.auto("past")
    assert spec(refine_dims=True).auto("h")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rules": ("z < 3",)}, "rule 'z < 3': no dim z"),
        ({"rules": ("h <",)}, "does not parse"),
        ({"rules": ("h",)}, "expected two expressions and one of"),
        ({"rules": "h < 3"}, "rules='h < 3' is not a tuple of str"),
        ({"inputs": (Input("x", (DimExpr("2*z"), H)),)}, "input x: 2*z: no dim z"),
        ({"inputs": {"x": Input("x", (H, W)), "y": 3}}, "inputs['y'] is 3, not an Input"),
        ({"inputs": (Input("a", (H, W)), Input("a", (H,)))}, "two inputs or outputs are called"),
        ({"outputs": "y"}, "outputs='y' is not a tuple of Output"),
        ({"build": 3}, "build=3 can't be called"),
        (
            {
                "inputs": (Input("x", (1, 3, H, 2 * W)),),
                "outputs": (Output("y"),),
                "padding": Padding({"w": 8}),
            },
            "input x has the size 2 * w, which can't be computed from the padded size",
        ),
    ],
)
def test_expressions_rules_and_structures_that_can_not_be(changes, words) -> None:
    with pytest.raises(InputError) as caught:
        spec(**changes)
    assert words in str(caught.value)


def test_rules_are_kept_at_every_point_that_is_compared() -> None:
    given = spec(
        inputs=(Input("x", (1, SEQ)), Input("mask", (1, PAST + SEQ))),
        outputs=(Output("y"),),
        rules=("past + seq <= 40", "past != 16"),
    )
    found = points(given.dims, [Profile("p").resolve(given.dims)], (), given.rules)
    assert len(found) > 3
    for point in found:
        assert point.sizes["past"] + point.sizes["seq"] <= 40 and point.sizes["past"] != 16
        given.sizes_of({n: x.shape for n, x in given.sample(point.sizes, 0).items()})
    assert any(sum(point.sizes.values()) == 40 for point in found)


def test_a_value_without_axes_is_an_array() -> None:
    for dtype in ("bool", "int64", "float32"):
        made = Input("c", (), dtype).sample({}, 0)
        assert isinstance(made, np.ndarray) and made.shape == () and made.dtype == dtype
