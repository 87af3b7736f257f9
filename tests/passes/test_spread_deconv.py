"""Strided and dilated transposed convolutions, compared with torch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from pass_harness import PASSES, apply, assert_same, run

from pipeline.passes.spread_deconv import spread

PASS = PASSES["spread_deconv"]
KERNEL = np.random.default_rng(1).normal(size=(4, 3, 2, 3)).astype(np.float32)
IMAGE = np.random.default_rng(2).normal(size=(2, 4, 5, 6)).astype(np.float32)


def model(
    kernel: np.ndarray, dtype: int = TensorProto.FLOAT, **attributes: object
) -> onnx.ModelProto:
    node = helper.make_node("ConvTranspose", ["x", "k"], ["y"], "deconv", **attributes)
    x = helper.make_tensor_value_info("x", dtype, ["n", kernel.shape[0], "h", "w"])
    y = helper.make_tensor_value_info("y", dtype, ["n", "c", "p", "q"])
    weight = numpy_helper.from_array(kernel, "k")
    if dtype == TensorProto.BFLOAT16:
        weight = helper.make_tensor("k", dtype, kernel.shape, kernel.reshape(-1))
    graph = helper.make_graph([node], "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("stride", [(2, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("dilation", [(2, 2), (1, 3), (4, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_torch(stride: tuple[int, int], dilation: tuple[int, int], groups: int) -> None:
    pads = [1, 0, 1, 0]
    source = model(KERNEL, strides=stride, dilations=dilation, group=groups, pads=pads)
    after, result = apply(PASS, source)
    assert result.modified
    expected = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(IMAGE), torch.from_numpy(KERNEL), None, stride, (1, 0), 0, groups, dilation
    )
    assert_same([expected.numpy()], run(after, {"x": IMAGE}))


def test_the_taps_keep_their_places() -> None:
    wide = spread(KERNEL, (3, 2))
    assert wide.shape == (4, 3, 4, 5)
    assert np.count_nonzero(wide) == KERNEL.size
    np.testing.assert_array_equal(wide[:, :, ::3, ::2], KERNEL)


def test_a_tap_in_the_wrong_place_would_show() -> None:
    source = model(KERNEL, strides=[2, 2], dilations=[2, 2])
    after, _ = apply(PASS, source)
    (weight,) = after.graph.initializer
    wrong = np.roll(numpy_helper.to_array(weight), 1, axis=3)
    weight.CopyFrom(numpy_helper.from_array(wrong, weight.name))
    with pytest.raises(AssertionError):
        assert_same(run(source, {"x": IMAGE}), run(after, {"x": IMAGE}))


def test_another_precision_is_refused_by_name() -> None:
    _, result = apply(PASS, model(KERNEL, TensorProto.BFLOAT16, strides=[2, 2], dilations=[2, 2]))
    (refused,) = result.refused
    assert "cast it to float32 or float16" in refused.detail
