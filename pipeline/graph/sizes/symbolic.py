"""ONNX Runtime's symbolic shape inference, for named sizes and for Microsoft's ops."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

from pipeline.errors import PipelineError, first_line

DOMAIN = "com.microsoft"


def infer(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """The model with the shapes of all tensors that ONNX Runtime can infer.

    Args:
        model: The model. Its inputs have sizes or names for them.
        shapes: The input shapes by name, for the error's text.

    Raises:
        PipelineError: The inference fails.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # SymbolicShapeInference.infer_shapes does the same, but writes a file to the current
            # folder if a shape stays unknown
            inference = _inference()
            # from opset 18 on, the axes of these ops are an input
            for op in ("Max", "Min", "L1", "L2", "SumSquare"):
                inference.dispatcher_[f"Reduce{op}"] = inference._infer_ReduceMean
            inference._preprocess(model)
            while inference.run_:
                inference._infer_impl()
            inference._update_output_from_vi()
            inferred = inference.out_mp_
    except MemoryError:
        raise
    except Exception as error:  # the inference raises bare Exception
        first = first_line(error, "the sizes do not fit each other")
        raise PipelineError(f"shape inference fails at {dict(shapes)}: {first}") from error
    assert isinstance(inferred, onnx.ModelProto)
    return inferred


def contributed(
    node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], tensors: Sequence[onnx.TensorProto]
) -> list[onnx.TypeProto | None]:
    """The result types of an op that onnx does not have; None if there is no rule.

    Args:
        node: The node.
        types: The types of its inputs by name.
        tensors: The inputs whose values are known.

    Raises:
        PipelineError: The sizes do not fit each other.
    """
    names = [name for name in dict.fromkeys(node.input) if name]
    ours = node.domain in ("", DOMAIN) and node.op_type in _known()
    if not ours or not types.keys() >= set(names):
        return [None] * len(node.output)
    have = {tensor.name for tensor in tensors}
    graph = helper.make_graph(
        [node],
        "node",
        [onnx.ValueInfoProto(name=name, type=types[name]) for name in names if name not in have],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        initializer=tensors,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    shapes = {name: list(map(_size, types[name].tensor_type.shape.dim)) for name in names}
    inferred = infer(helper.make_model(graph, opset_imports=opsets), shapes)
    found = {v.name: v.type for v in (*inferred.graph.value_info, *inferred.graph.output)}
    return [found.get(name) for name in node.output]


def _size(dim: onnx.TensorShapeProto.Dimension) -> int:
    return dim.dim_value if dim.HasField("dim_value") else -1


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(_inference().dispatcher_)


def _inference() -> Any:
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(logging.ERROR)
    return SymbolicShapeInference(2**31 - 1, False, False, 0)
