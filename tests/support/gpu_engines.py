"""Small engines for the tests on a GPU, built in this process and packed as artifacts.

Also arrays on the GPU that do not belong to an engine. Neither needs torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.artifact.artifact import finish
from pipeline.artifact.manifest import (
    BuildInfo,
    Manifest,
    ModelInfo,
    TargetInfo,
    Weights,
    now,
)
from pipeline.build.settings import BuildOptions, configure
from pipeline.machine.gpu import capability_text, find_gpu
from pipeline.machine.target import Target, require, use
from pipeline.runtime.engine import Engine
from pipeline.spec.dims import Dim, Size, read_size
from pipeline.spec.file_names import MODEL, PLAN
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Input, Output

ROOT = Path(__file__).resolve().parents[2]
Built = Callable[[str], Path]  # the fixtures of conftest.py
Loaded = Callable[..., Engine]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
_ELEMENTS = {FLOAT: "float32", INT64: "int64", BOOL: "bool"}
Tensors = Mapping[str, tuple[int, tuple[int | str, ...]]]  # name -> ONNX dtype, shape


@dataclass(frozen=True)
class Net:
    """A model for a test.

    Args:
        nodes, constants: The nodes and constants of the graph.
        dims: The min, opt and max of each dim, by name.
        profiles: The ranges of each profile, by name. By default one profile over the dims' ranges.
        values: The min, opt and max of inputs that TensorRT reads on the host.
        low, high: The range of the inputs' values.
    """

    nodes: Sequence[onnx.NodeProto]
    inputs: Tensors
    outputs: Tensors
    dims: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, tuple[int, int, int]]] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    values: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    low: float = 0.0
    high: float = 2.0

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            list(self.nodes),
            "net",
            [helper.make_tensor_value_info(n, t, s) for n, (t, s) in self.inputs.items()],
            [helper.make_tensor_value_info(n, t, s) for n, (t, s) in self.outputs.items()],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        onnx.checker.check_model(model)
        return model


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node. Blanks separate names, and ``-`` is an omitted input."""
    names = [name.replace("-", "") for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attributes)


def declared(net: Net, dims: Mapping[str, Dim], profiles: Sequence[Profile]) -> Interface:
    """The net's inputs and outputs in a manifest."""

    def sizes(shape: tuple[int | str, ...]) -> tuple[Size, ...]:
        return tuple(read_size(size, dims) for size in shape)

    return Interface(
        tuple(
            Input(name, sizes(shape), _ELEMENTS[kind], net.low, net.high)
            for name, (kind, shape) in net.inputs.items()
        ),
        tuple(
            Output(name, sizes(shape), dtype=_ELEMENTS[kind])
            for name, (kind, shape) in net.outputs.items()
        ),
        rules=net.rules,
        profiles=tuple(profiles),
    )


def pack(net: Net, folder: Path, target: Target) -> Path:
    """Builds the net's engine, and writes an artifact without a comparison."""
    folder.mkdir(parents=True)
    trt, model = use(target), net.model()
    onnx.save(model, folder / MODEL)
    dims = {name: Dim(name, *sizes) for name, sizes in net.dims.items()}
    chosen = net.profiles or {"default": net.dims}
    profiles = [Profile(name, ranges).resolve(dims) for name, ranges in chosen.items()]
    plan = _build(trt, model, net, dims, profiles, target)
    (folder / PLAN).write_bytes(plan)
    gpu = find_gpu()
    assert not isinstance(gpu, str)
    capabilities = (capability_text(gpu.capability),)
    finish(
        folder,
        Manifest(
            name=folder.name,
            created=now(),
            model=ModelInfo("test", {}, Weights(None, None, None), {}),
            interface=declared(net, dims, profiles),
            target=TargetInfo(target.name, target.flavour, require(target), capabilities),
            precision="fp32",
            build=BuildInfo(0.0, len(plan), "", 0, ()),
        ),
    )
    return folder


def _build(
    trt: Any,
    model: onnx.ModelProto,
    net: Net,
    dims: Mapping[str, Dim],
    profiles: Sequence[Profile],
    target: Target,
) -> bytes:
    from pipeline.runtime.bindings import Log

    logger = Log.of(trt).logger  # TensorRT keeps the first logger of a process
    builder = trt.Builder(logger)
    network = builder.create_network(1)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model.SerializeToString())
    assert parsed, [str(parser.get_error(n)) for n in range(parser.num_errors)]
    interface = declared(net, dims, profiles)
    if net.values:
        config = builder.create_builder_config()
        profile = builder.create_optimization_profile()
        for name, shapes in profiles[0].shapes(interface.input_shapes).items():
            if name in net.values:
                profile.set_shape_input(name, *net.values[name])
            else:
                profile.set_shape(name, *shapes)
        assert config.add_optimization_profile(profile) == 0
    else:
        config = configure(trt, builder, network, interface, BuildOptions(target))
    data = builder.build_serialized_network(network, config)
    assert data is not None, "no engine came out"
    return bytes(memoryview(data))


def picture(h: int, w: int, seed: int = 0) -> np.ndarray:
    """The inputs of `nets.PICTURE`."""
    return np.random.default_rng(seed).uniform(-1, 1, (1, 3, h, w)).astype(np.float32)


def sizes(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Heights and widths for it, in no order."""
    rng = np.random.default_rng(seed)
    return [(int(h), int(w)) for h, w in rng.integers(4, 97, (count, 2))]


References = Callable[[str], "Reference"]


class Reference:
    """ONNX Runtime on the CPU, with the model that the engine was built from."""

    def __init__(self, artifact: Path) -> None:
        import onnxruntime

        onnxruntime.set_default_logger_severity(3)
        self._session = onnxruntime.InferenceSession(
            str(artifact / MODEL), providers=["CPUExecutionProvider"]
        )
        self._names = [output.name for output in self._session.get_outputs()]

    def __call__(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self._names, self._session.run(self._names, inputs), strict=True))


def same(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """Checks names, shapes, dtypes, and values within float32 rounding of some hundred terms."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert got[name].dtype == value.dtype, name
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def hosted(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Outputs on the GPU, as numpy arrays."""
    return {name: array.numpy() for name, array in outputs.items()}


_STREAMS: list[Any] = []


def streams() -> list[Any]:
    """Two streams of the caller: one by its handle, and one of cuda.core."""
    if not _STREAMS:
        from cuda.core import Device

        device = Device(0)
        device.set_current()
        _STREAMS.extend(device.create_stream() for _ in range(2))
    return [int(_STREAMS[0].handle), _STREAMS[1]]


def handles() -> tuple[int, int]:
    """The handles of both streams."""
    streams()
    return int(_STREAMS[0].handle), int(_STREAMS[1].handle)


class OnGpu:
    """An array in GPU memory with ``__cuda_array_interface__``.

    Args:
        value: The values.
        stream: A handle. The copy is enqueued on this stream, after `busy`, and the consumer gets
            the stream. Without it, the array is ready when this returns.
    """

    def __init__(self, value: np.ndarray, stream: int | None = None, **more: Any) -> None:
        from pipeline.runtime import cuda as _cuda

        self.value = np.ascontiguousarray(value)
        self._free: Callable[[int], None] = _cuda.free
        self.ptr = _cuda.allocate(max(value.nbytes, 512))
        assert self.ptr, "no GPU memory for a test's array"
        if value.nbytes:
            _cuda.to_device(self.ptr, self.value.ctypes.data, value.nbytes, stream or 0)
        if stream is None:
            _cuda.synchronise()
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": value.shape,
            "typestr": value.dtype.str,
            "data": (self.ptr, False),
            "strides": None,
            "stream": stream,
            **more,
        }

    def numpy(self) -> np.ndarray:
        """The values, after all work of the GPU is done."""
        from pipeline.runtime import cuda as _cuda

        _cuda.synchronise()
        result = np.empty_like(self.value)
        _cuda.to_host(result.ctypes.data, self.ptr, result.nbytes, 0)
        _cuda.synchronise()
        return result

    def __del__(self) -> None:
        self._free(self.ptr)


class ByDlpack:
    """The same with DLPack. It records the stream that the consumer asks for."""

    def __init__(self, value: np.ndarray, stream: int | None = None) -> None:
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        self._inner, self._stream = OnGpu(value, stream), stream
        self.ptr, self.numpy = self._inner.ptr, self._inner.numpy
        buffer = Buffer.from_handle(self.ptr, max(value.nbytes, 512), owner=self._inner)
        self._view = StridedMemoryView.from_buffer(buffer, value.shape, dtype=value.dtype)
        self.asked: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None, **how: Any) -> Any:
        from pipeline.runtime import cuda as _cuda

        self.asked.append(stream)
        if self._stream is not None and stream not in (None, -1):
            events = _cuda.Events()
            events.take(self._stream).wait(stream)
            events.close()
        return self._view.__dlpack__(max_version=how.get("max_version"))


def in_a_process(code: str, *arguments: object) -> str:
    """The output of a child process, for cases in which TensorRT may crash or hang."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    line = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Busy:
    """Keeps a stream busy for some milliseconds: it fills memory repeatedly."""

    def __init__(self, nbytes: int = 1 << 30) -> None:
        from pipeline.runtime import cuda as _cuda

        self._cuda, self._nbytes = _cuda, nbytes
        self._ptr = _cuda.allocate(nbytes)
        assert self._ptr

    def __call__(self, stream: int, times: int = 40) -> None:
        for n in range(times):
            self._cuda.fill(self._ptr, n, self._nbytes, stream)

    def close(self) -> None:
        self._cuda.synchronise()
        self._cuda.free(self._ptr)
