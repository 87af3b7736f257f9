"""expand_resize: compared with ONNX Runtime at many sizes, and with torch if torch has the mode."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, apply, assert_same, own, run

from pipeline.passes.case import Case

P = PASSES["expand_resize"]
POSITIVE = own("expand_resize", "positive")
SIZES = ((1, 1), (5, 4), (7, 13), (30, 22))


def resize(attrs: str, last: str, inits: str, opset: int = 18, dtype: str = "float"):
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({dtype}[n,2,h,w] x) => '
        f"({dtype}[n,2,p,q] y) <{inits}> {{ y = Resize<{attrs}>({last}) }}"
    )


def inputs(sizes=SIZES):
    for number, size in enumerate(sizes):
        yield {"x": np.random.default_rng(number).normal(size=(1, 2, *size)).astype(np.float32)}


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("outside", [0, 1])
@pytest.mark.parametrize(
    "transform", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
)
@pytest.mark.parametrize("scales", ["1.7, 0.6", "0.3, 1.0", "0.99, 3.0"])
def test_antialias_is_onnx_runtimes(mode: str, outside: int, transform: str, scales: str) -> None:
    source = resize(
        f'mode="{mode}", antialias=1, exclude_outside={outside}, '
        f'coordinate_transformation_mode="{transform}", cubic_coeff_a=-0.5',
        "x, , s",
        f"float[4] s = {{1, 1, {scales}}}",
    )
    after, result = apply(P, source)
    assert result.modified
    for feeds in inputs():
        expected = run(source, feeds)
        if expected[0].size:
            assert_same(expected, run(after, feeds))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(7, 9), (1, 1), (40, 3)])
def test_antialias_is_torchs(mode: str, size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    onnx_mode, a = {"bilinear": ("linear", -0.75), "bicubic": ("cubic", -0.5)}[mode]
    source = resize(
        f'mode="{onnx_mode}", antialias=1, exclude_outside=1, cubic_coeff_a={a}, axes=[2, 3]',
        "x, , , s",
        f"int64[2] s = {{{size[0]}, {size[1]}}}",
    )
    after, _ = apply(P, source)
    for feeds in inputs():
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(feeds["x"]), size, mode=mode, antialias=True
        )
        assert_same([expected.numpy()], run(after, feeds))


def test_integers_wider_than_a_float_stay_exact() -> None:
    """ONNX Runtime has no Resize of int64. The reference is its choice of pixels in double."""
    attrs = 'mode="nearest", nearest_mode="round_prefer_ceil"'
    scales = "float[4] s = {1, 1, 1.7, 0.6}"
    after, _ = apply(P, resize(attrs, "x, , s", scales, dtype="int64"))
    places = np.arange(2 * 9 * 11, dtype=np.float32).reshape(1, 2, 9, 11)
    (picked,) = run(resize(attrs, "x, , s", scales), {"x": places})
    big = places.astype(np.int64) + 2**53 + 1
    (got,) = run(after, {"x": big})
    np.testing.assert_array_equal(got, big.reshape(-1)[picked.astype(np.int64)])


def test_nearest_has_no_antialias() -> None:
    """ONNX Runtime refuses it; the standard says that it changes nothing."""
    scales = "float[4] s = {1, 1, 2, 0.5}"
    after, result = apply(P, resize('mode="nearest", antialias=1', "x, , s", scales))
    assert "dropped" in result.rewritten[0].detail
    for feeds in inputs(SIZES[1:]):
        assert_same(run(resize('mode="nearest"', "x, , s", scales), feeds), run(after, feeds))


def test_tf_half_pixel_for_nn_is_half_a_pixel_off_half_pixel() -> None:
    """TensorRT-RTX 1.7 reads the first as the second for linear. So it is refused."""
    attrs = 'mode="linear", coordinate_transformation_mode="{}"'
    scales = "float[0] no = {}, float[4] s = {1, 1, 2, 2}"
    feeds = next(inputs([(5, 4)]))
    one, other = (
        run(resize(attrs.format(transform), "x, no, s", scales, 11), feeds)[0]
        for transform in ("tf_half_pixel_for_nn", "half_pixel")
    )
    assert np.abs(one - other).max() > 0.1


@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_sizes_that_are_known_leave_no_arithmetic(case: Case) -> None:
    """With static inputs, no coordinates or weights are computed at run time."""
    graph = gs.import_onnx(case.model())
    for value in (*graph.inputs, *graph.outputs):
        if value.name in case.shapes[0] and len(value.shape) > 2:
            value.shape = list(case.shapes[0][value.name])
    if any(node.op in ("Shape", "If") for node in graph.nodes):
        return
    assert P.run(graph).modified
    ops = {node.op for node in graph.cleanup().nodes}
    assert ops <= {"Gather", "Mul", "Add", "Where", "MatMul", "Transpose", "Cast", "Resize"}


@pytest.mark.parametrize("kind", ["weights", "gathered pixels"])
def test_a_wrong_constant_is_noticed(kind: str) -> None:
    attrs = 'mode="linear", antialias=1'
    if kind != "weights":
        attrs = 'mode="linear", coordinate_transformation_mode="half_pixel_symmetric"'
    source = resize(attrs, "x, , s", "float[4] s = {1, 1, 0.6, 1.7}", opset=19)
    after, result = apply(P, source)
    assert kind in result.rewritten[0].detail
    floats = [t for t in after.graph.initializer if t.data_type == 1]
    half = next(t for t in floats if onnx.numpy_helper.to_array(t) == 0.5)
    half.CopyFrom(onnx.numpy_helper.from_array(np.array(0.4, np.float32), half.name))
    feeds = next(inputs([(7, 13)]))
    with pytest.raises(AssertionError):
        assert_same(run(source, feeds), run(after, feeds))
