"""What a user passes in Python is checked where it is passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from pipeline.convert.options import Verify
from pipeline.errors import InputError
from pipeline.spec.config import Config
from pipeline.spec.precision import check_precision
from pipeline.spec.tensors import Output, Tolerance

FORM = r"Write for example Tolerance\(rtol=1e-3, atol=1e-5, why="


def test_a_module_in_place_of_a_source() -> None:
    with pytest.raises(InputError, match=r"not the module Linear\. .*write pipeline\.convert\("):
        pipeline.run(torch.nn.Linear(8, 8))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r'not PosixPath\. Write "a/m.onnx"'):
        pipeline.run(Path("a/m.onnx"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"not int\. Write for example"):
        Config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "word", "close"),
    [
        (lambda: Config("linear", precison="fp16"), "precison", "precision"),  # type: ignore[call-arg]
        (lambda: Verify(shape="b=3"), "shape", "shapes"),  # type: ignore[call-arg]
        (lambda: pipeline.verify("nowhere", shape="b=3"), "shape", "shapes"),
        (lambda: pipeline.Dim("b", mn=1, max=3), "mn", "min"),  # type: ignore[call-arg]
        (lambda: pipeline.Input("x", shap=(1,)), "shap", "shape"),  # type: ignore[call-arg]
        (lambda: Output("y", tolerence=None), "tolerence", "tolerance"),  # type: ignore[call-arg]
    ],
)
def test_a_misspelt_field_names_the_right_one(make: Any, word: str, close: str) -> None:
    with pytest.raises(InputError, match=rf"no option '{word}' \(did you mean {close}\?\)\. The o"):
        make()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tolerance": "1e-3"}, rf"tolerance='1e-3': is not a Tolerance\. {FORM}"),
        ({"engine_tolerance": 1e-3}, rf"engine_tolerance=0.001: is not a Tolerance\. {FORM}"),
        ({"output_tolerances": {"y": "1e-3"}}, r"output_tolerances\['y'\]='1e-3': is not a Tol"),
        ({"output_tolerances": "y=1e-3"}, "output_tolerances='y=1e-3': expected a dict"),
        ({"shapes": [{"b": 3}]}, r"shapes: {'b': 3} is a dict, and a text .*shapes=\(\"b=3\",\)"),
        ({"shapes": {"b": 3}}, "expected a tuple of texts, not a dict"),
        ({"shapes": "b=3"}, r"shapes='b=3': expected a tuple. Write shapes=\(\"b=3\",\)"),
        ({"profiles": [{"b": (1, 2, 3)}]}, r"profiles: .* is a dict, .*profiles=\(\"b=1:4:8\",\)"),
        ({"skip": 3}, "skip=3: expected a tuple"),
    ],
)
def test_a_value_of_another_kind(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Config("linear", **fields)
    if "shapes" in fields or "engine_tolerance" in fields:
        with pytest.raises(InputError, match=text):
            pipeline.verify("nowhere", **fields)


def test_a_tolerance_of_texts() -> None:
    with pytest.raises(InputError, match=rf"tolerance rtol='1e-3': is not a number\. {FORM}"):
        Tolerance("1e-3", 1e-5, "")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"output y: tolerance='1e-3': is not a Tolerance"):
        Output("y", tolerance="1e-3")  # type: ignore[arg-type]


def test_another_artifact_by_position() -> None:
    with pytest.raises(InputError, match="Write a name, such as against='old'"):
        pipeline.verify("new", "old")  # type: ignore[arg-type]


def test_a_build_alone_names_its_precision() -> None:
    with pytest.raises(InputError, match=r"precision auto: .* name one precision here: fp32, "):
        check_precision("auto")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tolerance("1e-3"), ["atol and why are missing", "Write for example Tolerance("]),
        (lambda: Tolerance(1e-3, 1e-5), ["why is missing", "Tolerance(rtol=1e-3, atol=1e-5, why="]),
        (lambda: Tolerance(1e-3, 1, "a", 0.0, None, (), 7), ["7 values for the 6 fields rtol, "]),
        (lambda: Tolerance(1e-3, rtol=1e-3), ["rtol is given twice"]),
        (Config, ["model is missing", 'Config("file.py:factory"']),
        (lambda: pipeline.ModelSpec("x"), ["build and inputs are missing"]),
        (Output, ["name is missing", 'Output("y")']),
        (pipeline.Profile, ["name is missing", "Profile("]),
        (lambda: pipeline.Dim(3), ["dim name 3: is not a text", "Dim("]),
        (lambda: pipeline.Padding(8), ["8 is not a dict of multiples", "Padding({"]),
        (lambda: Config("linear", seed="x"), ["seed='x': is of the type str", "seed=0"]),
        (lambda: Config("linear", seed=True), ["seed=True: is of the type bool"]),
        (lambda: Config("linear", memory_limit="3"), ["memory_limit='3'", "8 * 2**30"]),
        (lambda: Config("linear", out=3), ["out=3: is of the type int", 'out="artifacts/net"']),
    ],
)
def test_a_wrong_call_says_what_to_call(make: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
