"""Graphs in half precision: they are valid, and their outputs are close to the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.build import layer_types as _mixed
from pipeline.graph.session import run_onnx, run_reference
from pipeline.machine.target import TARGETS, use
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES
from pipeline.rewrite.half import in_half, rounded, write_in_half

NET = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,4,8,8] x, bool up) => (float[n,4,h,v] y)
    <float[4,4,1,1] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float[1] tenth = {0.1}> {
    a = Conv(x, w) b = Mul(a, tenth) s = Shape(b)
    c = If (up) <then_branch = t () => (float[n,4,8,8] yes) { yes = Relu(b) },
                 else_branch = e () => (float[n,4,8,8] no) { no = Neg(a) }>
    d = Conv(c, w) e = Reshape(d, s) f = Sigmoid(e) y = Add(e, f) }"""


def net() -> onnx.ModelProto:
    return onnx.parser.parse_model(NET)


def near(model: onnx.ModelProto, half: onnx.ModelProto, feed: dict[str, np.ndarray]) -> float:
    """The largest difference of an output, divided by its largest value."""
    (want,), (got,) = (run_reference(m.SerializeToString(), [feed]) for m in (model, half))
    worst = 0.0
    for name, array in want.items():
        assert array.shape == got[name].shape and array.dtype == got[name].dtype
        if array.dtype.kind != "f":
            assert np.array_equal(array, got[name])
            continue
        assert np.array_equal(np.isfinite(array), np.isfinite(got[name]))
        there = np.isfinite(array)
        if there.any():
            far = np.abs(array[there].astype(float) - got[name][there]).max()
            worst = max(worst, far / max(np.abs(array[there]).max(), 1e-30))
    return worst


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("up", [True, False])
def test_bodies_and_outputs_read_float32(up: bool, precision: str) -> None:
    half = net()
    assert in_half(half, precision) == 5  # all except s, c, b and the bodies' values
    # opset 17's Conv has no bfloat16, but TensorRT's has
    onnx.checker.check_model(half, full_check=precision == "fp16")
    feed = {"x": np.random.default_rng(0).random((2, 4, 8, 8), np.float32), "up": np.array(up)}
    assert near(net(), rounded(half), feed) < (2e-3 if precision == "fp16" else 1.6e-2)


def test_a_second_time_changes_nothing() -> None:
    half = net()
    in_half(half)
    nodes = list(half.graph.node)
    assert in_half(half) == 0
    assert list(half.graph.node) == nodes


def test_names_that_are_taken() -> None:
    model = net()
    for node in model.graph.node:
        for number, name in enumerate(node.input):
            node.input[number] = "a/half" if name == "b" else name
        for number, name in enumerate(node.output):
            node.output[number] = "a/half" if name == "b" else name
        for attribute in node.attribute:
            for inner in attribute.g.node:
                inner.input[:] = ["a/half" if name == "b" else name for name in inner.input]
    half = onnx.ModelProto()
    half.CopyFrom(model)
    in_half(half)
    feed = {"x": np.random.default_rng(0).random((2, 4, 8, 8), np.float32), "up": np.array(True)}
    assert near(model, half, feed) < 2e-3


def test_weights_outside_stay_outside(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random((64, 64), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    (tmp_path / "h").mkdir()
    assert write_in_half(tmp_path / "m.onnx", tmp_path / "h" / "half.onnx") == 1
    assert (tmp_path / "h" / "half.onnx.data").stat().st_size == weights.nbytes // 2
    feed = {"x": np.ones((3, 64), np.float32)}
    (want,), (got,) = (
        list(run_onnx(path, [feed])) for path in (tmp_path / "m.onnx", tmp_path / "h" / "half.onnx")
    )
    np.testing.assert_allclose(got["y"], want["y"], rtol=2e-3)


def test_onnx_runtime_rounds_between_nodes() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (float[n,1] y)
        <float[3,1] k = {6e4, 6e4, 6e4}, float[1] tenth = {0.1}>
        { a = MatMul(x, k) b = Relu(a) y = Mul(b, tenth) }"""
    half = onnx.parser.parse_model(text)
    in_half(half)
    feed = {"x": np.ones((2, 3), np.float32)}
    (plain,) = run_reference(half.SerializeToString(), [feed])
    (told,) = run_reference(rounded(half).SerializeToString(), [feed])
    assert np.isfinite(plain["y"]).all()  # so half.onnx itself is not compared
    assert np.isinf(told["y"]).all()


@pytest.mark.parametrize(
    "body",
    [
        "a = MatMul(x, k) b = Add(a, a) y = MatMul(b, k)",
        "a = MatMul(x, k) e = Sub(a, a) f = Add(e, a) y = MatMul(f, k)",
        "a = MatMul(x, k) h = Cast<to=10>(a) l = Loop(two, , h)<body = b (int64 i, bool c, "
        "float16[n,4] s) => (bool c2, float16[n,4] o) { c2 = Identity(c) o = Relu(s) }> "
        "y = Cast<to=1>(l)",
        "a = MatMul(x, k) b = Relu(a) y = MatMul(b, small)",
    ],
)
def test_what_onnx_runtime_is_given_is_valid(body: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y)
        <float[4,4] k = {{1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}}, int64 two = {{2}},
        float[4,4] small = {{1e-9,0,0,0,0,1e-9,0,0,0,0,1e-9,0,0,0,0,1e-9}}> {{ {body} }}"""
    model, half = onnx.parser.parse_model(text), onnx.parser.parse_model(text)
    assert in_half(half)
    onnx.checker.check_model(half, full_check=True)
    onnx.checker.check_model(rounded(half), full_check=True)
    assert near(model, rounded(half), {"x": np.full((2, 4), 3.3, np.float32)}) < 2e-3


def test_bfloat16_has_eight_digits_and_the_range_of_float32() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float[n,2] y)
        <float[2,2] k = {1e6, 0, 0, 1e-9}> { a = MatMul(x, k) y = Relu(a) }"""
    half = onnx.parser.parse_model(text)
    assert in_half(half, "bf16") == 2
    (k,) = half.graph.initializer
    assert k.data_type == TensorProto.BFLOAT16
    feed = {"x": np.array([[1.001, 1.004], [3e20, 3e20]], np.float32)}
    (got,) = run_reference(rounded(half).SerializeToString(), [feed])
    # the nearest of 8 digits: 1.001 becomes 1, and 1.004 becomes 1 + 2**-7
    wanted = np.array([[1e6, 1.0078125e-9], [3e26, 3e11]])
    np.testing.assert_allclose(got["y"], wanted, rtol=2.0**-7)
    assert not (got["y"].view(np.uint32) & 0xFFFF).any()


def test_values_are_rounded_to_bfloat16_as_onnx_runtime_does() -> None:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((64, 64)) * 10.0 ** rng.integers(-30, 30, (64, 64))).astype("f4")
    weights[0, :4] = [np.inf, -np.inf, 0.0, 2.0**-133]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    in_half(model, "bf16")
    (kept,) = model.graph.initializer
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[64,64] x) => (float[64,64] y)
        { h = Cast<to = 16>(x) y = Cast<to = 1>(h) }"""
    (cast,) = run_reference(onnx.parser.parse_model(text).SerializeToString(), [{"x": weights}])
    mine = np.frombuffer(kept.raw_data, "<u2").astype(np.uint32) << 16
    assert np.array_equal(mine.view(np.float32).reshape(64, 64), cast["y"])


def test_constants_that_are_outputs_or_inputs_stay() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n,4] x, float[4,4] d) => (float[n,4] y, float[4,4] k)
        <float[4,4] k = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1},
         float[4,4] d = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}>
        { a = MatMul(x, k) y = MatMul(a, d) }"""
    half = onnx.parser.parse_model(text)
    assert in_half(half) == 2
    onnx.checker.check_model(half, full_check=True)
    assert {"k", "d"} <= {tensor.name for tensor in half.graph.initializer}
    feed = {"x": np.ones((2, 4), np.float32), "d": np.full((4, 4), 2, np.float32)}
    assert near(onnx.parser.parse_model(text), half, feed) < 2e-3


def half_of(case: Case) -> tuple[onnx.ModelProto, onnx.ModelProto, int]:
    model, half = case.model(), case.model()
    return model, half, in_half(half)


@pytest.mark.parametrize("case", [c for c in CASES if half_of(c)[2]], ids=str)
def test_a_case_in_half_is_near(case: Case) -> None:
    model, half, _ = half_of(case)
    onnx.checker.check_model(half)
    onnx.checker.check_model(rounded(half))
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    for feed in feeds:
        assert near(model, rounded(half), feed) < 4e-3


# without the cases that the parser is known to refuse, or that a pass refuses
TRIED = [c for c in CASES if half_of(c)[2] and c.kind != "refusal"]
PARSED = [c for c in TRIED if c.fails.get("rtx-1.7") != "parse"]
# bfloat16 leaves some ops in float32
IN_BFLOAT16 = [c for c in PARSED if in_half(c.model(), "bf16")]


@pytest.mark.parametrize("case", IN_BFLOAT16[::8], ids=str)
def test_the_parser_reads_bfloat16(case: Case) -> None:
    trt = use(TARGETS["rtx-1.7"])
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    network = trt.Builder(logger).create_network(0)
    half = case.model()
    assert in_half(half, "bf16")
    assert trt.OnnxParser(network, logger).parse(half.SerializeToString())
    found = _mixed.types_of(_mixed.layers_of(trt, network, trt.bfloat16), frozenset())
    assert True in found
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    for feed in feeds:
        assert near(case.model(), rounded(half), feed) < 4e-2


@pytest.mark.parametrize("case", PARSED[::4], ids=str)
def test_layers_are_told_what_the_graph_says(case: Case) -> None:
    """In a strongly typed network every layer has its type; `types_of` finds the same."""
    trt = use(TARGETS["rtx-1.7"])
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(half_of(case)[1].SerializeToString())
    inputs = [network.get_input(n) for n in range(network.num_inputs)]
    halves = frozenset(t.name for t in inputs if t.dtype == trt.float16)
    found = _mixed.types_of(_mixed.layers_of(trt, network), halves)
    assert True in found
    for number, own in enumerate(found):
        layer = network.get_layer(number)
        kinds = {layer.get_output(n).dtype for n in range(layer.num_outputs)}
        floats = kinds & {trt.float16, trt.float32}
        assert floats == (set() if own is None else {trt.float16 if own else trt.float32})
