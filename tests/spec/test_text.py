"""Inputs and dims as text: what is read, and where an error starts."""

from __future__ import annotations

import re

import pytest

from pipeline.errors import InputError
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec
from pipeline.spec.text import by_argument, parse_dim, parse_dims, parse_inputs

DIMS = parse_dims(["b=1:4:16", "h=32:224:512", "past=0:8:64", "seq=:32"])


def facts(dim: Dim) -> tuple[int, ...]:
    return dim.min, dim.opt, dim.max, dim.multiple_of, dim.offset


@pytest.mark.parametrize(
    ("text", "want", "defaulted"),
    [
        ("h=135:440:2160", (135, 440, 2160, 1, 0), ()),
        (" h = 136:440:2160/8 ", (136, 440, 2160, 8, 0), ()),
        ("h=9:17:33/8+1", (9, 17, 33, 8, 1), ()),
        ("h=0:1:8", (0, 1, 8, 1, 0), ()),
        ("h=:64", (1, 8, 64, 1, 0), ("min", "opt")),
        ("h=4:64", (4, 16, 64, 1, 0), ("opt",)),
        ("h=::64", (1, 8, 64, 1, 0), ("min", "opt")),
        ("h=:64/8", (8, 16, 64, 8, 0), ("min", "opt")),
    ],
)
def test_dims(text: str, want: tuple[int, ...], defaulted: tuple[str, ...]) -> None:
    dim = parse_dim(text)
    assert (dim.name, facts(dim), dim.defaulted) == ("h", want, defaulted)
    assert dim.auto
    assert not parse_dim(text, auto=False).auto


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h", "is not NAME=MIN:OPT:MAX"),
        ("h=", "is not NAME=MIN:OPT:MAX"),
        ("h=8", "For a largest size, write h=:8"),
        ("h=1:2:3:4", "is not NAME=MIN:OPT:MAX"),
        ("h=1:2:", "is not NAME=MIN:OPT:MAX"),
        ("h=1:2:-3", "is not NAME=MIN:OPT:MAX"),
        ("h=1:2:9/0", "multiple_of=0 must be at least 1"),
        ("h=1:2:9/4+5", "offset=5 is outside 0..3"),
        ("h=5:2:9", "opt=2 is outside"),
        ("h=9:9:5", "min=9 is greater than max=5"),
        ("if=1:2:9", "'if'"),
        ("=1:2:9", "dim name ''"),
    ],
)
def test_texts_that_are_no_dim(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_dim(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dim_given_twice() -> None:
    with pytest.raises(InputError, match="dim h is given twice"):
        parse_dims(["h=:8", "h=:16"])


def one(text: str) -> Input:
    used = {n: d for n, d in DIMS.items() if f"{n}" in text.partition(":")[2]}
    (found,) = parse_inputs([text], used).values()
    assert isinstance(found, Input)
    return found


def test_an_input() -> None:
    image = one("image:{b}x3x{h}x{ 2*h }")
    assert image.name == "image"
    assert [str(getattr(s, "name", s)) for s in image.shape] == ["b", "3", "h", "2*h"]
    assert image.shape[0] is DIMS["b"]
    assert (image.dtype, image.low, image.high) == ("float32", -1, 1)
    ids = one("ids:{b}x{seq}:int64:0..1000")
    assert (ids.dtype, ids.low, ids.high) == ("int64", 0, 1000)
    assert (one("m:{b}:int32").low, one("m:{b}:int32").high) == (0, 2)
    assert (one("t::float32:-2.5..1e3").low, one("t::float32:-2.5..1e3").high) == (-2.5, 1000)
    assert one("scalar:").shape == ()
    assert one("mask:{b}x{past + seq}:bool").shape[1].value({"past": 3, "seq": 4}) == 7  # type: ignore[union-attr]


def bools(text: str) -> set[bool]:
    """The distinct values among 100 random values of an input."""
    (found,) = parse_inputs([f"m:100:bool{text}"], {}).values()
    return set(found.sample({}, 0).tolist())


def test_the_range_of_a_bool() -> None:
    assert bools(":1..2") == bools(":1..1") == {True}
    assert bools(":0..0") == {False}
    assert bools("") == bools(":0..1") == bools(":-1..1") == {False, True}


@pytest.mark.parametrize("words", ["0..2", "2..3", "0.5..1", "1..0"])
def test_another_range_of_a_bool_is_refused(words: str) -> None:
    message = f"{words} is not a valid range; for a bool: 1..2 (all true), 0..0 (all "
    with pytest.raises(InputError, match=re.escape(message)):
        parse_inputs([f"m:4:bool:{words}"], {})


def test_places_in_nested_arguments() -> None:
    found = parse_inputs(
        ["x:{b}", "past[0][1]:{b}", "past[0][0]:{b}x2", "batch.image:{b}x3", "batch['a b']:{b}x4"],
        {"b": DIMS["b"]},
    )
    assert list(found) == ["x", "past", "batch"]
    assert [[i.name for i in layer] for layer in found["past"]] == [["past_0_0", "past_0_1"]]
    assert {k: i.name for k, i in found["batch"].items()} == {
        "image": "batch_image",
        "a b": "batch_a_b",
    }
    spec = ModelSpec("m", lambda _: None, found)  # type: ignore[arg-type, return-value]
    assert [i.name for i in spec.inputs] == [
        "x", "past_0_0", "past_0_1", "batch_image", "batch_a_b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("image", 6, "expected ':' and a shape"),
        ("image=1x3x{h}", 6, "expected ':' and a shape; the form is NAME:SIZExSIZE"),
        ("image:1x3x{h}y{h}", 14, "expected 'x' between sizes"),
        ("image:1x3x{h}x", 15, "expected a size after 'x'"),
        ("image:1x3x", 11, "expected a size after 'x'"),
        ("image:1xhx2", 9, "expected a number or {dim}"),
        ("image:1x{h", 9, "expected a number or {dim}"),
        ("image:1x-3", 9, "expected a number or {dim}"),
        ("image:1x{z}", 10, "dim z is not declared: add --dim z=MIN:OPT:MAX; declared: b, h"),
        ("image:1x{h + z}", 10, "dim z is not declared"),
        ("image:1x{h +}", 10, "does not parse"),
        ("image:1x{h.__class__}", 10, "is not allowed"),
        ("image:1x{}", 10, "does not parse"),
        ("image:{h}:float32:0", 19, "expected LOW..HIGH"),
        ("image:{h}:float32:0..x", 19, "expected LOW..HIGH"),
        ("image:{h}:float32:1.2.3..4", 19, "expected LOW..HIGH"),
        ("2d:{h}", 1, "expected a name"),
        ("past[:{h}", 5, "expected a name"),
        ("past[x]:{h}", 5, "expected a name"),
        ("[0]:{h}", 1, "expected the name of an argument"),
        (":{h}", 1, "expected the name of an argument"),
    ],
)
def test_the_character_is_pointed_at(text: str, at: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_inputs([text], {n: DIMS[n] for n in ("b", "h")})
    assert f"character {at} (" in str(caught.value), str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["x:{h}", "x:{h}"], "'x:{h}': another input already has this name"),
        (["x:{h}", "x[0]:{h}"], "'x[0]:{h}': another input already has"),
        (["x[0]:{h}", "x:{h}"], "'x:{h}': another input already has"),
        (["x[1]:{h}"], "input x: its parts are [1]; number them from 0 without gaps"),
        (["x[0][0]:{h}", "x[0][2]:{h}"], "input x[0]: its parts are [0, 2]"),
        (["x[0]:{h}", "x.a:{h}"], "has both numbered and named parts"),
        (["x:1x3"], "dim h is declared, but no input uses it"),
        (["x:{h}:float33"], "x: unknown dtype 'float33'"),
        (["x:{h}:torch.int64"], "a numpy name: 'int64'"),
        (["x:{h}:int64:5..5"], "low=5.0 must be less than high=5.0"),
        (["x:{h}:uint8:-1..5"], "is not a range of uint8"),
        (["x:0x{h}"], "size 0 must be at least 1"),
    ],
)
def test_inputs_that_can_not_be(texts: list[str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_inputs(texts, {"h": DIMS["h"]})
    assert words in str(caught.value)


def test_many_parts_in_one_line() -> None:
    """One line stands for a whole KV cache."""
    found = parse_inputs(["past[0..2][0..1]:{b}x2x{b}x64", "x:{b}"], {"b": DIMS["b"]})
    assert [[i.name for i in layer] for layer in found["past"]] == [
        [f"past_{n}_{k}" for k in range(2)] for n in range(3)
    ]
    assert {i.shape for layer in found["past"] for i in layer} == {(DIMS["b"], 2, DIMS["b"], 64)}
    each = [f"past[{n}][{k}]:{{b}}x2x{{b}}x64" for n in range(3) for k in range(2)]
    assert parse_inputs([*each, "x:{b}"], {"b": DIMS["b"]}) == found


@pytest.mark.parametrize("numbers", ["2..1", "0..9999"])
def test_many_parts_that_can_not_be(numbers: str) -> None:
    with pytest.raises(InputError, match="expected the first and the last number of parts"):
        parse_inputs([f"past[{numbers}]:4"], {})


def test_a_name_with_a_range_gives_its_text_to_many_parts() -> None:
    inputs = {"ids": "1x{s}:int64", "past[0..1][0..1]": "1x{p}", "mask": ("2", "3"), "a.b": "4"}
    assert by_argument(inputs) == {
        "ids": "1x{s}:int64",
        "mask": ("2", "3"),
        "past": (("1x{p}", "1x{p}"), ("1x{p}", "1x{p}")),
        "a": {"b": "4"},
    }


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ({"past[0]": "1", "past": "2"}, "another input already has this name"),
        ({"past[0..1]": "1", "past[1]": "2"}, "another input already has this name"),
        ({"past[1..2]": "1"}, "number them from 0 without gaps"),
        ({"past[": "1"}, "expected a name"),
    ],
)
def test_names_of_parts_that_contradict_each_other(inputs: dict[str, str], part: str) -> None:
    with pytest.raises(InputError, match=part):
        by_argument(inputs)
