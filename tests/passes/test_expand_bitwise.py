"""expand_bitwise: the limits of integers, torch's export, and integers cut to 32 bits."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from pass_harness import apply, own, run

from pipeline.passes.case import Case
from pipeline.passes.expand_bitwise import PASS

BITWISE = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor}


def rewritten(name: str) -> onnx.ModelProto:
    (case,) = (c for c in own("expand_bitwise", "positive") if c.name == name)
    return apply(PASS, case.model())[0]


def pairs(values: list[int], dtype: str) -> dict[str, np.ndarray]:
    both = np.array(list(itertools.product(values, values)), dtype)
    return {"x": both[:, 0].copy(), "z": both[:, 1].copy()}


def ends(bits: int) -> list[int]:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    middle = [2**30 - 1, 2**30, -(2**30), -(2**30) - 1] if bits > 31 else [100, -100]
    return [low, low + 1, -2, -1, 0, 1, 2, 3, 12345, -54321, *middle, high - 1, high]


@pytest.mark.parametrize("op", BITWISE)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [("int32", ends(32)), ("int64", [*ends(64), *ends(32)]), ("uint8", list(range(256)))],
)
def test_every_pair_of_extremes(op: str, dtype: str, values: list[int]) -> None:
    feeds = pairs(values, dtype)
    (y,) = run(rewritten(f"{op} {dtype}"), feeds)
    np.testing.assert_array_equal(y, BITWISE[op](feeds["x"], feeds["z"]))


@pytest.mark.parametrize("op", BITWISE)
def test_constants_clamped_to_32_bits_give_the_same_for_what_fits(op: str) -> None:
    """TensorRT 8.6 clamps int64 constants to 32 bits.

    A table of 63 powers of two would be clamped to 2**31 - 1. -1 and 2**31 - 1 would lose a bit.
    """
    model = rewritten(f"{op} int64")
    clamped = 0
    for tensor in model.graph.initializer:
        if tensor.data_type != onnx.TensorProto.INT64:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        within = np.clip(values, -(2**31), 2**31 - 1)
        clamped += int((within != values).sum())
        tensor.CopyFrom(onnx.numpy_helper.from_array(within, tensor.name))
    assert clamped  # the smallest int64 itself
    feeds = pairs(ends(32), "int64")
    (y,) = run(model, feeds)
    np.testing.assert_array_equal(y, BITWISE[op](feeds["x"], feeds["z"]))


@pytest.mark.parametrize("by", [1, 3, 40, 63])
def test_right_shifts_keep_the_sign(by: int) -> None:
    text = own("expand_bitwise", "positive")
    (case,) = (c for c in text if c.name == "int64 shifted right by 1")
    ones = 2**64 - 1
    replaced = case.text.replace("k = {1}", f"k = {{{by}}}").replace(
        f"m = {{{ones ^ (ones >> 1)}}}", f"m = {{{ones ^ (ones >> by)}}}"
    )
    x = np.array(ends(64))
    (y,) = run(apply(PASS, Case(**{**vars(case), "text": replaced}).model())[0], {"x": x})
    np.testing.assert_array_equal(y, x >> by)


def test_what_torch_exports_is_what_torch_computes() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return ((x & z) | (x ^ 3)) + ~x + (x << 2) + (z >> 1) + (x & 7)

    x, z = torch.tensor(ends(32)), torch.tensor(ends(32)[::-1])
    program = torch.onnx.export(Module(), (x, z), dynamo=True, opset_version=18, verbose=False)
    after, result = apply(PASS, program.model_proto)
    assert not result.refused
    left = {node.op_type for node in after.graph.node}
    assert not left & {"BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift"}
    names = [value.name for value in after.graph.input]
    (y,) = run(after, dict(zip(names, (x.numpy(), z.numpy()), strict=True)))
    np.testing.assert_array_equal(y, Module()(x, z).numpy())
