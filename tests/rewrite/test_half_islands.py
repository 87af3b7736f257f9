"""Half precision by a recipe: what can be half, what stays float32, and how nodes are named."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto

from pipeline.errors import InputError
from pipeline.graph.session import run_reference
from pipeline.machine.target import TARGETS, use
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES
from pipeline.rewrite.half import choices_in, dtypes_of, in_half, rounded
from pipeline.rewrite.half_islands import address_of
from pipeline.spec.recipe import Recipe, all_but, parse_recipe

EVERYTHING = all_but("fp16", [])
BLOCK = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,8] x) => (float[n,8] y)
    <float two = {2}> {
    [norm__norm] a = LayerNormalization(x, bias)
    [mlp__product] b = MatMul(a, k) [mlp__bias] c = Add(b, bias)
    [mlp__erf] d = Erf(c) [mlp__gate] e = Mul(c, d)
    [attention__scores] f = Softmax(e) [attention__square] i = Pow(f, two)
    [sum] m = ReduceMean<axes = [1]>(i) [out] y = Add(x, m) }"""


def block() -> onnx.ModelProto:
    model = onnx.parser.parse_model(BLOCK)
    for node in model.graph.node:
        node.name = node.name.replace("__", "/")  # module/name
    rng = np.random.default_rng(0)
    for name, shape in (("k", (8, 8)), ("bias", (8,))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def float_ops(model: onnx.ModelProto) -> list[str]:
    """The ops that make float32, without the Casts, after `in_half`."""
    dtypes = dtypes_of(model.graph)
    return [
        node.op_type
        for node in model.graph.node
        if node.op_type != "Cast"
        and any(dtypes.get(name) == TensorProto.FLOAT for name in node.output)
    ]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_everything_in_half_leaves_no_float32_node(precision: str) -> None:
    model, plain = block(), block()
    recipe = Recipe((("*", precision),))  # type: ignore[arg-type]
    assert in_half(model, precision, recipe) == len(plain.graph.node)
    assert float_ops(model) == []
    feed = {"x": np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)}
    (want,) = run_reference(plain.SerializeToString(), [feed])
    (got,) = run_reference(rounded(model).SerializeToString(), [feed])
    assert 0 < np.abs(want["y"] - got["y"]).max() < (4e-3 if precision == "fp16" else 3e-2)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("mlp = fp32", ["MatMul", "Add", "Erf", "Mul"]),
        ("mlp/Erf = fp32", ["Erf"]),
        ("mlp/erf = fp32", ["Erf"]),
        ("sum = fp32", ["ReduceMean"]),
        ("mlp = fp32\nmlp/* = fp16\nmlp/MatMul = fp32", ["MatMul"]),
        ("* = fp32\nnorm = fp16\nattention* = fp16", ["MatMul", "Add", "Erf", "Mul"]),
    ],
)
def test_a_recipe_chooses_the_nodes(lines: str, expected: list[str]) -> None:
    model = block()
    recipe = parse_recipe(f"* = fp16\n{lines}", "recipe")
    in_half(model, "fp16", recipe)
    onnx.checker.check_model(model, full_check=True)
    found = float_ops(model)
    assert [op for op in found if op not in ("ReduceMean", "Add")] == [
        op for op in expected if op not in ("ReduceMean", "Add")
    ]
    assert set(expected) <= set(found)
    choices, _ = choices_in(block(), "fp16")
    assert sum(island.nodes for island in choices.islands(recipe)) == len(found)


def test_a_line_that_matches_nothing_is_an_error() -> None:
    for pattern in ("decoder", "mlp/Conv", "nor"):
        with pytest.raises(InputError, match=rf"^recipe: '{pattern}' is not the name of a node"):
            in_half(block(), "fp16", all_but("fp16", [pattern]))


def layered() -> onnx.ModelProto:
    """`block` as ``model.layer`` with two submodules."""
    model = block()
    for node in model.graph.node:
        node.name = node.name.replace("norm/", "model.layer/")
        for name in ("mlp", "attention"):
            node.name = node.name.replace(f"{name}/", f"model.layer.{name}/")
    return model


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("model", "It is a module whose submodules have 7 nodes: write model.*"),
        ("layer.mlp", "Did you mean model.layer.mlp?"),
        ("layer", "Did you mean model.layer?"),
        ("model.layer.mpl", "Did you mean model.layer.mlp?"),
        ("decoder", "Correct or remove the line"),
    ],
)
def test_a_name_that_is_near_is_suggested(pattern: str, advice: str) -> None:
    with pytest.raises(InputError) as caught:
        in_half(layered(), "fp16", all_but("fp16", [pattern]))
    assert str(caught.value).endswith(f". {advice}")
    if advice.startswith("Did"):  # what is suggested is right
        in_half(layered(), "fp16", all_but("fp16", [advice.rsplit(maxsplit=1)[-1].rstrip("?")]))


@pytest.mark.parametrize(
    ("islands", "nodes", "notes"),
    [
        (
            ["model.layer"],
            1,
            {"model.layer": "6 nodes of its submodules in half precision, which model.layer.*"},
        ),
        (
            ["model.layer.*"],
            6,
            {"model.layer.*": "1 node of the module itself in half precision, which model.layer"},
        ),
        (["model.layer", "model.layer.*"], 7, {}),
        (["model.layer*"], 7, {}),
        (["model.layer.mlp"], 4, {}),
    ],
)
def test_a_module_has_its_own_nodes_and_those_of_its_submodules(
    islands: list[str], nodes: int, notes: dict[str, str]
) -> None:
    recipe = all_but("fp16", islands)
    choices, _ = choices_in(layered(), "fp16")
    assert len(choices.wide(recipe)) == nodes
    assert choices.left_out(recipe) == {name: f"{text} matches" for name, text in notes.items()}


@pytest.mark.parametrize(
    "body",
    [
        "y = Mul(x, large)",  # 1e6 would become infinite
        "y = Div(x, tiny)",  # 1e-12 would become 0
        "y = com.custom.Op(x)",
        "a = Cast<to = 7>(x) y = Cast<to = 1>(a)",
        "t = Constant<value = bool {1}>() y = If (t) <then_branch = p () => (float[4] q) "
        "{ q = Neg(x) }, else_branch = s () => (float[4] r) { r = Abs(x) }>",
        "a = Greater(x, large) y = Cast<to = 1>(a)",
        "a = Unsqueeze(large, zero) y = Identity(a)",
    ],
)
def test_what_cannot_be_half_stays_float32(body: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.custom" : 1]>
        g (float[4] x) => (float[4] y)
        <float[1] large = {{1e6}}, float[1] tiny = {{1e-12}}, int64[1] zero = {{0}}> {{ {body} }}"""
    )
    before = model.SerializeToString()
    assert in_half(model, "fp16", EVERYTHING) == 0
    assert model.graph.node == onnx.ModelProto.FromString(before).graph.node


def test_small_constants_are_measured_not_forbidden() -> None:
    """1e-6 loses digits. Whether that matters, the search finds."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y)
        <float[1] eps = {1e-6}> { a = Add(x, eps) y = Sqrt(a) }"""
    )
    assert in_half(model, "fp16", EVERYTHING) == 2


def beside_its_half(
    model: onnx.ModelProto, feed: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Makes the model half, and returns its output and that of the model before."""
    plain = model.SerializeToString()
    in_half(model, "fp16", EVERYTHING)
    (want,) = run_reference(plain, [feed])
    (got,) = run_reference(rounded(model).SerializeToString(), [feed])
    return got["y"], want["y"]


GUARDED = {
    "a = Abs(x) b = Add(a, tiny) y = Div(x, b)": ["Add", "Div"],
    "a = Abs(x) b = Max(a, tiny) c = Expand(b, shape) y = Div(x, c)": ["Max", "Expand", "Div"],
    "a = Abs(x) b = Add(a, tiny) c = Greater(x, one) d = Where(c, x, b) y = Div(x, d)": [
        "Add", "Where", "Div",
    ],
    # the root is 3e-5, which float16 has
    "a = Abs(x) b = Add(a, tiny) c = Sqrt(b) y = Div(x, c)": ["Add", "Sqrt"],
    "a = Abs(x) b = Add(a, tiny) c = Mul(b, b) y = Div(x, c)": ["Add", "Mul", "Div"],
    "a = Abs(x) b = Add(a, tiny) c = Add(b, b) y = Div(x, c)": ["Add", "Add", "Div"],
    "a = Abs(x) b = Add(a, tiny) c = Add(a, b) y = Div(x, c)": ["Add", "Add", "Div"],
    "a = Abs(x) b = Add(a, tiny) c = Reciprocal(b) y = Mul(x, c)": ["Add", "Reciprocal", "Mul"],
    "a = Abs(x) b = Add(a, tiny) c = Div(one, b) y = Mul(x, c)": ["Add", "Div", "Mul"],
    # the root is 1e-6, which float16 has, and its reciprocal is not
    "a = Mul(x, x) b = Add(a, tinier) c = Sqrt(b) d = Reciprocal(c) y = Mul(x, d)": [
        "Add", "Sqrt", "Reciprocal", "Mul",
    ],
    "a = Abs(x) b = Add(a, small) c = Reciprocal(b) y = Mul(x, c)": ["Reciprocal", "Mul"],
    "a = Abs(x) b = Add(a, small) y = Div(x, b)": [],
    "a = Mul(x, x) b = Add(a, small) c = Sqrt(b) d = Reciprocal(c) y = Mul(x, d)": [],
    "a = Relu(x) b = Add(a, tiny) c = Log(b) y = Mul(x, c)": ["Add", "Log"],
    # near misses: nothing becomes infinite, or 0 in a divisor
    "a = Abs(x) b = Add(a, tiny) y = Mul(x, b)": ["Add"],
    "a = Add(x, one) b = Add(x, tiny) y = Div(b, one)": ["Add"],
    "a = Abs(x) b = Add(a, tiny) c = Max(b, one) y = Div(x, c)": ["Add", "Max"],
}  # fmt: skip


@pytest.mark.parametrize(("body", "wide"), GUARDED.items())
def test_what_divides_by_a_value_that_a_tiny_constant_keeps_from_0_stays_float32(
    body: str, wide: list[str]
) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y)
        <float[1] tiny = {{1e-9}}, float[1] tinier = {{1e-12}}, float[1] small = {{1e-6}},
        float[1] one = {{1}}, int64[1] shape = {{4}}> {{ {body} }}"""
    )
    got, want = beside_its_half(model, {"x": np.zeros(4, np.float32)})
    assert float_ops(model) == wide
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-7)


COVERED = {
    # a mask of 0 covers all keys; -1e9 is -inf in float16
    "m = Mul(x, far) b = Add(s, m) y = Softmax(b)": ["Mul", "Add", "Softmax"],
    "m = Mul(x, far) d = Identity(m) b = Sub(s, d) y = Softmax(b)": [
        "Mul", "Identity", "Sub", "Softmax",
    ],
    "c = Greater(x, zero) m = Where(c, far, zero) b = Add(m, s) y = Softmax(b)": [
        "Where", "Add", "Softmax",
    ],
    # near misses: float16 holds the number; what reads the softmax is half again
    "m = Mul(x, near) b = Add(s, m) y = Softmax(b)": [],
    "m = Mul(x, far) b = Add(s, m) p = Softmax(b) y = Add(p, s)": ["Mul", "Add", "Softmax"],
}  # fmt: skip


@pytest.mark.parametrize(("body", "wide"), COVERED.items())
def test_a_softmax_of_a_row_that_a_large_constant_covers_stays_float32(
    body: str, wide: list[str]
) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, float[4] s) => (float[4] y)
        <float[1] far = {{-1e9}}, float[1] near = {{-8}}, float[1] zero = {{0}}> {{ {body} }}"""
    )
    scores = np.linspace(-2, 2, 4, dtype=np.float32)
    got, want = beside_its_half(model, {"x": np.ones(4, np.float32), "s": scores})
    assert float_ops(model) == wide
    np.testing.assert_allclose(got, want, atol=2e-2)


def made_by(scopes: list[str], frames: list[tuple[str, int]]) -> onnx.NodeProto:
    node = onnx.helper.make_node("Pow", ["x"], ["y"], name="node_Pow_7")
    trace = "".join(f'File "{file}", line {line}, in forward\n' for file, line in frames)
    for key, value in (("name_scopes", str(scopes)), ("stack_trace", trace)):
        node.metadata_props.append(
            onnx.StringStringEntryProto(key=f"pkg.torch.onnx.{key}", value=value)
        )
    return node


def test_a_node_is_named_by_its_module_and_its_line() -> None:
    frames = [("/home/me/model.py", 12), ("/lib/torch/nn/modules/normalization.py", 217)]
    address = address_of(made_by(["", "encoder", "encoder.norm", "pow_1"], frames))
    assert (address.group, address.part) == ("encoder.norm", "encoder.norm/Pow")
    assert {"encoder.norm", "model.py:12", "model.py:12/Pow", "node_Pow_7"} <= set(address.names)
    # in the model's own forward, the line says more than the module
    address = address_of(made_by(["", "pow_1"], frames))
    assert (address.group, address.part) == ("model.py:12", "model.py:12/Pow")
    assert "(top)" in address.names
    plain = onnx.helper.make_node("Pow", ["x"], ["made"])
    assert address_of(plain).names == ("made",)


# a graph may have nothing that could be half
def half_of(case: Case) -> tuple[onnx.ModelProto, int]:
    half = case.model()
    return half, in_half(half, "fp16", EVERYTHING)


TRIED = [c for c in CASES if c.kind != "refusal" and half_of(c)[1]]
PARSED = [c for c in TRIED if c.fails.get("rtx-1.7") != "parse"]


@pytest.mark.parametrize("case", TRIED[::3], ids=str)
def test_a_case_in_half_is_valid_and_runs(case: Case) -> None:
    half, _ = half_of(case)
    onnx.checker.check_model(half)
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    plain = run_reference(case.model().SerializeToString(), feeds)
    found = run_reference(rounded(half).SerializeToString(), feeds)
    for want, got in zip(plain, found, strict=True):
        assert {n: (a.shape, a.dtype) for n, a in want.items()} == {
            n: (a.shape, a.dtype) for n, a in got.items()
        }


def parsed(model: onnx.ModelProto) -> bool:
    """Whether the parser of TensorRT-RTX takes the model."""
    trt = use(TARGETS["rtx-1.7"])
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    network = trt.Builder(logger).create_network(0)
    return bool(trt.OnnxParser(network, logger).parse(model.SerializeToString()))


@pytest.mark.parametrize("case", PARSED[1::6], ids=str)
def test_the_parser_reads_it(case: Case) -> None:
    half, _ = half_of(case)
    assert parsed(half)


@pytest.mark.parametrize(
    "op", ["Mish", "LpNormalization", "GlobalLpPool", "Shrink", "LpPool<kernel_shape = [2, 2]>"]
)
def test_what_the_parser_has_in_float16_only(op: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[2,4,8,8] x) => (float[2,4,n,m] y) {{ a = Relu(x) b = {op}(a) y = Abs(b) }}"""
    for precision, count in (("fp16", 3), ("bf16", 2)):
        model = onnx.parser.parse_model(text)
        assert in_half(model, precision, Recipe((("*", precision),))) == count  # type: ignore[arg-type]
        assert parsed(model)
