"""The sizes inferred at given input sizes, compared with a run, op by op."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from pipeline.errors import PipelineError
from pipeline.graph.sizes.carried import CarriedSizes, known_dims
from pipeline.graph.sizes.static import StaticSizes

HEAD = '<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1, "x.y" : 1]> '
INTS = {np.dtype(kind) for kind in ("int32", "int64", "bool", "float32", "float64")}


def inferred(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> CarriedSizes:
    types = {}
    for value in model.graph.input:
        elem_type = value.type.tensor_type.elem_type
        types[value.name] = onnx.helper.make_tensor_type_proto(elem_type, shapes[value.name])
    return StaticSizes(model).at(types)


def of(text: str, **shapes: tuple[int, ...]) -> CarriedSizes:
    return inferred(onnx.parser.parse_model(HEAD + text), shapes)


def dims(sizes: CarriedSizes, name: str) -> list[int | None]:
    return known_dims(sizes.types[name])


@functools.cache
def cases() -> list[onnx.backend.test.case.node.TestCase]:
    """onnx's cases of single nodes with tensors as inputs and outputs."""
    return [
        case
        for case in collect_testcases(None)
        if case.data_sets
        and all(isinstance(a, (np.ndarray, np.generic)) for side in case.data_sets[0] for a in side)
        and not any(v.type.HasField("optional_type") for v in case.model.graph.input)
    ]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_op_as_in_onnx_s_own_cases(folded) -> None:
    """No size and no value may be wrong. With small inputs as weights, few are unknown."""
    known = values = unknown = 0
    for case in cases():
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        inputs, outputs = case.data_sets[0]
        shapes = {v.name: np.shape(x) for v, x in zip(model.graph.input, inputs, strict=True)}
        for value, array in zip(case.model.graph.input, inputs, strict=True):
            if folded and np.asarray(array).dtype in INTS and np.size(array) <= 64:
                tensor = numpy_helper.from_array(np.asarray(array), value.name)
                model.graph.initializer.append(tensor)
                model.graph.input.remove(value)
        sizes = inferred(model, shapes)
        for value, array in zip(model.graph.output, map(np.asarray, outputs), strict=True):
            kind = sizes.types.get(value.name)
            if kind is None or not kind.tensor_type.HasField("shape"):
                unknown += 1
                continue
            found = known_dims(kind)
            assert len(found) == array.ndim, case.name
            assert all(a in (None, b) for a, b in zip(found, array.shape, strict=True)), case.name
            known += None not in found
            unknown += None in found
            result = sizes.values.get(value.name, ())
            if len(result) == 1 and array.dtype.kind in "iub":
                np.testing.assert_array_equal(result[0], array, case.name)
                values += 1
    assert known > 1500
    if folded:
        assert values > 150
        assert unknown < 0.05 * known


def test_integers_are_those_of_onnx_runtime() -> None:
    """Division truncates, and Mod has the divisor's sign. Negative numbers show the difference."""
    text = (
        "g (int64[8] a, int64[8] b) => (int64[8] d, int64[8] m, int64[8] f) "
        "{ d = Div(a, b) m = Mod(a, b) f = Mod<fmod = 1>(a, b) }"
    )
    model = onnx.parser.parse_model(HEAD + text)
    feed = {"a": np.array([-7, -7, 7, 7, -8, 0, 1, -1]), "b": np.array([2, -2, 2, -2, 8, 3, 3, 3])}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    run = dict(zip("dmf", session.run(None, feed), strict=True))
    for name, array in feed.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    del model.graph.input[:]
    sizes = inferred(model, {})
    for name, array in run.items():
        np.testing.assert_array_equal(sizes.values[name][0], array)


CONSTANTS = (
    "zero = Constant<value = int64[1] {0}>() one = Constant<value = int64[1] {1}>() "
    "two = Constant<value = int64[1] {2}>() "
)


def test_a_size_that_is_up_to_the_data_stays_unknown_and_the_rest_known() -> None:
    sizes = of(
        f"g (float[n,3] x) => (int64[a,b] y) {{ {CONSTANTS} i = NonZero(x) s = Shape(i) "
        "rank = Gather<axis = 0>(s, zero) k = Gather<axis = 0>(s, one) more = Add(k, two) "
        "small = Min(k, two) some = Greater(k, zero) "
        "back = Concat<axis = 0>(rank, k) y = Reshape(i, back) "
        "wide = Concat<axis = 0>(rank, one, k) z = Reshape(i, wide) }",
        x=(20, 3),
    )
    assert (dims(sizes, "i"), dims(sizes, "y")) == ([2, None], [2, None])
    assert dims(sizes, "z") == [2, 1, None]
    assert [len(sizes.values[n]) for n in ("rank", "k", "more", "small", "some")] == [1, 3, 3, 3, 3]
    assert sizes.values["rank"][0].tolist() == [2]


BRANCHES = (
    "y = If(c) <then_branch = p () => (float[?] u) { a = Concat<axis = 0>(x, x) u = Relu(a) }, "
    "else_branch = q () => (float[?] v) { v = Relu(x) }> }"
)


def test_the_branch_that_is_taken_counts() -> None:
    text = f"g (float[n,3] x) => (float[a,b] y) {{ {CONSTANTS} s = Shape<start = 0, end = 1>(x) " \
        f"m = Mod(s, two) e = Equal(m, zero) c = Squeeze(e) {BRANCHES}"  # fmt: skip
    even, odd = of(text, x=(4, 3)), of(text, x=(5, 3))
    assert (dims(even, "y"), list(even.bodies)) == ([8, 3], [("y", "then_branch")])
    assert (dims(odd, "y"), list(odd.bodies)) == ([5, 3], [("y", "else_branch")])
    either = of("g (float[n,3] x, bool c) => (float[a,b] y) { " + BRANCHES, x=(4, 3), c=())
    assert dims(either, "y") == [None, 3]
    assert len(either.bodies) == 2


def test_a_branch_for_other_sizes_need_not_fit() -> None:
    text = (
        "g (float[n,3] x, bool c) => (float[a] y) { y = If(c) <then_branch = p () => (float[?] u) "
        "{ o = Constant<value = int64[1] {0}>() u = Squeeze(x, o) }, "
        "else_branch = q () => (float[?] v) { v = Relu(x) }> }"
    )
    found = of(text, x=(4, 3), c=())
    assert "y" not in found.types
    assert found.bodies["y", "then_branch"].types == {}


def loop(count: str, body: str) -> str:
    return (
        f"g (float[n,3] x, int64 t, bool c) => (float[a,b] y, float[d,e,f] all) {{ "
        f"{CONSTANTS} five = Constant<value = int64 {{5}}>() "
        f"yes = Constant<value = bool {{1}}>() y, all = Loop({count}, yes, x) "
        "<body = b (int64 i, bool ci, float[n,3] s) => (bool co, float[?] so, float[?] part) "
        f"{{ co = Identity(ci) {body} }}> }}"
    )


@pytest.mark.parametrize(
    ("count", "body", "state", "stacked"),
    [
        ("five", "so = Relu(s) part = Neg(s)", [4, 3], [5, 4, 3]),
        ("t", "so = Relu(s) part = Neg(s)", [4, 3], [None, 4, 3]),
        ("five", "so = Concat<axis = 0>(s, s) part = Neg(x)", [None, 3], [5, 4, 3]),
    ],
)
def test_loops(count, body, state, stacked) -> None:
    found = of(loop(count, body), x=(4, 3), t=(), c=())
    assert (dims(found, "y"), dims(found, "all")) == (state, stacked)


def test_microsoft_s_ops_and_unknown_ones() -> None:
    found = of(
        "g (float[n,3] x) => (float[a,b] y) { y = com.microsoft.Gelu(x) "
        "z = com.microsoft.Nonsense(x) f = x.y.Foo(x) g = Relu(f) }",
        x=(4, 3),
    )
    assert dims(found, "y") == [4, 3]
    assert found.types.keys() & {"z", "f"} == set()
    assert "g" not in found.types or not found.types["g"].tensor_type.HasField("shape")


def test_sizes_that_do_not_fit_name_the_node() -> None:
    text = (
        "g (float[n,3] x) => (float[a,b] y) { s = Constant<value = int64[2] {4, 5}>() "
        "y = Reshape(x, s) }"
    )
    with pytest.raises(PipelineError, match=r"^Reshape 'y': 12 elements do not fit into \[4, 5\]$"):
        of(text, x=(4, 3))


def test_a_quantized_graph_and_a_grid_sample() -> None:
    found = of(
        "g (float[n,3,h,w] x, float[n,p,q,2] grid) => (float[a,b,c,d] y) { "
        "s = Constant<value = float {0.1}>() z = Constant<value = int8 {0}>() "
        "axes = Constant<value = int64[2] {2, 3}>() q = QuantizeLinear(x, s, z) "
        "d = DequantizeLinear(q, s, z) y = GridSample(d, grid) m = ReduceMax(y, axes) }",
        x=(2, 3, 8, 9), grid=(2, 5, 7, 2),
    )  # fmt: skip
    assert dims(found, "q") == [2, 3, 8, 9]
    assert (dims(found, "y"), dims(found, "m")) == ([2, 3, 5, 7], [2, 3, 1, 1])
