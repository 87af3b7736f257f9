"""Names and inputs of files: names that are made unique, and inputs that are removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from pipeline.errors import InputError
from pipeline.machine.target import TARGETS
from pipeline.rewrite.rewrite import Rewritten, rewrite

OLD, RTX = TARGETS["tensorrt-8.6"], TARGETS["rtx-1.7"]


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')


def both(model: onnx.ModelProto, folder: Path, feeds: dict[str, np.ndarray]) -> Rewritten:
    """Rewrites for 8.6, and compares ONNX Runtime's outputs with those of the source."""
    onnx.save(model, folder / "m.onnx")
    result = rewrite(folder / "m.onnx", folder / "o.onnx", OLD)
    assert result.changed
    for a, b in zip(run(folder / "m.onnx", feeds), run(folder / "o.onnx", feeds), strict=True):
        np.testing.assert_allclose(a, b, 1e-6)
    return result


def run(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)


X = np.arange(24, dtype=np.float32).reshape(1, 1, 4, 6)


def test_a_new_constant_does_not_take_an_initializers_name(tmp_path: Path) -> None:
    """scale_resize names its constant up/scales, and the model already has this name."""
    model = parse(
        "(float[1,1,h,w] x) => (float[1,1,p,q] y, float[1,1,r,s] z) <int64[1] k = {2}> "
        "{ nc = Shape<end=2>(x) hw = Shape<start=2>(x) b = Mul(hw, k) n = Concat<axis=0>(nc, b) "
        "y = Resize(x, , , n) z = Resize(x, , scales) }"
    )
    scales = np.array([1, 1, 3, 3], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(scales, "up/scales"))
    model.graph.node[4].name = "up"
    model.graph.node[5].input[2] = "up/scales"
    result = both(model, tmp_path, {"x": X})
    assert [c.node for p in result.passes if p.name == "scale_resize" for c in p.rewritten] == [
        "up"
    ]


def test_an_initializer_of_a_body_that_hides_an_outer_one_stays(tmp_path: Path) -> None:
    model = parse(
        "(float[n,3] x, bool c) => (float[n,3] y) <float[1] q = {100}> { o = Add(x, q) y = If(c) "
        "<then_branch = t () => (float[n,3] a) <float[1] q = {3}> { s = Shape<start=1>(x) "
        "f = Cast<to=1>(s) g = Add(f, q) a = Add(o, g) }, "
        "else_branch = e () => (float[n,3] b) <float[1] q = {5}> { b = Mul(o, q) }> }"
    )
    x = np.ones((2, 3), np.float32)
    for c in (True, False):
        both(model, tmp_path, {"x": x, "c": np.array(c)})


def test_inputs_with_a_default_are_constants_and_said_to_be(tmp_path: Path) -> None:
    text = "(float[n] x, float[1] w) => (float[n] y, int64[1] s) <float[1] v = {2}> "
    model = parse(text + "{ y = Mul(x, w) s = Shape<start=0>(x) }")
    model.graph.initializer[0].name = "w"
    onnx.save(model, tmp_path / "m.onnx")
    result = rewrite(tmp_path / "m.onnx", tmp_path / "o.onnx", OLD)
    assert result.warnings[0].startswith("w: the file has a default for each of these inputs")
    assert [v.name for v in onnx.load(tmp_path / "o.onnx").graph.input] == ["x"]
    (y, _) = run(tmp_path / "o.onnx", {"x": X[0, 0, 0]})
    np.testing.assert_array_equal(y, 2 * X[0, 0, 0])
    model.ir_version = (
        3  # in such files every initializer is also an input, but a constant is meant
    )
    onnx.save(model, tmp_path / "m.onnx")
    result = rewrite(tmp_path / "m.onnx", tmp_path / "o.onnx", OLD)
    assert not result.warnings
    assert onnx.load(tmp_path / "o.onnx").ir_version == 4


def test_sparse_initializers_are_named(tmp_path: Path) -> None:
    model = parse("(float[3] x) => (float[3] y) { y = Add(x, sp) }")
    values = onnx.helper.make_tensor("sp", onnx.TensorProto.FLOAT, [1], [7.0])
    places = onnx.helper.make_tensor("at", onnx.TensorProto.INT64, [1], [1])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [3]))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="sp is a sparse initializer"):
        rewrite(tmp_path / "m.onnx", tmp_path / "o.onnx", RTX)
