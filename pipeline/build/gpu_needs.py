"""Which GPUs can run a plan of TensorRT-RTX, by the types in its model.

Source: NVIDIA's support matrix of TensorRT-RTX, table "Supported Hardware"
(https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/getting-started/support-matrix.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto

from pipeline.build.settings import BuildOptions
from pipeline.errors import InputError
from pipeline.graph.files import nodes_of, tensors_in
from pipeline.graph.names import values_of
from pipeline.machine.gpu import PORTABLE, Capability, capability_text

# the lowest compute capability that has a type; every GPU of TensorRT-RTX has the other types
_LOWEST: dict[int, Capability] = {
    TensorProto.BFLOAT16: (8, 0),
    TensorProto.FLOAT8E4M3FN: (8, 9),
    TensorProto.FLOAT8E4M3FNUZ: (8, 9),
    TensorProto.FLOAT8E5M2: (8, 9),
    TensorProto.FLOAT8E5M2FNUZ: (8, 9),
    TensorProto.FLOAT4E2M1: (12, 0),
}
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


def gpus_for(model: Path, options: BuildOptions) -> tuple[Capability, ...]:
    """Returns the compute capabilities that the plan of a model will be for.

    Args:
        model: The ONNX file that is built. Its weights are not read.
        options: The target, and the GPUs that the user asked for.

    Returns:
        The GPUs that the user asked for. Without them, those of TensorRT-RTX's portable plan that
        have the model's types, or nothing if all of them do. Always nothing for other targets.

    Raises:
        InputError: A GPU that the user asked for lacks one of the model's types.
    """
    if options.target.flavour != "tensorrt_rtx":
        return ()
    found = _types(onnx.load(model, load_external_data=False))
    kind = max(found & _LOWEST.keys(), key=lambda kind: _LOWEST[kind], default=None)
    lowest = (0, 0) if kind is None else _LOWEST[kind]
    for gpu in options.gpus:
        if kind is not None and gpu < lowest:
            raise InputError(
                f"gpu {capability_text(gpu)}: the model computes in "
                f"{TensorProto.DataType.Name(kind).lower()}, which TensorRT-RTX has from "
                f"{capability_text(lowest)} on. Leave this GPU out, or use another precision"
            )
    able = tuple(gpu for gpu in PORTABLE if gpu >= lowest)
    return options.gpus or (() if able == PORTABLE else able)


def _types(model: onnx.ModelProto) -> set[int]:
    """The ONNX types of all tensors that a model names, and those that its casts make."""
    found = {tensor.data_type for tensor in tensors_in(model.graph)}
    found |= {value.type.tensor_type.elem_type for value in values_of(model.graph)}
    for node in _nodes(model):
        found |= {a.i for a in node.attribute if a.name in _TYPE_ATTRIBUTES}
        found |= {a.t.data_type for a in node.attribute if a.HasField("t")}
    return found


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from nodes_of(model.graph)
    for function in model.functions:
        yield from function.node
