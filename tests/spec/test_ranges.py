"""Ranges whose ends are expressions of dims, and patterns of masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.probe.apply import merge, with_dims
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim, DimExpr
from pipeline.spec.model import Input, ModelSpec
from pipeline.spec.padding import Padding
from pipeline.spec.ranges import RANGE_FORM
from pipeline.spec.text import parse_inputs

B, T, K = Dim("b", 1, 2, 8), Dim("t", 1, 8, 64), Dim("k", 1, 8, 64)
DIMS = {"b": B, "t": T}


def one(text: str) -> Input:
    found = parse_inputs([text, "x:{b}x{t}"], DIMS)[text.partition(":")[0]]
    assert isinstance(found, Input)
    return found


def drawn(declared: Input, **sizes: int) -> set[int]:
    """All values of a few draws."""
    return {int(v) for seed in range(40) for v in declared.sample(sizes, seed).ravel()}


def test_an_end_that_is_an_expression_is_included() -> None:
    lengths = one("lengths:{b}:int64:1..t")
    assert (lengths.low, lengths.high) == (1, DimExpr("t")) and lengths.drawn == "1..t"
    for t in (1, 2, 5):
        assert drawn(lengths, b=8, t=t) == set(range(1, t + 1))
    assert drawn(one("at:{b}:int32:0..t-1"), b=8, t=3) == {0, 1, 2}
    assert drawn(one("at:{b}:int32:t..2*t"), b=8, t=2) == {2, 3, 4}
    assert drawn(one("ids:{b}:int64:0..3"), b=8, t=2) == {0, 1, 2}  # a number is excluded, as ever
    scale = one("scale:{b}:float32:0..t").sample({"b": 8, "t": 50}, 0)
    assert scale.dtype == np.float32 and 1 < scale.max() <= 50


def test_a_dim_is_an_end_too() -> None:
    assert Input("n", (B,), "int64", 1, T) == Input("n", (B,), "int64", 1, DimExpr("t", (T,)))
    spec = ModelSpec("m", lambda _: None, (Input("x", (B, T)), Input("n", (B,), "int64", 1, T + 1)))  # type: ignore[arg-type, return-value]
    assert spec.sample({"b": 8, "t": 2}, 0)["n"].max() <= 3


def test_a_range_that_is_empty_at_some_sizes() -> None:
    with pytest.raises(InputError, match=r"input at: the range 5\.\.t has no int64 at b=1, t=4"):
        one("at:{b}:int64:5..t").sample({"b": 1, "t": 4}, 0)
    with pytest.raises(InputError, match="has no uint8 at b=1, t=300"):
        one("at:{b}:uint8:0..t").sample({"b": 1, "t": 300}, 0)


def test_the_dims_of_a_range_follow_the_dims_of_the_shapes() -> None:
    inputs = (Input("x", (B, T)), Input("y", (K,)), Input("n", (B,), "int64", 1, K))
    spec = ModelSpec("m", lambda _: None, inputs)  # type: ignore[arg-type, return-value]
    merged = merge(spec, "t", "k")
    assert merged is not None
    assert merged.inputs[2].high == DimExpr("t") and merged.sample({"b": 1, "t": 4}, 0)["n"] >= 1
    narrow = with_dims(spec, {"k": dataclasses.replace(K, max=32)}).inputs[2].high
    assert isinstance(narrow, DimExpr) and narrow.dims[0].max == 32


def test_wrong_ends() -> None:
    with pytest.raises(InputError, match="the range of n: z: no dim z; declare it"):
        ModelSpec("m", lambda _: None, (Input("n", (B,), "int64", 1, DimExpr("z")),))  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match="which can't be computed from the padded size"):
        ModelSpec(
            "m", lambda _: None, (Input("x", (T,)), Input("n", (B,), "int64", 1, T)),  # type: ignore[arg-type, return-value]
            padding=Padding({"t": 4}),
        )  # fmt: skip
    with pytest.raises(InputError, match="m: high=t: the range of a bool is of numbers"):
        Input("m", (B,), "bool", 0, T)


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4), (3, 5), (1, 1)])
def test_patterns(dtype: str, shape: tuple[int, ...]) -> None:
    masks = {
        pattern: Input("m", shape, dtype, 0, 2, pattern=pattern).sample({}, 0)  # type: ignore[arg-type]
        for pattern in ("prefix", "padding", "causal", "all")
    }
    for pattern, mask in masks.items():
        assert mask.dtype == dtype and mask.shape == shape
        counted = mask == (pattern != "padding")
        assert (counted.sum(-1) >= 1).all()  # no row is empty
    assert masks["all"].all()
    rows = masks["prefix"].reshape(-1, shape[-1]).astype(int)
    assert all((np.diff(row) <= 0).all() for row in rows)
    rows = masks["padding"].reshape(-1, shape[-1]).astype(int)
    assert all((np.diff(row) >= 0).all() for row in rows)
    want = np.tril(np.ones(shape, int), shape[-1] - shape[-2])
    if shape[-1] >= shape[-2]:
        assert np.array_equal(masks["causal"], want)


def test_rows_of_a_prefix_mask_differ_and_a_short_key_axis_has_no_empty_row() -> None:
    mask = one("m:{b}x{t}:bool:prefix").sample({"b": 8, "t": 64}, 0)
    assert len({int(row.sum()) for row in mask}) > 4
    short = Input("m", (4, 2), "bool", pattern="causal").sample({}, 0)
    assert short.astype(int).tolist() == [[1, 0], [1, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m:{b}:bool:suffix", "expected LOW..HIGH, or prefix, padding, causal or all"),
        ("m:{b}:float32:prefix", "m: a prefix mask is a bool or an integer"),
        ("m:{b}:bool:causal", "m: too few axes for a causal mask"),
        ("m:{b}:bool:0..t", "0..t is not a valid range; for a bool: 1..2 (all true)"),
        (
            "m:{b}:int64:0..z",
            "expected LOW..HIGH, or prefix, padding, causal or all: there is no dim z",
        ),
    ],
)
def test_ranges_and_patterns_that_can_not_be(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        one(text)
    assert words in str(caught.value)


def test_the_option_range_has_the_same_forms() -> None:
    def with_ranges(*ranges: str) -> dict[str, Input]:
        inputs: Any = (Input("x", (B, T)), Input("n", (B,), "int64"), Input("m", (B, T), "bool"))
        spec = ModelSpec("m", lambda _: None, inputs)  # type: ignore[arg-type, return-value]
        return {i.name: i for i in find_source(Config(spec, ranges=ranges)).inputs}

    found = with_ranges("n=1..t", "m=prefix", "x=0..255")
    assert (found["n"].drawn, found["m"].drawn, found["x"].drawn) == ("1..t", "prefix", "0..255")
    assert with_ranges("m=prefix", "m=1..2")["m"].pattern == ""
    for text, words in {
        "n=1..z": f"range n=1..z: expected {RANGE_FORM}: there is no dim z",
        "n": "range 'n' is not INPUT=LOW..HIGH",
        "z=1..2": "range z: no such input; the inputs are x, n, m",
        "x=all": "x: a all mask is a bool",
    }.items():
        with pytest.raises(InputError) as caught:
            with_ranges(text)
        assert words in str(caught.value)
