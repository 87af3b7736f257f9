"""Nested inputs and outputs: their order, their names, and the way back."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.errors import InputError
from pipeline.spec.dims import Dim
from pipeline.spec.structure import (
    by_name_or_place,
    call_with,
    flat_inputs,
    leaves,
    mapped,
    name_of,
    output_names,
)
from pipeline.spec.tensors import Input

B = Dim("b", 1, 2, 8)


@dataclasses.dataclass
class Batch:
    image: Any
    mask: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


def tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def test_names_are_places() -> None:
    for path, want in (
        (("past", 0, "key"), "past_0_key"),
        (("a b", "c-d"), "a_b_c_d"),
        ((), "input"),
        ((0,), "input_0"),
        ((0, 1), "input_0_1"),
        (("layer.0.weight",), "layer_0_weight"),
        (("_x",), "x"),
        (("é",), "é"),
    ):
        assert name_of(path, "input") == want


def test_inputs_are_named_and_found_again() -> None:
    x = Input("", (B, 3))
    arguments, flat = flat_inputs(
        {
            "x": x,
            "past": [(x, x), (x, x)],
            "batch": Batch(x),
            "pair": Pair(x, Input("mine", (B,))),
            "more": {"a": x, "none": None},
        }
    )
    names = [i.name for i in flat]
    assert names == [
        "x", "past_0_0", "past_0_1", "past_1_0", "past_1_1", "batch_image", "pair_left", "mine",
        "more_a",
    ]  # fmt: skip
    args, kwargs = call_with(arguments, {name: name.upper() for name in names})
    assert args == ()
    assert kwargs == {
        "x": "X",
        "past": [("PAST_0_0", "PAST_0_1"), ("PAST_1_0", "PAST_1_1")],
        "batch": Batch("BATCH_IMAGE", None),
        "pair": Pair("PAIR_LEFT", "MINE"),
        "more": {"a": "MORE_A", "none": None},
    }
    assert flat_inputs((x, Input("y", (B,))))[0] is None
    arguments, flat = flat_inputs([x, (x,)])
    assert [i.name for i in flat] == ["input_0", "input_1_0"]
    assert call_with(arguments, {"input_0": 1, "input_1_0": 2}) == ((1, (2,)), {})


def test_what_is_no_input() -> None:
    for inputs, words in (
        ({"x": 3}, "inputs['x'] is 3, not an Input"),
        ({"x": (Input("", (B,)), "y")}, "inputs['x'][1] is 'y', not an Input"),
        (Input("x", (B,)), "expected a tuple of Input"),
        ("x", "expected a tuple of Input"),
    ):
        with pytest.raises(InputError) as caught:
            flat_inputs(inputs)
        assert words in str(caught.value)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_outputs_are_named(kind: Any) -> None:
    t = torch.zeros(1)
    for result, want in (
        (t, ["output"]),
        ((t, t), ["output_0", "output_1"]),
        ([t], ["output_0"]),
        (kind(logits=t, past=((t, t), (t, t))), [
            "logits", "past_0_0", "past_0_1", "past_1_0", "past_1_1",
        ]),
        (Batch(t, None), ["image"]),
        ((Pair(t, t), {"a": t}), ["output_0_left", "output_0_right", "output_1_a"]),
    ):  # fmt: skip
        assert output_names(result, tensor) == want
        assert len(list(leaves(result))) == len(want)


def test_outputs_that_can_not_be() -> None:
    t = torch.zeros(1)
    for result, words in (
        ({"y": [t, 3]}, "output.y[1] is of type int, not a tensor"),
        ("text", "output is of type str"),
        (None, "returns no tensor"),
        ((), "returns no tensor"),
        ({"a": {"b": t}, "a_b": t}, "two outputs would be called a_b"),
    ):
        with pytest.raises(InputError) as caught:
            output_names(result, tensor)
        assert words in str(caught.value)


def test_a_structure_with_other_leaves_keeps_its_types() -> None:
    value = collections.OrderedDict(a=[1, (2, Pair(3, None))], b=Batch(4))
    assert mapped(value, lambda n: n * 10) == collections.OrderedDict(
        a=[10, (20, Pair(30, None))], b=Batch(40)
    )
    assert type(mapped(value, str)) is collections.OrderedDict


def two(image: Any, mask: Any = None) -> None:
    """What a forward takes, as seen from outside."""


def some(first: Any, *rest: Any) -> None:
    """One name, and any number without."""


def any_number(*rest: Any) -> None:
    """No name at all."""


def by_keyword(first: Any, **more: Any) -> None:
    """Any name."""


def in_order(first: Any, second: Any, /) -> None:
    """Names that can't be used as keywords."""


@pytest.mark.parametrize(
    ("forward", "names", "placed", "note"),
    [
        (two, ["image"], False, ""),
        (two, ["mask", "image"], False, ""),
        (by_keyword, ["first", "whatever"], False, ""),
        (in_order, ["first", "second"], True, ""),
        (any_number, ["a", "b"], True, "a, b: passed by position"),
        (
            some,
            ["first", "b"],
            True,
            "b: passed by position, because the model's forward is forward(",
        ),
        (type, ["a"], True, "has no readable signature"),
    ],
)
def test_names_or_places(forward: Any, names: list[str], placed: bool, note: str) -> None:
    arguments = {name: name for name in names}
    found, said = by_name_or_place("m", forward, arguments)
    assert found == (tuple(names) if placed else arguments)
    assert note in said and bool(note) == bool(said)


@pytest.mark.parametrize(
    ("forward", "names", "words"),
    [
        (two, ["imgae"], "no argument 'imgae' (did you mean 'image'?); its arguments: image, mask"),
        (two, ["x", "y"], "no argument 'x'; its arguments: image, mask"),
        (two, ["image", "musk"], "no argument 'musk' (did you mean 'mask'?)"),
        (two, ["image", "mask", "more"], "no argument 'more'; its arguments: image, mask"),
        (some, ["b"], "no argument 'b'; its arguments: first"),
        (lambda: None, ["x"], "no argument 'x'; its arguments: none"),
    ],
)
def test_names_that_are_not_there(forward: Any, names: list[str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        by_name_or_place("m", forward, dict.fromkeys(names, "name"))
    assert str(caught.value).startswith("model m: its forward has ")
    assert words in str(caught.value)


def test_places_are_those_of_forward() -> None:
    turned = {name: name for name in ("mask", "image")}
    assert by_name_or_place("m", two, turned, hooked=True) == (("image", "mask"), "")
    # without the first argument, nothing can be passed by position
    only = {"mask": "mask"}
    assert by_name_or_place("m", two, only, hooked=True) == (only, "")
    turned = {name: name for name in ("second", "first")}
    assert by_name_or_place("m", in_order, turned) == (("first", "second"), "")


def test_what_has_no_names_stays() -> None:
    for arguments in (None, ("a", "b")):
        assert by_name_or_place("m", two, arguments) == (arguments, "")
