"""ONNX files and artifacts of anybody: one line, exit code 2, and an end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Run, refused_late, rehash
from onnx import TensorProto, helper, numpy_helper

from pipeline.errors import InputError
from pipeline.graph.session import open_session
from pipeline.machine.files import hash_file
from pipeline.spec.file_names import EXPORTED, MANIFEST, MODEL

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]


def model(
    nodes: list[onnx.NodeProto],
    functions: list[onnx.FunctionProto] | None = None,
    constants: list[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, ["n"])], [value("y_name", TensorProto.FLOAT, ["n"])]
    graph = helper.make_graph(nodes, "g", *ends, constants or [])
    return helper.make_model(graph, functions=functions or [], opset_imports=OPSETS, ir_version=9)


def negated() -> onnx.ModelProto:
    constant = numpy_helper.from_array(np.zeros(2, np.float32), "w")
    return model([helper.make_node("Neg", ["x"], ["y_name"])], constants=[constant])


def no_text() -> bytes:
    return negated().SerializeToString().replace(b"y_name", b"y_\xff\xfeee")


def unknown_weight() -> bytes:
    made = negated()
    made.graph.initializer[0].data_type = 99
    return made.SerializeToString()


def unknown_input() -> bytes:
    made = negated()
    made.graph.input[0].type.tensor_type.elem_type = 99
    return made.SerializeToString()


def function(name: str, *called: str) -> onnx.FunctionProto:
    names = ["a", *(f"v{n}" for n in range(len(called) - 1)), "b"]
    nodes = [
        helper.make_node(op, [names[n]], [names[n + 1]], domain="own" if op != "Neg" else "")
        for n, op in enumerate(called)
    ]
    return helper.make_function("own", name, ["a"], ["b"], nodes, OPSETS)


def doubling() -> bytes:
    """A function that calls another one twice, thirty times: a billion nodes."""
    functions = [function("f0", "Neg", "Neg")]
    functions += [function(f"f{n}", f"f{n - 1}", f"f{n - 1}") for n in range(1, 30)]
    node = helper.make_node("f29", ["x"], ["y_name"], domain="own")
    return model([node], functions).SerializeToString()


def endless_function() -> bytes:
    node = helper.make_node("f", ["x"], ["y_name"], domain="own")
    functions = [function("f", "Neg", "g"), function("g", "f")]
    return model([node], functions).SerializeToString()


def endless_loop() -> bytes:
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["on"]),
            helper.make_node("Neg", ["before"], ["after"]),
        ],
        "body",
        [
            value("n", TensorProto.INT64, []),
            value("going", TensorProto.BOOL, []),
            value("before", TensorProto.FLOAT, ["n"]),
        ],
        [value("on", TensorProto.BOOL, []), value("after", TensorProto.FLOAT, ["n"])],
    )
    node = helper.make_node("Loop", ["", "true", "x"], ["y_name"], body=body)
    constant = numpy_helper.from_array(np.bool_(True), "true")
    return model([node], constants=[constant]).SerializeToString()


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "no text": (no_text, "damaged: the field onnx.NodeProto.output is not text"),
    "an unknown weight": (unknown_weight, "the element type 99 of 'w' is unknown to onnx"),
    "an unknown input": (unknown_input, "the element type 99 is unknown to onnx"),
    "doubling functions": (doubling, "its functions become 1073741824 nodes"),
    "a function in itself": (endless_function, "the function f calls itself"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_onnx_files(cli: Run, tmp_path: Path, case: str) -> None:
    make, words = BAD[case]
    (tmp_path / "a.onnx").write_bytes(make())
    start = time.monotonic()
    for command in ("lint", "rewrite", "check", "convert"):
        refused_late(cli(command, "a.onnx"), "a.onnx: ", words)
    assert time.monotonic() - start < 20
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_functions_that_are_used_often_are_not_refused(cli: Run, tmp_path: Path) -> None:
    functions = [function("f0", "Neg", "Neg"), function("f1", "f0", "f0", "f0")]
    node = helper.make_node("f1", ["x"], ["y_name"], domain="own")
    onnx.save(model([node], functions), tmp_path / "a.onnx")
    code, _, errors = cli("lint", "a.onnx")
    assert code == 0, errors


def test_a_loop_that_never_ends() -> None:
    session = open_session(endless_loop(), time_limit=0.5)
    feed = {"x": np.zeros(2, np.float32)}
    start = time.monotonic()
    for _ in range(10):  # the first run ends, and no other one begins
        with pytest.raises(InputError, match=r"a run took longer than 0\.5 s"):
            session.run(None, feed)
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_loop_that_never_ends_is_refused(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(open_session.__kwdefaults__, "time_limit", 3.0)  # in place of 30
    (tmp_path / "a.onnx").write_bytes(endless_loop())
    start = time.monotonic()
    code, output, errors = cli("export", "a.onnx", "--dim", "n=:8")
    assert (code, output) == (2, ""), errors
    assert "a run took longer than 3 s" in errors
    assert time.monotonic() - start < 30


def replaced(artifact: Path, name: str, content: bytes) -> None:
    """Puts another file into an artifact, with a manifest that fits."""
    (artifact / name).write_bytes(content)
    info = dataclasses.asdict(hash_file(artifact / name))
    rehash(artifact / MANIFEST, lambda content: content["files"].update({name: info}))


def outside_data() -> bytes:
    made = negated()
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../secret"
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (outside_data, "external data '../secret' is outside of the model's folder"),
        (lambda: b"nonsense", "damaged, or not an ONNX file"),
        (lambda: b"", "the file is empty"),
        (no_text, "is not text"),
        (doubling, "its functions become 1073741824 nodes"),
    ],
    ids=["outside data", "no ONNX", "empty", "no text", "doubling"],
)
def test_models_of_an_artifact(
    cli: Run, artifact: Path, make: Callable[[], bytes], words: str
) -> None:
    (artifact.parent / "secret").write_bytes(bytes(8))
    for name, commands in (
        (MODEL, ("verify", "build", "locate")),
        (EXPORTED, ("verify", "rewrite")),
    ):
        whole = (artifact / name).read_bytes()
        replaced(artifact, name, make())
        for command in commands:
            refused_late(cli(command, artifact), f"{artifact}/{name}: ", words)
        replaced(artifact, name, whole)


def test_a_model_of_other_inputs_in_an_artifact(cli: Run, artifact: Path) -> None:
    for name in (MODEL, EXPORTED):
        whole = (artifact / name).read_bytes()
        replaced(artifact, name, negated().SerializeToString())
        for command in ("verify", "locate", "rewrite", "build"):
            refused_late(
                cli(command, artifact), f"{name}: its inputs are not those of the manifest"
            )
        replaced(artifact, name, whole)
