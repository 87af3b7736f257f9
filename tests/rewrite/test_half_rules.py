"""Which nodes compute in half precision."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from pipeline.build.try_graph import attempt
from pipeline.machine.child import Child
from pipeline.machine.target import TARGETS
from pipeline.rewrite.half import in_half

WEIGHTS = "<float[4,4,1,1] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float[1] two = {2}>"


def computed(body: str, inputs: str = "float[n,4,8,8] x") -> dict[str, str]:
    """The type that computes each tensor, and after a comma the type of its Cast."""
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[a,b,c,d] y) '
    model = onnx.parser.parse_model(text + WEIGHTS + " { " + body + " }")
    in_half(model)
    onnx.checker.check_model(model, full_check=True)
    found: dict[str, str] = {}
    for node in model.graph.node:
        for name in node.output:
            plain, half = name.removesuffix("/half"), name.endswith("/half")
            found[plain] = (
                f"{found[plain]},half"
                if plain in found and half
                else (f"{found[plain]},float" if plain in found else "half" if half else "float")
            )
    return found


def test_convolutions_and_what_follows_them_are_half() -> None:
    found = computed("a = Conv(x, w) b = Relu(a) c = Mul(b, two) d = Sigmoid(c) y = Conv(d, w)")
    assert [found[name] for name in "abcd"] == ["half"] * 4
    assert found["y"] == "half,float"  # the graph's output stays float32


@pytest.mark.parametrize(
    "op", ["Exp", "Softplus", "Sqrt", "Reciprocal", "Erf", "GlobalAveragePool"]
)
def test_what_overflows_or_sums_up_stays_float32(op: str) -> None:
    found = computed(f"a = Conv(x, w) b = {op}(a) c = Exp(b) y = Exp(c)")
    assert found["a"] == "half,float"
    assert found["b"] == found["c"] == "float"


def test_a_square_stays_float32_but_a_gate_does_not() -> None:
    found = computed("a = Conv(x, w) b = Relu(a) s = Mul(b, b) g = Mul(a, b) t = Exp(s) y = Exp(g)")
    assert found["s"] == "float"
    assert found["g"] == "half,float"


def test_variance_stays_float32_and_is_handed_on_as_half() -> None:
    body = """a = Conv(x, w) m = ReduceMean<axes=[2,3]>(a) d = Sub(a, m) s = Mul(d, d)
        v = ReduceMean<axes=[2,3]>(s) r = Sqrt(v) q = Div(d, r) u = Relu(q) y = Conv(u, w)"""
    found = computed(body)
    assert [found[name] for name in "mdsvrq"] == ["float"] * 6
    assert found["u"] == "float,half"


def test_a_sampling_grid_stays_float32_back_to_the_convolution() -> None:
    body = """g = Conv(x, w) h = Mul(g, two) p = Transpose<perm=[0,2,3,1]>(h)
        starts = Constant<value_ints=[0]>() ends = Constant<value_ints=[2]>()
        axes = Constant<value_ints=[3]>() t = Slice(p, starts, ends, axes)
        v = Conv(x, w) k = Relu(v) s = GridSample(k, t) y = Conv(s, w)"""
    found = computed(body)
    assert found["g"] == found["v"] == "half,float"
    assert [found[name] for name in "hptk"] == ["float"] * 4
    assert found["s"] == "float,half"


@pytest.mark.parametrize("op", ["Sin", "Cos", "Floor", "Ceil", "Round", "Cast<to=7>"])
def test_an_angle_or_a_position_stays_float32_through_a_product(op: str) -> None:
    turned = f"a = MatMul(x, x) b = Mul(a, two) c = {op}(b)"
    rest = " d = Cast<to=1>(c) y = MatMul(d, x)"
    found = computed(turned + rest)
    assert found["a"] == found["b"] == "float"
    assert found["y"] == "half,float"


def test_what_a_convolution_reads_is_there_in_half_for_who_moves_it() -> None:
    body = "e = Exp(x) r = Relu(e) a = Conv(r, w) p = MaxPool<kernel_shape=[1,1]>(r) y = Add(a, p)"
    found = computed(body)
    assert found["r"] == "float,half"
    assert found["p"] == "half"


def test_a_sum_of_a_float32_value_goes_on_in_float32() -> None:
    body = "e = Exp(x) r = Relu(e) a = Conv(r, w) s = Add(a, r) b = Conv(s, w) y = Add(s, b)"
    found = computed(body)
    assert found["r"] == "float,half"  # for the convolution alone
    assert found["s"] == "float,half"
    assert found["y"] == "float"


@pytest.mark.parametrize(
    ("shape", "value", "told"),
    [
        ("[4,1,1]", "1,2,3,4", "half,float"),  # a bias
        ("[4,1,1]", "1,2,3,400", "float"),
        ("[1]", "400", "half,float"),  # a number
        ("[4]", "1,2,3,4", "float"),  # positions along the last axis
    ],
)
def test_a_tensor_of_constants_makes_it_float32_as_a_parameter_does(
    shape: str, value: str, told: str
) -> None:
    constant = f"k = Constant<value = float{shape} {{{value}}}>()"
    found = computed(f"{constant} a = Conv(x, w) b = Add(a, k) y = Exp(b)", "float[n,4,8,4] x")
    assert found["b"] == told
    found = computed(f"{constant} a = Conv(x, w) b = Mul(a, k) y = Exp(b)", "float[n,4,8,4] x")
    assert found["b"] == ("half,float" if shape == "[1]" else "float")


def test_what_bodies_read_stays_float32() -> None:
    body = """a = Conv(x, w) b = Mul(a, two) c = ReduceMax<keepdims=0>(x) d = Cast<to=9>(c)
        y = If(d)<then_branch=t()=>(float[n,4,8,8] yes){yes=Floor(b)},
                  else_branch=e()=>(float[n,4,8,8] no){no=Neg(a)}>"""
    found = computed(body)
    assert found["a"] == "half,float"
    assert found["b"] == "float"


def test_a_softmax_that_something_else_reads_stays_float32() -> None:
    found = computed("a = MatMul(x, x) s = Softmax(a) l = Sub(two, s) y = Log(l)")
    assert found["s"] == found["l"] == "float"


def test_the_points_of_a_product_that_steers_stay_float32() -> None:
    found = computed("g = Conv(x, w) h = Mul(g, two) m = MatMul(h, x) k = Sin(m) y = Add(k, two)")
    assert found["g"] == "half,float"
    assert found["h"] == found["m"] == "float"


def test_a_scale_of_a_resize_stays_float32() -> None:
    body = """q = Gemm(z, v) r = Relu(q) s = Constant<value_ints=[4]>() f = Reshape(r, s)
        y = Resize(x, , f)"""
    found = computed(body, "float[1,4,8,8] x, float[1,4] z, float[4,4] v")
    assert found["q"] == found["r"] == found["f"] == "float"


def test_a_residual_that_a_mean_reads_too_stays_float32() -> None:
    body = "e = Exp(x) r = Relu(e) a = Conv(r, w) s = Add(a, r) m = ReduceMean<axes=[1]>(r) "
    found = computed(body + "y = Add(s, m)")
    assert found["r"] == "float,half"  # for the convolution alone
    assert found["s"] == "float"


def test_the_softmax_of_attention_is_half() -> None:
    found = computed("a = MatMul(x, x) s = Softmax(a) m = Mul(s, two) y = MatMul(m, x)")
    assert found["a"] == found["s"] == found["m"] == "half"


def test_attention_with_its_scale_and_mask_is_half() -> None:
    body = """z = Constant<value = float {0}>() low = Constant<value = float {-inf}>()
        k = MatMul(x, x) q = Mul(k, two) a = MatMul(q, k) on = Greater(x, z)
        m = Where(on, z, low) b = Add(a, m) s = Softmax(b) y = MatMul(s, k)"""
    found = computed(body)
    assert [found[name] for name in "kqabs"] == ["half"] * 5


def test_a_softmax_of_float32_values_hands_on_half() -> None:
    found = computed("e = Exp(x) s = Softmax(e) m = Mul(s, two) y = MatMul(m, x)")
    assert found["s"] == "float,half"
    assert found["m"] == "half"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ("1, 2, 3, 1e-9", "half,float"),
        ("1e-9, 1e-8, 1e-7, 0", "float"),
        ("0, 0, 0, 0", "half,float"),
    ],
)
def test_a_small_value_keeps_no_bias_in_float32(values: str, told: str) -> None:
    constant = f"k = Constant<value = float[4] {{{values}}}>()"
    found = computed(f"{constant} a = MatMul(x, x) b = Add(a, k) y = Exp(b)", "float[n,4,4,4] x")
    assert found["b"] == told


def test_a_product_that_is_sampled_computes_in_float32() -> None:
    body = """v = MatMul(x, x) g = Conv(x, w) p = Transpose<perm=[0,2,3,1]>(g)
        starts = Constant<value_ints=[0]>() ends = Constant<value_ints=[2]>()
        axes = Constant<value_ints=[3]>() t = Slice(p, starts, ends, axes)
        s = GridSample(v, t) m = MatMul(s, s) y = Exp(m)"""
    found = computed(body)
    assert found["v"] == "float"
    assert found["m"] == "half,float"


@pytest.mark.parametrize(
    ("value", "told"),
    [("-3.4e38", "float"), ("-1e4", "half,float"), ("1e-6", "float"), ("1e-3", "half,float")],
)
def test_what_meets_a_constant_that_half_does_not_hold(value: str, told: str) -> None:
    body = f"""a = Conv(x, w) m = Constant<value = float[1] {{{value}}}>()
        s = Constant<value_ints=[1, 1, 1, 1]>() k = Reshape(m, s) b = Add(a, k) y = Exp(b)"""
    assert computed(body, "float[n,4,8,2] x")["b"] == told


def test_weights_that_half_does_not_hold_stay_float32() -> None:
    large = "k = Constant<value = float[4,4] {7e4,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}>()"
    small = large.replace("7e4", "1e-9")
    assert computed(f"{large} a = MatMul(x, k) y = Exp(a)", "float[n,4,8,4] x")["a"] == "float"
    assert computed(f"{small} a = MatMul(x, k) y = Exp(a)", "float[n,4,8,4] x")["a"] == "half,float"


def test_a_resize_keeps_its_scales() -> None:
    body = """a = Conv(x, w) r = Constant<value = float[0] {}>()
        s = Constant<value = float[4] {1, 1, 2, 2}>() b = Resize(a, r, s) y = Conv(b, w)"""
    assert computed(body)["b"] == "half"


def test_bfloat16_holds_large_and_small_numbers() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float[n,2] y)
        <float[2,2] k = {1e6, 1e6, 1e-9, 1e-9}, float[2,2] small = {1e-9, 1e-9, 1e-9, 1e-9},
        float[2,2] most = {-3.4028234663852886e38, 1, 1, 1}>
        { a = MatMul(x, k) b = MatMul(a, small) c = MatMul(b, most) y = Exp(c) }"""
    found = []
    for precision in ("fp16", "bf16"):
        model = onnx.parser.parse_model(text)
        in_half(model, precision)
        found.append([n.output[0] for n in model.graph.node if n.op_type == "MatMul"])
    assert found == [["a", "b", "c"], ["a/half", "b/half", "c"]]


@pytest.mark.parametrize(("value", "half"), [(7.0, "b/half"), (9.0, "b")])
def test_a_bias_in_bfloat16_is_smaller(value: float, half: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float[n,2] y)
        <float[2,2] k = {{1, 1, 1, 1}}, float[2] bias = {{1, {value}}}>
        {{ a = MatMul(x, k) b = Add(a, bias) y = Exp(b) }}"""
    model = onnx.parser.parse_model(text)
    in_half(model, "bf16")
    assert half in [n.output[0] for n in model.graph.node if n.op_type == "Add"]


@pytest.mark.parametrize(
    ("body", "in_bf16"),
    [
        ("a = ConvTranspose(x, w) b = Relu(a) c = Conv(b, w) y = Exp(c)", ["c"]),
        ("a = Conv(x, w) b = HardSwish(a) c = Conv(b, w) y = Exp(c)", ["a", "c"]),
    ],
)
def test_ops_that_tensorrt_lacks_in_bfloat16_stay_float32(body: str, in_bf16: list[str]) -> None:
    """And what TensorRT-RTX builds in float16 otherwise, it builds in bfloat16."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,4,h,v] x) => (float[n,4,p,q] y)
        <float[4,4,1,1] w = {{{", ".join(["0.5"] * 16)}}}> {{ {body} }}"""
    half: dict[str, list[str]] = {}
    for precision in ("fp16", "bf16"):
        model = onnx.parser.parse_model(text)
        in_half(model, precision)
        nodes = [n for n in model.graph.node if n.op_type != "Cast"]
        made = [n.output[0].removesuffix("/half") for n in nodes if n.output[0].endswith("/half")]
        half[precision] = made
    assert half == {"fp16": ["a", "b", "c"], "bf16": in_bf16}
    feeds = [{"x": np.zeros((n, 4, 8, 8), np.float32)} for n in (1, 2)]
    with Child() as child:
        found = attempt(child, onnx.parser.parse_model(text), feeds, TARGETS["rtx-1.7"], "bf16")
    assert not found.failed, found.detail
