"""The rounding that tf32 and half precision cannot avoid: their tolerance is measured from it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from pipeline.graph.session import run_reference
from pipeline.rewrite.rounding import Rounding, rounded_array
from pipeline.rewrite.rounding_noise import round_products

DIGITS = {"fp16": 11, "bf16": 8}
NET = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,64] x) => (float[n,64] y)
    { a = MatMul(x, k) b = Relu(a) c = MatMul(b, k) d = Exp(c) y = Div(c, d) }"""


def net(text: str = NET, scale: float = 0.1) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).standard_normal((64, 64)) * scale
    model.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), "k"))
    return model


def outputs(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    (found,) = run_reference(model.SerializeToString(), [{"x": x.astype(np.float32)}])
    return found["y"]


@pytest.mark.parametrize("precision", DIGITS)
def test_operands_and_results_of_products_are_rounded(precision: str) -> None:
    model, x = net(), np.random.default_rng(1).standard_normal((8, 64))
    assert round_products(model, precision) == 2
    onnx.checker.check_model(model, full_check=True)
    assert len({node.name for node in model.graph.node if node.name}) == len(model.graph.node) - 5
    digits = DIGITS[precision]
    k = rounded_array(numpy_helper.to_array(model.graph.initializer[0]), digits).astype(float)
    a = rounded_array(rounded_array(x.astype(np.float32), digits) @ k, digits)
    c = rounded_array(rounded_array(np.maximum(a, 0), digits) @ k, digits)
    # nothing else is rounded
    np.testing.assert_allclose(outputs(model, x), c / np.exp(c), rtol=3 * 2.0**-digits, atol=1e-6)
    plain = outputs(net(), x)
    far = np.abs(outputs(model, x) - plain).max() / np.abs(plain).max()
    assert 2.0 ** -(digits + 3) < far < 2.0 ** -(digits - 3)


def test_in_tf32_only_the_operands_are_rounded() -> None:
    model, x = net(), np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    assert round_products(model, "tf32") == 2
    onnx.checker.check_model(model, full_check=True)
    k = rounded_array(numpy_helper.to_array(net().graph.initializer[0]), 11).astype(np.float64)
    a = (cut_off(x) @ k).astype(np.float32)
    c = cut_off(np.maximum(a, 0)) @ k
    np.testing.assert_allclose(outputs(model, x), c / np.exp(c), rtol=1e-5, atol=1e-7)


def cut_off(array: np.ndarray) -> np.ndarray:
    """The array without the 13 bits that are not read in tf32."""
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("opset", [11, 17])
def test_digits_are_cut_off_exactly(opset: int) -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    values[:2000] *= np.float32(2.0) ** np.arange(-90, 60)[np.arange(2000) % 150]
    near = np.array([1.0, 2.0, 1 - 2.0**-24, 1 + 2.0**-23, 2 - 2.0**-23, 0.0, 1 + 2.0**-10])
    x = np.concatenate([values, near, -near]).astype(np.float32)
    model = onnx.parser.parse_model(
        f"""<ir_version: 7, opset_import: ["" : {opset}]>
        g (float[n] x) => (float[n] y) {{ y = Abs(x) }}"""
    )
    nodes = Rounding(model.graph, {"x", "y"}, 11).cut("x", "y")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(outputs(model, x), cut_off(x))


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ('y = Einsum<equation = "ij,jk->ik">(x, k)', 1),
        ("y = Gemm(x, k, b)", 1),
        ("i = CastLike(x, one) j = CastLike(k, one) p = MatMul(i, j) y = CastLike(p, x)", 0),
        ("y = Add(x, b)", 0),
    ],
)
def test_in_tf32_each_product_of_float32_rounds(body: str, count: int) -> None:
    head = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,64] x) => (float[n,64] y)"""
    constants = "one = Constant<value = double {1}>() b = Constant<value = float {0.3}>()"
    model = net(f"{head} {{ {constants} {body} }}")
    plain = onnx.ModelProto.FromString(model.SerializeToString())
    x = np.random.default_rng(1).standard_normal((8, 64))
    assert round_products(model, "tf32") == count
    far = np.abs(outputs(model, x) - outputs(plain, x)).max()
    assert (far > 1e-5) == bool(count)


def test_in_tf32_the_weights_of_an_lstm_round() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n,2,64] x) => (float[n,1,2,16] y)
        { w = Constant<value = float[1,64,64] {0}>() y = LSTM<hidden_size = 16>(x, w, k) }"""
    model = onnx.parser.parse_model(text.replace(" {0}", f" {{{', '.join(['0.1'] * 4096)}}}"))
    weights = np.random.default_rng(0).standard_normal((1, 64, 16)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "k"))
    assert round_products(model, "tf32") == 1
    (node,) = [node for node in model.graph.node if node.op_type == "LSTM"]
    assert all("rounding" in name for name in node.input)


def test_an_overflow_is_no_noise() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,64] x) => (float[n,64] y)
        { a = MatMul(x, k) y = Relu(a) }"""
    model, x = net(text, 1e4), np.full((2, 64), 100.0)
    assert round_products(model, "fp16") == 1
    plain = outputs(net(text, 1e4), x)
    assert plain.max() > 65504
    np.testing.assert_allclose(outputs(model, x), plain, rtol=1e-2, atol=1e-3 * plain.max())


def test_a_model_without_products_stays_as_it_is() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,64] x) => (float[n,64] y)
        { y = Exp(x) }"""
    model = onnx.parser.parse_model(text)
    assert round_products(model, "fp16") == 0
    assert [node.op_type for node in model.graph.node] == ["Exp"]


@pytest.mark.parametrize("name", ["factor", "large"])
def test_a_tensor_may_have_the_name_of_a_constant_that_rounds(name: str) -> None:
    text = NET.replace("b =", f"{name} =").replace("(b,", f"({name},")
    model, x = net(text), np.random.default_rng(1).standard_normal((8, 64))
    assert round_products(model, "fp16") == 2
    onnx.checker.check_model(model, full_check=True)
    other = net()
    round_products(other, "fp16")
    np.testing.assert_array_equal(outputs(model, x), outputs(other, x))
