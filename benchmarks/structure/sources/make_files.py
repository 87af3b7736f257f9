"""Writes the ONNX files and the .pt2 program that `manifests.py` converts.

python benchmarks/structure/sources/make_files.py benchmarks/structure/sources
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from small_torch import cell

F = TensorProto.FLOAT


def _save(out: Path, name: str, nodes: list, inputs: list, outputs: list, constants: list) -> None:
    graph = helper.make_graph(nodes, name, inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, out / f"{name}.onnx")


def main(out: Path) -> None:
    random = np.random.default_rng(0)
    value = helper.make_tensor_value_info

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(
            (0.2 * random.standard_normal(shape)).astype(np.float32), name
        )

    # two inputs whose lengths have to be equal
    _save(
        out, "equal",
        [
            helper.make_node("Conv", ["a", "wa"], ["fa"], "conv_a", pads=[1, 1]),
            helper.make_node("Conv", ["b", "wb"], ["fb"], "conv_b", pads=[1, 1]),
            helper.make_node("Add", ["fa", "fb"], ["sum"], "add"),
            helper.make_node("Relu", ["sum"], ["y"], "relu"),
        ],
        [value("a", F, ["batch", 3, "m"]), value("b", F, ["batch", 3, "n"])],
        [value("y", F, ["batch", 8, "m"])],
        [weight("wa", 8, 3, 3), weight("wb", 8, 3, 3)],
    )  # fmt: skip
    # a length that has to be a multiple of 8
    _save(
        out, "blocks",
        [
            helper.make_node("Reshape", ["x", "rows"], ["r"], "reshape"),
            helper.make_node("MatMul", ["r", "w"], ["m"], "matmul"),
            helper.make_node("ReduceMax", ["m", "axes"], ["y"], "largest", keepdims=0),
        ],
        [value("x", F, ["batch", "n"])],
        [value("y", F, ["batch", 4])],
        [
            numpy_helper.from_array(np.array([0, -1, 8], np.int64), "rows"),
            numpy_helper.from_array(np.array([1], np.int64), "axes"),
            weight("w", 8, 4),
        ],
    )  # fmt: skip
    # one length is the sum of two others; a node that a pass rewrites (BitwiseAnd: rtx has none)
    _save(
        out, "joined",
        [
            helper.make_node("Concat", ["past", "new"], ["all"], "concat", axis=1),
            helper.make_node("MatMul", ["all", "w"], ["m"], "matmul"),
            helper.make_node("Add", ["m", "mask"], ["masked"], "add"),
            helper.make_node("Softmax", ["masked"], ["y"], "softmax", axis=1),
            helper.make_node("Cast", ["bits"], ["wide"], "cast", to=TensorProto.INT32),
            helper.make_node("BitwiseAnd", ["wide", "seven"], ["low_bits"], "and"),
        ],
        [
            value("past", F, [1, "p", 16]), value("new", F, [1, "s", 16]),
            value("mask", F, [1, "t", 4]), value("bits", TensorProto.INT64, [1, "s"]),
        ],
        [value("y", F, [1, "t", 4]), value("low_bits", TensorProto.INT32, [1, "s"])],
        [weight("w", 16, 4), numpy_helper.from_array(np.array(7, np.int32), "seven")],
    )  # fmt: skip
    b = torch.export.Dim("b", min=1, max=16)
    program = torch.export.export(
        cell().eval(), (torch.zeros(4, 16),), dynamic_shapes={"x": {0: b}}
    )
    torch.export.save(program, out / "cell.pt2")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
