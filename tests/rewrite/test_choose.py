"""A user-supplied pass, and the choice of passes: the accepted, the refused, and the messages."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from pipeline.errors import InputError, RewriteError
from pipeline.machine.target import TARGETS
from pipeline.rewrite.choose import all_passes, load_pass, to_skip
from pipeline.rewrite.rewrite import rewrite

RTX = TARGETS["rtx-1.7"]
MODEL = (
    '<ir_version: 8, opset_import: ["" : 18]> g (float[n,3] x) => (float[n,3] y) '
    "<float one = {1.0}> { a = Relu(x) b = Mul(a, one) y = Exp(b) }"
)
HEAD = """
import numpy as np
import onnx_graphsurgeon as gs
from pipeline.passes import Change, PassResult

def change(node, what="changed"):
    return PassResult((Change(node.name, node.op, what),))

def of(graph, op):
    return [n for n in graph.nodes if n.op == op]
"""
GOOD = """
def run(graph):
    "Drops a multiplication by one."
    done = []
    for node in of(graph, "Mul"):
        if isinstance(node.inputs[1], gs.Constant) and (node.inputs[1].values == 1).all():
            source, (reader,) = node.inputs[0], node.outputs[0].outputs
            reader.inputs = [source]
            node.outputs.clear()
            graph.nodes.remove(node)
            done.append(Change(node.name, "Mul", "dropped: by one"))
    return PassResult(tuple(done))
"""
TWICE = """
def run(graph):
    node = of(graph, "Exp")[0]
    new = gs.Variable(node.name + "/again%d" % len(graph.nodes), np.float32, ["n", 3])
    place = graph.nodes.index(node)
    graph.nodes.insert(place, gs.Node("Abs", new.name, {}, [node.inputs[0]], [new]))
    node.inputs = [new]
    return change(node)
"""
STATIC = """
def run(graph):
    node = of(graph, "Mul")
    if not node:
        return PassResult(())
    node = node[0]
    shape = gs.Constant("two_three", np.array([2, 3]))
    node.op, node.inputs = "Reshape", [node.inputs[0], shape]
    return change(node)
"""
LIES = """
def run(graph):
    of(graph, "Relu")[0].op = "Abs"
    return PassResult(())
"""
RENAMES = """
def run(graph):
    graph.outputs[0].name = "z"
    return change(graph.nodes[0])
"""
INVALID = """
def run(graph):
    node = of(graph, "Relu")[0]
    node.op = "NoSuchOp"
    return change(node)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    model = onnx.parser.parse_model(MODEL)
    for node in model.graph.node:
        node.name = f"the_{node.op_type.lower()}"
    onnx.save(model, path)
    return path


def own(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(HEAD + text)
    return path


def test_an_own_pass_joins(source: Path, tmp_path: Path) -> None:
    passes = all_passes([own(tmp_path, GOOD)])
    assert passes[1].name == "mine"
    result = rewrite(source, tmp_path / "out.onnx", RTX, passes)
    record = next(r for r in result.passes if r.name == "mine")
    assert [c.node for c in record.rewritten] == ["the_mul"]
    assert "mine.py, sha256" in record.evidence[0]
    assert [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node] == ["Relu", "Exp"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWICE, ["law 3", "not idempotent", "'the_exp'"]),
        (STATIC, ["law 3", "axis 0 of b was dynamic and is now 2", "'the_mul'"]),
        (LIES, ["reports modified=False, but the graph changed", "'the_relu'"]),
        (RENAMES, ["law 3", "outputs"]),
        (INVALID, ["invalid graph", "NoSuchOp"]),
        ("def run(graph):\n    return None\n", ["not a PassResult"]),
        ("def run(graph):\n    return graph.nodes[99]\n", ["IndexError"]),
    ],
)
def test_a_pass_that_breaks_the_contract_is_told_which_law(
    source: Path, tmp_path: Path, text: str, words: list[str]
) -> None:
    passes = all_passes([own(tmp_path, text)])
    with pytest.raises(RewriteError) as caught:
        rewrite(source, tmp_path / "out.onnx", RTX, passes)
    assert "pass mine" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("def run(graph:\n", "line 11: SyntaxError"),
        ("1 / 0\n", "line 11: ZeroDivisionError"),
        ("x = 1\n", "Define run"),
    ],
)
def test_files_that_are_no_pass(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "none.py" if text is None else own(tmp_path, text)
    with pytest.raises(InputError, match=words):
        load_pass(path)


def test_names_must_differ(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another pass has that name"):
        all_passes([own(tmp_path, GOOD, "slice_shape.py")])


def test_unknown_names_list_the_nearest() -> None:
    passes = all_passes()
    with pytest.raises(InputError, match=r"'slice_shapes'; the nearest: slice_shape"):
        to_skip(passes, (), ("slice_shapes",))
    names = {p.name for p in passes}
    assert to_skip(passes, ("slice_shape",), ()) == names - {"slice_shape"}
    assert to_skip(passes, (), ("slice_shape",)) == {"slice_shape"}
    assert to_skip(passes, (), ()) == frozenset()


def test_a_skipped_pass_is_said_to_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "s.onnx"
    text = "g (float[n,3] x) => (int64[1] s) { s = Shape<end=1>(x) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), path)
    old = TARGETS["tensorrt-8.6"]
    result = rewrite(path, tmp_path / "o.onnx", old, skip={"slice_shape"}, diff=True)
    record = next(r for r in result.passes if r.name == "slice_shape")
    assert record.skipped
    assert not result.changed
    result = rewrite(path, tmp_path / "o.onnx", old, diff=True)
    record = next(r for r in result.passes if r.name == "slice_shape")
    assert record.diff[0].startswith("- ") and "Shape" in record.diff[0]
    assert sum(line.startswith("+ ") for line in record.diff) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<ir_version: 8, opset_import: ["" : 9]> g (float[n] x) => (float[n] y) { y = Relu(x) }',
         "opset 9 is not supported.*version_converter"),
        ('<ir_version: 8, opset_import: ["" : 99]> g (float[n] x) => (float[n] y) { y = Relu(x) }',
         "opset 99 is not supported.*install a newer onnx than"),
        ('<ir_version: 8, opset_import: ["" : 18]> g (float[n] x) => (float[n] y) '
         "{ [the_bad_one] y = Relu<slope=2>(x) }",
         "onnx.checker refuses it.*the_bad_one"),
    ],
)  # fmt: skip
def test_bad_models(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(InputError, match=words):
        rewrite(path, tmp_path / "out.onnx", RTX)
