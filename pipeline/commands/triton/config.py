"""Makes the ``config.pbtxt`` of a Triton model, and the data of its warm-up requests.

The fields are those of Triton's own protobuf, which tritonclient brings:
https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.artifact.manifest import Manifest
from pipeline.commands.triton.batching import Batching
from pipeline.errors import InputError, first_line
from pipeline.graph.session import open_session
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import near_rules, sizes_to_time
from pipeline.spec.tensors import Input, Output

Backend = Literal["tensorrt", "onnxruntime"]
TYPES: Mapping[str, str] = {
    "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32",
    "int64": "TYPE_INT64", "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64",
}  # fmt: skip
EXTRA = "needs tritonclient, which is not installed: pip install 'trt-pipeline[triton]'"


@dataclass(frozen=True)
class Served:
    """How an artifact is served.

    Args:
        name: The model's name on the server.
        backend: Triton's backend.
        batching: The batches that Triton forms.
        shapes: The shape of each input and output that the backend sees, with -1 for dims.
        narrowed: The dtypes of the model that the backend lacks, and those in their place.
    """

    name: str
    backend: Backend
    batching: Batching
    shapes: Mapping[str, Sequence[int]]
    narrowed: Mapping[str, str] = field(default_factory=dict)

    def dtype(self, tensor: Input | Output) -> str:
        """The numpy dtype name of an input or output on the server."""
        name = np.dtype(tensor.dtype or "float32").name
        return self.narrowed.get(name, name)

    def dims(self, shape: Sequence[int]) -> list[int]:
        """A shape without its batch axis. Triton wants one number at least."""
        return list(shape[1:] if self.batching.largest else shape) or [1]


@dataclass(frozen=True)
class Config:
    """A model's configuration.

    Args:
        text: The content of ``config.pbtxt``.
        files: The raw inputs of warm-up requests, by file name.
        warm_up: The labels of the warm-up requests.
    """

    text: str
    files: Mapping[str, bytes]
    warm_up: tuple[str, ...]


def narrowed_dtypes(manifest: Manifest, backend: Backend) -> dict[str, str]:
    """The dtypes that the backend lacks: TensorRT has no float64, and no int64 before 10."""
    if backend == "onnxruntime":
        return {}
    first = int((re.findall(r"\d+", manifest.target.version or "") or [0])[0])
    return {"float64": "float32", **({"int64": "int32"} if first < 10 else {})}


def engine_shapes(interface: Interface) -> dict[str, list[int]]:
    """The shape of each input and output of an engine, with -1 for dims."""
    return {
        tensor.name: [size if isinstance(size, int) else -1 for size in tensor.shape or ()]
        for tensor in interface.tensors
    }


def onnx_shapes(model: Path) -> dict[str, list[int]]:
    """The shape of each input and output of a model in ONNX Runtime, with -1 for dims.

    Triton's backend wants the shapes of outputs exactly as ONNX Runtime reports them.

    Raises:
        InputError: ONNX Runtime refuses the model.
    """
    try:
        session = open_session(model)
    except MemoryError:
        raise
    except Exception as error:  # ONNX Runtime's errors have no common base
        raise InputError(
            f"{model}: ONNX Runtime refuses it: {first_line(error)}. Serve an engine, or convert "
            "without plugins"
        ) from error
    return {
        tensor.name: [size if isinstance(size, int) else -1 for size in tensor.shape]
        for tensor in (*session.get_inputs(), *session.get_outputs())
    }


def make_config(manifest: Manifest, served: Served) -> Config:
    """Makes the configuration of a model.

    Raises:
        InputError: tritonclient is not installed. Or Triton can't serve a scalar of an engine.
    """
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise InputError(f"triton {EXTRA}") from error
    interface = manifest.interface
    config = model_config_pb2.ModelConfig(
        name=served.name, backend=served.backend, max_batch_size=served.batching.largest
    )
    for tensors, into in ((interface.inputs, config.input), (interface.outputs, config.output)):
        for tensor in tensors:
            _describe(tensor, served, into.add())
    if served.batching.largest:
        config.dynamic_batching.preferred_batch_size.extend(served.batching.preferred)
    if served.backend == "tensorrt":
        # One group for all profiles. A group of one profile would get requests of any size, and
        # refuse those of the other profiles.
        count = max(len(interface.profiles), 1)
        kind = model_config_pb2.ModelInstanceGroup.KIND_GPU
        config.instance_group.add(kind=kind, profile=map(str, range(count)))
        _add_graphs(config, interface, served)
    files, labels = _add_warm_up(config, interface, served)
    return Config(text_format.MessageToString(config), files, labels)


def _describe(tensor: Input | Output, served: Served, into: Any) -> None:
    shape = served.shapes[tensor.name]
    if not shape and served.backend == "tensorrt":
        raise InputError(
            f"{tensor.name} is a scalar, which Triton's TensorRT backend does not serve. Pass "
            "--backend onnxruntime, or give it an axis"
        )
    into.name = tensor.name
    into.data_type = _data_type(served.dtype(tensor))
    into.dims.extend(served.dims(shape))
    if served.batching.largest and len(shape) == 1:
        into.reshape.SetInParent()  # an empty shape: one number of each request


def _data_type(dtype: str) -> int:
    from tritonclient.grpc import model_config_pb2

    return int(model_config_pb2.DataType.Value(TYPES[dtype]))


def _add_graphs(config: Any, interface: Interface, served: Served) -> None:
    """Adds a CUDA graph at the opt of each profile.

    A shape without axes can't be written, and a graph of an empty tensor was never tried: such
    graphs are left out.
    """
    seen = set()
    for profile in interface.profiles:
        rules = near_rules(profile.sizes(1), interface.dims, profile, interface.rules)
        for _, sizes in rules:
            at = served.batching.sizes(sizes)
            feed = interface.sample(at, 0)
            shapes = {name: array.shape for name, array in feed.items()}
            ranks = [len(shape) - bool(served.batching.largest) for shape in shapes.values()]
            if min(ranks) < 1 or any(0 in shape for shape in shapes.values()):
                continue
            if tuple(shapes.values()) in seen:
                continue
            seen.add(tuple(shapes.values()))
            spec = config.optimization.cuda.graph_spec.add(
                batch_size=at.get(served.batching.dim, 0)
            )
            for name, shape in shapes.items():
                spec.input[name].dim.extend(served.dims(shape))
    if seen:
        config.optimization.cuda.graphs = True


def _add_warm_up(
    config: Any, interface: Interface, served: Served
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Adds a warm-up request at min, opt and max of each profile.

    A request whose inputs have no element is left out: a failed warm-up stops the model's start.

    Returns:
        The files of raw inputs by name, and the labels of the requests.
    """
    files: dict[str, bytes] = {}
    labels: dict[tuple[tuple[int, ...], ...], str] = {}
    for point in sizes_to_time(interface.dims, interface.profiles, interface.rules):
        sizes = served.batching.sizes(point.sizes)
        feed = interface.sample(sizes, 0)
        shapes = tuple(array.shape for array in feed.values())
        if shapes in labels or any(0 in shape for shape in shapes):
            continue
        labels[shapes] = point.label
        warm_up = config.model_warmup.add(name=point.label)
        warm_up.batch_size = sizes.get(served.batching.dim, 1)
        for number, each in enumerate(interface.inputs):
            # Triton repeats one row for each request of the batch
            array = feed[each.name][:1] if served.batching.largest else feed[each.name]
            into = warm_up.inputs[each.name]
            into.data_type = _data_type(served.dtype(each))
            into.dims.extend(served.dims(array.shape))
            if _takes_zeros(each):
                into.zero_data = True
            else:
                into.input_data_file = f"request{len(labels)}_input{number}.raw"
                files[into.input_data_file] = array.astype(served.dtype(each)).tobytes()
    return files, tuple(labels.values())


def _takes_zeros(each: Input) -> bool:
    """True for floating-point values of a range with 0. Triton's random bytes may be NaN."""
    ends = each.low, each.high
    low, high = (end if isinstance(end, int | float) else np.nan for end in ends)
    return each.values is None and np.dtype(each.dtype).kind == "f" and bool(low <= 0 <= high)
