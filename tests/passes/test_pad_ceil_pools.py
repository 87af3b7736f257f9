"""Pools that round up: every remainder, compared with ONNX Runtime and torch."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from pass_harness import PASSES, apply, assert_same, run

PASS = PASSES["pad_ceil_pools"]
# kernel, stride, padding: all with a result in torch and a possible window in the padding
WINDOWS = [
    (kernel, stride, pad)
    for kernel, stride, pad in itertools.product((1, 2, 3, 5), (1, 2, 3, 4), (0, 1, 2))
    if pad + stride > kernel and 2 * pad <= kernel
]


def pool(op: str, kernel: int, stride: int, pads: tuple[int, int], more: str = "") -> str:
    begin, end = pads
    return (
        f"{op}<ceil_mode=1, kernel_shape=[{kernel},{kernel}], strides=[{stride},{stride}], "
        f"pads=[{begin},{begin},{end},{end}]{more}>"
    )


def model(node: str, size: str = "h,w") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> '
        f"g (float[n,2,{size}] x) => (float[n,2,p,q] y) {{ [pool] y = {node}(x) }}"
    )


def image(size: int) -> np.ndarray:
    # below zero, so that a padded zero would be the maximum
    return np.random.default_rng(size).normal(-3, 1, (2, 2, size, size + 1)).astype(np.float32)


@pytest.mark.parametrize(("kernel", "stride", "pad"), WINDOWS)
@pytest.mark.parametrize("counted", [0, 1])
def test_average_equals_torch_at_every_rest(
    kernel: int, stride: int, pad: int, counted: int
) -> None:
    source = model(
        pool("AveragePool", kernel, stride, (pad, pad), f", count_include_pad={counted}")
    )
    after, result = apply(PASS, source)
    assert result.modified
    for size in range(max(kernel, 2), kernel + 2 * stride + 2):
        x = image(size)
        expected = torch.nn.functional.avg_pool2d(
            torch.from_numpy(x),
            kernel,
            stride,
            pad,
            ceil_mode=True,
            count_include_pad=bool(counted),
        )
        assert_same([expected.numpy()], run(after, {"x": x}))
        assert_same(run(source, {"x": x}), run(after, {"x": x}))


@pytest.mark.parametrize(("kernel", "stride", "pad"), WINDOWS)
def test_maximum_equals_torch_at_every_rest(kernel: int, stride: int, pad: int) -> None:
    after, _ = apply(PASS, model(pool("MaxPool", kernel, stride, (pad, pad))))
    for size in range(max(kernel, 2), kernel + 2 * stride + 2):
        x = image(size)
        expected = torch.nn.functional.max_pool2d(
            torch.from_numpy(x), kernel, stride, pad, ceil_mode=True
        )
        assert_same([expected.numpy()], run(after, {"x": x}))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_uneven_padding_equals_onnx_runtime(op: str) -> None:
    for kernel, stride in ((2, 3), (3, 3), (3, 4), (3, 2)):
        for pads in itertools.product(range(kernel), repeat=2):
            counted = ", count_include_pad=1" if op == "AveragePool" else ""
            source = model(pool(op, kernel, stride, pads, counted))
            after, result = apply(PASS, source)
            assert result.modified == (pads[1] + stride > kernel)
            for size in range(kernel, kernel + stride + 2):
                x = image(size)
                assert_same(run(source, {"x": x}), run(after, {"x": x}))


def test_one_row_less_padding_would_show() -> None:
    """The comparison notices a padding that is smaller by one."""
    source = model(pool("MaxPool", 3, 3, (1, 1)))
    after, _ = apply(PASS, source)
    (pads,) = (a for a in after.graph.node[0].attribute if a.name == "pads")
    pads.ints[2] -= 1
    with pytest.raises(AssertionError):
        for size in range(3, 9):
            assert_same(run(source, {"x": image(size)}), run(after, {"x": image(size)}))


def test_every_pool_it_leaves_alone_has_the_size_that_tensorrt_computes() -> None:
    for kernel, stride in itertools.product((1, 2, 3, 4), repeat=2):
        for pads in itertools.product(range(kernel), repeat=2):
            source = model(pool("MaxPool", kernel, stride, pads))
            if apply(PASS, source)[1].modified:
                continue
            for size in range(kernel, kernel + 2 * stride + 2):
                (y,) = run(source, {"x": image(size)})
                rest = size + sum(pads) - kernel
                assert y.shape[2] == -(-rest // stride) + 1


def test_padding_as_large_as_the_window_is_refused() -> None:
    source = model(pool("MaxPool", 2, 2, (0, 2)))
    _, result = apply(PASS, source)
    (refused,) = result.refused
    assert "pad less than the window" in refused.detail
    with pytest.raises(Exception, match=r"[Pp]ad should be smaller than kernel"):
        run(source, {"x": image(5)})


def test_a_size_that_is_stated_rightly_is_kept() -> None:
    source = model(pool("MaxPool", 2, 3, (0, 0)), "6,5")
    stated = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2, 2, 2])
    source.graph.output[0].CopyFrom(stated)
    after, result = apply(PASS, source)
    assert result.modified
    onnx.checker.check_model(after, full_check=True)
    assert run(after, {"x": image(6)[..., :5]})[0].shape == (2, 2, 2, 2)
