"""Specs of a torch module in hand, and wrong calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import pipeline
from pipeline.errors import InputError
from pipeline.source.module import module_config, module_spec
from pipeline.spec.dims import shape_texts
from pipeline.spec.model import ModelSpec


class Net(torch.nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x if mask is None else x * mask


class Nested(torch.nn.Module):
    def forward(self, ids: Any, past: Any) -> Any:
        return ids, past


class Rest(torch.nn.Module):
    def forward(self, x: Any, *more: Any) -> Any:
        return x, more


X = torch.arange(12.0).reshape(2, 6)
RANGES = {"b": (1, 2, 8), "t": (4, 64)}


def facts(spec: ModelSpec) -> dict[str, Any]:
    return {
        i.name: (shape_texts(i.shape), i.dtype, None if i.values is None else i.values.shape)
        for i in spec.inputs
    }


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": "{b}x{t}"},
        ["{b}x{t}"],
        "{b}x{t}",
        pipeline.Input("", (pipeline.Dim("b", 1, 2, 8), pipeline.Dim("t", 4, 16, 64))),
    ],
)
def test_the_only_input_in_each_form(inputs: Any) -> None:
    dims = None if isinstance(inputs, pipeline.Input) else RANGES
    spec = module_spec(Net(), inputs, dims)
    assert facts(spec) == {"x": (("b", "t"), "float32", None)}
    assert spec.name == "Net"
    t = spec.dims["t"]
    assert (t.min, t.opt, t.max) == (4, 16, 64)


def test_tensors_fix_their_sizes_and_a_text_frees_them() -> None:
    ids = torch.tensor([[1, 2]])
    assert facts(module_spec(Net(), (X, ids))) == {
        "x": ((2, 6), "float32", (2, 6)),
        "mask": ((1, 2), "int64", (1, 2)),
    }
    spec = module_spec(
        Net(), {"x": ("{b}x{t}", X), "mask": ("{b}x2", np.ones((2, 2), bool))}, RANGES
    )
    assert facts(spec) == {
        "x": (("b", "t"), "float32", (2, 6)),
        "mask": (("b", 2), "bool", (2, 2)),
    }
    assert module_spec(Net(), torch.zeros(2, 3, dtype=torch.uint8)).inputs[0].dtype == "uint8"
    assert module_spec(Net(), torch.tensor(2.0)).inputs[0].shape == ()


def test_nested_inputs_and_inputs_without_a_name() -> None:
    inputs = {"ids": "{b}", "past": [("{b}x4", "{b}x5"), {"k": X}]}
    spec = module_spec(Nested(), inputs, {"b": (1, 2, 8)})
    assert list(facts(spec)) == ["ids", "past_0_0", "past_0_1", "past_1_k"]
    assert spec.arguments == {
        "ids": "ids", "past": [("past_0_0", "past_0_1"), {"k": "past_1_k"}],
    }  # fmt: skip
    assert list(facts(module_spec(Rest(), ["1x2", "3", X]))) == ["x", "more_0", "more_1"]


@pytest.mark.parametrize(
    ("value", "dim"),
    [
        ((4, 64), pipeline.Dim("h", 4, 16, 64)),
        ([4, 8, 64], pipeline.Dim("h", 4, 8, 64)),
        ("8:16:64/8", pipeline.Dim("h", 8, 16, 64, 8)),
        (pipeline.Dim("h", max=9), pipeline.Dim("h", max=9)),
    ],
)
def test_each_form_of_a_range(value: Any, dim: pipeline.Dim) -> None:
    found = module_spec(Net(), "{h}", {"h": value}).dims["h"]
    same = ("min", "opt", "max", "multiple_of")
    assert [getattr(found, word) for word in same] == [getattr(dim, word) for word in same]
    # a range is narrowed unless the caller forbids it; a Dim says itself what it allows
    assert found.auto is not isinstance(value, pipeline.Dim)
    assert not module_spec(Net(), "{h}", {"h": value}, exact=True).dims["h"].auto


WRONG: list[tuple[Any, Any, Any, str]] = [
    ("raft", "1", None, "not str. For a name, a file, a ModelSpec or a Config, call pipeline.run("),
    (Net, "1", None, "not the class Net. Make a module: Net(...)"),
    (len, "1", None, "not builtin_function_or_method. Write for example pipeline.convert(module, "),
    (torch.nn.Linear(1, 1, device="meta"), "1", None, "weight has no values"),
    (Net(), None, None, "no inputs: describe each argument of forward(x: 'Any', mask: 'Any' = N"),
    (Net(), ["1", "1", "1"], None, "3 inputs for forward(x: 'Any', mask: 'Any' = None) -> 'Any'."),
    (Net(), {"x": 3}, None, "inputs x: 3 is no input of an engine. Pass a tensor, a text such as"),
    (Net(), {"x": ("1x3", 3)}, None, "inputs x[1]: 3 is no input of an engine. Pass a tensor"),
    (Net(), {"x": ("{b}", X)}, RANGES, "dim t: no input uses it. Write {t} in place of a size: in"),
    (Net(), X, RANGES, 'Write {b} in place of a size: inputs={"x": ("2x6", tensor)}'),
    (Net(), {"x": "{b}x3"}, None, "dim b is not declared: add --dim b=MIN:OPT:MAX. In Python: dim"),
    (Net(), {"x": ("{b}x{t}", X[:, :3])}, RANGES, "x axis 1: t=3 is outside 4..64"),
    (Net(), {"x": ("{b}x{t}:int64", X)}, RANGES, "x is int64, but its values are float32"),
    (Net(), "{h}", {"h": 64}, "dim h: 64 is not a range. Pass (min, opt, max), (min, max), a text"),
    (Net(), "{h}", {"h": pipeline.Dim("w", max=3)}, 'this Dim is called w. Write Dim("h", ...)'),
    (Net(), "{h}", {"h": (4, 64, 8)}, "min=4..max=8: (4, 64, 8) is read as (min, opt, max)"),
    (Net(), X, {"x": {0: ("b", 1, 8)}}, "dims: 'x': {0: ('b', 1, 8)} is not a dim and its range."),
    (Net(), X, {("x", 0): (1, 8)}, 'Write inputs={"x": ("{b}x8", tensor)}, dims={"b": (1, 8)}'),
    (Net(), X, ({0: (1, 8)},), "A dim has its name in the text of an input, in place of a size."),
    (Net(), {"x": (2, 8)}, None, 'inputs x: (2, 8) is not a text. Write the shape as "2x8"'),
    (Net(), {"x": ["b", 8]}, None, 'Write the shape as "{b}x8"'),
    (Net(), "{h}", {"h": (64, 3)}, "dim h: min=64 is greater than max=3"),
    (Net(), "{h}", [64], "dims=[64]: pass a dict by name, such as"),
    (Net(), {"x": "1x3y"}, None, "character 6 ('y'): expected 'x' between sizes"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "inputs", "dims", "words"), WRONG)
def test_a_wrong_call_says_what_to_call(module: Any, inputs: Any, dims: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        module_spec(module, inputs, dims)
    assert words in str(caught.value)


def test_options_are_those_of_a_config() -> None:
    config = module_config(Net(), "1x3", None, "m", {"target": "tensorrt-10", "shapes": ("a=1",)})
    assert isinstance(config.model, ModelSpec) and config.model.name == "m"
    assert (config.target, config.shapes) == ("tensorrt-10", ("a=1",))
    with pytest.raises(InputError, match=r"no option 'targt' \(did you mean target\?\)\. The opti"):
        module_config(Net(), "1x3", None, "", {"targt": "rtx-1.7"})
    with pytest.raises(InputError, match="no option 'weights'"):
        module_config(Net(), "1x3", None, "", {"weights": "w.pt"})
