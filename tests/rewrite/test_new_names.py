"""New names from passes in models that already have these names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from pipeline.machine.target import TARGETS
from pipeline.passes import repeat_casts, select_additive_mask
from pipeline.rewrite.rewrite import rewrite

OLD = TARGETS["tensorrt-8.6"]
SIZES = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) <int64 i = {0}>
{ s = Shape(x) v = Gather(s, i) f = Cast<to=1>(v) a = Add(x, f) TAKEN b = Mul(a, f) y = MORE }"""
MASKS = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, bool[n,4] on) => (float[n,4] y)
<float zero = {0}, float low = {-10000}>
{ m = Where(on, zero, low) s = Add(x, m) TAKEN p = Softmax(s) y = MORE }"""
TAKEN = {"output": ("NAME = Neg(x)", "Sub(LAST, NAME)"), "node": ("k = Neg(x)", "Sub(LAST, k)")}


def written(text: str, name: str, last: str, kind: str) -> onnx.ModelProto:
    taken, more = TAKEN[kind]
    text = text.replace("TAKEN", taken).replace("MORE", more).replace("LAST", last)
    model = onnx.parser.parse_model(text.replace("NAME", "taken"))
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
        if kind == "node" and node.output[0] == "k":
            node.name = name
        for names in (node.input, node.output):
            names[:] = [name if each == "taken" else each for each in names]
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize(
    ("text", "names", "last", "p"),
    [
        (SIZES, {"output": "f/2", "node": "n2/2"}, "b", repeat_casts.PASS),
        (MASKS, {"output": "n1/added", "node": "n1/added"}, "p", select_additive_mask.PASS),
    ],
    ids=["repeat_casts", "select_additive_mask"],
)
def test_names_that_are_taken(
    text: str, names: dict[str, str], last: str, p: object, kind: str, tmp_path: Path
) -> None:
    model = written(text, names[kind], last, kind)
    onnx.save(model, tmp_path / "a.onnx")
    report = rewrite(tmp_path / "a.onnx", tmp_path / "b.onnx", OLD, [p])  # type: ignore[list-item]
    assert report.passes[0].rewritten
    after = onnx.load(tmp_path / "b.onnx")
    made = [name for node in after.graph.node for name in node.output]
    assert len(set(made)) == len(made)
    assert len({node.name for node in after.graph.node}) == len(after.graph.node)
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {"x": rng.normal(size=(3, 4) if text is MASKS else 5)}
    feeds = {"x": feeds["x"].astype(np.float32)}
    if text is MASKS:
        feeds["on"] = rng.integers(0, 2, (3, 4)) > 0
    outputs = [
        ort.InferenceSession(str(tmp_path / name)).run(None, feeds)[0]
        for name in ("a.onnx", "b.onnx")
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-6, atol=1e-6)
