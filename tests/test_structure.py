"""Nested inputs and outputs: their order, their names, and the way back."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.dims import Dim
from pipeline.errors import InputError
from pipeline.structure import call_with, flat_inputs, leaves, mapped, name_of, output_names
from pipeline.tensors import Input

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
        (Input("x", (B,)), "give a tuple of Input"),
        ("x", "give a tuple of Input"),
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
