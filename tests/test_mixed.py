"""Which layers compute in half precision, on networks as TensorRT parses them."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from pipeline._mixed import Types, layers_of, plan
from pipeline.target import TARGETS, use

HALF, FLOAT, TO_HALF = Types(True, True), Types(False, False), Types(False, True)
TO_FLOAT = Types(True, False)
WEIGHTS = "<float[4,4,1,1] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float[1] two = {2}>"


def types(body: str, inputs: str = "float[n,4,8,8] x") -> dict[str, Types | None]:
    """What the layer that makes each tensor is told, by the tensor's name."""
    trt = use(TARGETS["rtx-1.7"])
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[a,b,c,d] y) '
    model = onnx.parser.parse_model(text + WEIGHTS + " { " + body + " }")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), parser.get_error(0)
    layers = layers_of(trt, network)
    ends: list[Any] = [network.get_input(n) for n in range(network.num_inputs)]
    ends += [network.get_output(n) for n in range(network.num_outputs)]
    made = plan(layers, frozenset(tensor.name for tensor in ends))
    return {name: own for layer, own in zip(layers, made, strict=True) for name in layer.outputs}


def test_convolutions_and_what_follows_them_are_half() -> None:
    found = types("a = Conv(x, w) b = Relu(a) c = Mul(b, two) d = Sigmoid(c) y = Conv(d, w)")
    assert [found[name] for name in "abcd"] == [HALF] * 4
    assert found["y"] == TO_FLOAT  # the network's output stays float32


@pytest.mark.parametrize("op", ["Exp", "Softplus", "Sqrt", "Reciprocal", "Erf"])
def test_what_overflows_stays_float32(op: str) -> None:
    found = types(f"a = Conv(x, w) b = {op}(a) c = Exp(b) y = Exp(c)")
    assert found["a"] == HALF
    assert found["b"] == found["c"] == FLOAT


def test_a_square_stays_float32_but_a_gate_does_not() -> None:
    found = types("a = Conv(x, w) b = Relu(a) s = Mul(b, b) g = Mul(a, b) t = Exp(s) y = Exp(g)")
    assert found["s"] == FLOAT
    assert found["g"] == HALF


def test_variance_stays_float32_and_is_handed_on_as_half() -> None:
    body = """a = Conv(x, w) m = ReduceMean<axes=[2,3]>(a) d = Sub(a, m) s = Mul(d, d)
        v = ReduceMean<axes=[2,3]>(s) r = Sqrt(v) q = Div(d, r) u = Relu(q) y = Conv(u, w)"""
    found = types(body)
    assert [found[name] for name in "mdsvrq"] == [FLOAT] * 6
    assert found["u"] == TO_HALF


def test_a_sampling_grid_stays_float32_back_to_the_convolution() -> None:
    body = """g = Conv(x, w) h = Mul(g, two) p = Transpose<perm=[0,2,3,1]>(h)
        starts = Constant<value_ints=[0]>() ends = Constant<value_ints=[2]>()
        axes = Constant<value_ints=[3]>() t = Slice(p, starts, ends, axes)
        v = Conv(x, w) k = Relu(v) s = GridSample(k, t) y = Conv(s, w)"""
    found = types(body)
    assert found["g"] == found["v"] == TO_FLOAT
    assert [found[name] for name in "hptks"] == [FLOAT] * 5


def test_a_residual_that_a_convolution_reads_is_stored_as_half() -> None:
    found = types("e = Exp(x) r = Relu(e) a = Conv(r, w) s = Add(a, r) y = Exp(s)")
    assert found["r"] == TO_HALF
    assert found["s"] == HALF


def test_a_residual_that_a_mean_reads_too_stays_float32() -> None:
    body = "e = Exp(x) r = Relu(e) a = Conv(r, w) s = Add(a, r) m = ReduceMean<axes=[1]>(r) "
    found = types(body + "y = Add(s, m)")
    assert found["r"] == FLOAT
    assert found["s"] == FLOAT


def test_a_product_that_is_sampled_computes_in_float32() -> None:
    body = """v = MatMul(x, x) g = Conv(x, w) p = Transpose<perm=[0,2,3,1]>(g)
        starts = Constant<value_ints=[0]>() ends = Constant<value_ints=[2]>()
        axes = Constant<value_ints=[3]>() t = Slice(p, starts, ends, axes)
        s = GridSample(v, t) m = MatMul(s, s) y = Exp(m)"""
    found = types(body)
    assert found["v"] == FLOAT
    assert found["m"] == HALF


@pytest.mark.parametrize(("mask", "told"), [("-3.4e38", FLOAT), ("-1e4", HALF)])
def test_what_meets_a_mask_beyond_half_precision(mask: str, told: Types) -> None:
    body = f"""a = Conv(x, w) m = Constant<value_floats=[0.0, {mask}]>()
        s = Constant<value_ints=[1, 1, 1, 2]>() k = Reshape(m, s) b = Add(a, k) y = Exp(b)"""
    assert types(body, "float[n,4,8,2] x")["b"] == told


def test_a_constant_is_float32_where_only_float32_layers_read_it() -> None:
    body = """a = Conv(x, w)
        g = Constant<value_floats=[1.5, 2.5]>() k = Constant<value_floats=[0.5]>()
        s = Constant<value_ints=[1, 1, 1, 2]>() h = Reshape(g, s)
        b = Mul(a, k) e = Exp(a) f = Add(e, h) q = Div(f, k) y = Exp(q)"""
    found = types(body, "float[n,4,8,2] x")
    assert found["b"] == HALF and found["f"] == found["q"] == FLOAT
    assert found["g_output"] == found["h"] == FLOAT
    assert found["k_output"] is None  # b reads it too, and may compute in half
