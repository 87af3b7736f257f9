"""A pretended TensorRT, which runs the real `pipeline.runtime.engine.Engine` on a pretended GPU.

Its only network has the inputs x of shape (b, w), z of shape (w,), and a number k. k is read on the
host, and is 1 if it is not an input. All tensors are float32. The network computes::

    y = 3 k x - z         (b, w)
    s = 3 k x, by rows    (b,)
    p = all x above 0     (n,), a shape that depends on data

It does so in three operations that use the activation memory, so that a run in between gives wrong
numbers. It checks the profile, and the size of the activation memory.

It does not model an output allocator that 8.6 calls between runs. It also does not model networks
and contexts that can't be captured, and a logger with the reason of a failure.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import ARENA, PretendedCuda

from pipeline.artifact import manifest
from pipeline.runtime import bindings as _trt
from pipeline.runtime import cuda as _cuda
from pipeline.runtime import cuda_graph as _cuda_graph
from pipeline.runtime import outputs as _engine_out
from pipeline.runtime.arrays import View
from pipeline.runtime.device_array import DeviceArray
from pipeline.runtime.engine import Engine
from pipeline.runtime.sizes import EngineSizes
from pipeline.runtime.state import EngineState
from pipeline.spec.dims import Dim, Size, read_size
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Input, Output

B, W = (0, 2, 8), (0, 8, 64)  # min, opt, max
PROFILES = (W, (0, 3, 16))  # of w
_ACTIVATION = 4 * B[2] * W[2]
_INPUT, _OUTPUT = 0, 1
_DEVICE, _HOST = 0, 1


def memory(pointer: int, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 numbers at an address; not a copy."""
    count = int(np.prod(shape))
    block = (ctypes.c_float * count).from_address(pointer)
    return np.ctypeslib.as_array(block).reshape(shape)


class CallersArray:
    """An array of the caller on the pretended GPU (``__cuda_array_interface__``).

    Its values are there when it is made. Its memory is used again as soon as it is dropped.
    """

    def __init__(self, cuda: PretendedCuda, values: np.ndarray) -> None:
        self.cuda, self.shape = cuda, values.shape
        self.ptr = cuda.take(values.nbytes)
        ctypes.memmove(self.ptr, values.tobytes(), values.nbytes)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (self.ptr, False),
            "strides": None,
        }

    def numpy(self) -> np.ndarray:
        """The current values. It waits for nothing."""
        return memory(self.ptr, self.shape).copy()

    def __del__(self) -> None:
        self.cuda.let_go(self.ptr)


class Installer:
    """Replaces CUDA by a pretended GPU. Each call installs a fresh one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.cuda: PretendedCuda | None = None
        view_of = _engine_out.view_of

        def without_driver(port: Any, value: Any, known: Any, stream: int) -> View:
            """The part of `DeviceArray.__dlpack__` that is not cuda.core's, which needs a GPU."""
            if type(value) is not DeviceArray:
                return view_of(port, value, known, stream)
            value.ready_for(stream)
            return View(value.ptr, value.shape, False, value)

        patch.setattr(_engine_out, "view_of", without_driver)

    def __call__(self, seed: int, **options: Any) -> PretendedCuda:
        self.end()
        cuda = self.cuda = PretendedCuda(seed, **options)
        self._patch.setattr(_cuda, "rt", cuda)
        self._patch.setattr(_cuda_graph, "rt", cuda)
        self._patch.setattr(_cuda, "gpu_of", lambda at: 0 if 0 <= at - cuda.start < ARENA else -1)
        self._patch.setattr(_cuda, "_TURNS", {})
        self._patch.setattr(_trt, "_LOGS", {})
        return cuda

    def end(self) -> None:
        """Collects all objects that use the GPU and that nothing else can free.

        Raises:
            AssertionError: An engine has not freed something.
        """
        if self.cuda is not None:
            error: BaseException | None = getattr(sys, "last_value", None)
            while error is not None:  # the frames of a failed test still have engines
                traceback.clear_frames(error.__traceback__)
                for frame, _ in traceback.walk_tb(error.__traceback__):
                    _ = frame.f_locals  # pytest keeps its last result until it reads again
                error = error.__context__
            _cuda._TURNS.clear()
            gc.collect()
            left, self.cuda = self.cuda.left(), None
            assert not any(left.values()), f"engines have left: {left}"


Pretend = Callable[..., PretendedCuda]  # an Installer


class Nothing:
    """A base class of the module, only for subclasses."""

    ERROR, INTERNAL_ERROR = 1, 0


class Context:
    """An execution context of 8.6."""

    def __init__(self, cuda: PretendedCuda, tensors: Mapping[str, int]) -> None:
        self.cuda, self.tensors = cuda, tensors
        self.active_optimization_profile = 0
        self.device_memory = 0
        self.room = _ACTIVATION
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}

    def set_optimization_profile_async(self, profile: int, _: int) -> bool:
        self.active_optimization_profile = profile
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if self.cuda.fails():
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        if self.cuda.fails():
            return False
        self.addresses[name] = pointer
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        x = self.shapes["x"]
        return {"y": x, "s": x[:1], "p": (-1,)}[name]

    def execute_async_v3(self, stream: int) -> bool:
        """Enqueues a run. A failed run may have written the activation memory."""
        cuda, middle = self.cuda, self.device_memory
        shape = b, w = self.shapes["x"]
        need = 4 * b * w
        if cuda.fails():
            if need and cuda.random.random() < 0.5:
                cuda.enqueue(lambda: ctypes.memset(middle, 0x55, need), stream)
            return False
        assert self.room >= need, "less activation memory than the run needs"
        low, _, high = PROFILES[self.active_optimization_profile]
        assert low <= w <= high, "another profile than the sizes are in"
        x, z, y, s = (self.addresses[name] for name in "xzys")
        k = float(memory(self.addresses["k"], ())) if "k" in self.tensors else 1.0

        def scale() -> None:
            memory(middle, shape)[:] = memory(x, shape) * np.float32(3 * k)

        def subtract() -> None:
            memory(y, shape)[:] = memory(middle, shape) - memory(z, (w,))

        def add_up() -> None:
            memory(s, (b,))[:] = memory(middle, shape).sum(1)

        for work in (scale, subtract, add_up):
            cuda.enqueue(work, stream)
        return "p" not in self.tensors or self._by_data(memory(x, shape), stream)

    def _by_data(self, x: np.ndarray, stream: int) -> bool:
        self.cuda.cudaStreamSynchronize(stream)
        above, allocator = x[x > 0], self.allocators["p"]
        pointer = allocator.reallocate_output("p", 0, max(above.nbytes, 1), 256)
        if not pointer:
            return False
        allocator.notify_shape("p", above.shape)
        data = above.tobytes()
        self.cuda.enqueue(lambda: ctypes.memmove(pointer, data, len(data)), stream)
        return True


class NewerContext(Context):
    """A context of 10 and later: its activation memory depends on the sizes."""

    def update_device_memory_size_for_shapes(self) -> int:
        b, w = self.shapes["x"]
        return 4 * b * w

    def set_device_memory(self, pointer: int, nbytes: int) -> None:
        self.device_memory, self.room = pointer, nbytes


class PretendedPlan:
    """A deserialised engine."""

    num_optimization_profiles = len(PROFILES)
    device_memory_size = device_memory_size_v2 = _ACTIVATION

    def __init__(self, cuda: PretendedCuda, tensors: Mapping[str, int]) -> None:
        self.cuda, self.tensors = cuda, tensors
        self.num_io_tensors = len(tensors)

    def get_tensor_name(self, place: int) -> str:
        return list(self.tensors)[place]

    def get_tensor_mode(self, name: str) -> int:
        return self.tensors[name]

    def get_tensor_dtype(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(name="FLOAT")

    def get_tensor_location(self, name: str) -> int:
        return _HOST if name == "k" else _DEVICE

    def create_execution_context(self, _: Any) -> Context:
        return NewerContext(self.cuda, self.tensors)

    def create_execution_context_without_device_memory(self) -> Context:
        return Context(self.cuda, self.tensors)


def tensorrt(cuda: PretendedCuda, tensors: Mapping[str, int], *, newer: bool) -> SimpleNamespace:
    """The module.

    Args:
        tensors: The inputs and outputs by name, with their modes.
        newer: True for 10 and later, False for 8.6.
    """
    plan = PretendedPlan(cuda, tensors)
    module = SimpleNamespace(
        __name__="pretended_tensorrt",
        ILogger=Nothing,
        IOutputAllocator=Nothing,
        TensorIOMode=SimpleNamespace(INPUT=_INPUT, OUTPUT=_OUTPUT),
        TensorLocation=SimpleNamespace(DEVICE=_DEVICE, HOST=_HOST),
        Runtime=lambda _: SimpleNamespace(deserialize_cuda_engine=lambda _: plan),
    )
    if newer:
        module.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=1)
    return module


def make_engine(
    cuda: PretendedCuda,
    *,
    newer: bool = True,
    by_data: bool = False,
    on_host: bool = False,
    graphs: int = 3,
    dtype: str = "float32",
) -> Engine:
    """An engine of the network, as `pipeline.load` makes it.

    Args:
        newer: True for TensorRT 10 and later, False for 8.6.
        by_data: True to have the output p.
        on_host: True to have the input k.
        graphs: The number of graphs that are kept.
        dtype: The dtype of y in the manifest. In the plan, y is float32.

    Raises:
        ArtifactError: The dtype differs from the plan.
    """
    inputs = {"x": ("b", "w"), "z": ("w",), **({"k": ()} if on_host else {})}
    outputs = {"y": ("b", "w"), "s": ("b",), **({"p": ("n",)} if by_data else {})}
    dims = {"b": Dim("b", *B), "w": Dim("w", *W)}

    def sizes(shape: tuple[str, ...]) -> tuple[Size, ...]:
        return tuple(read_size(size, dims) for size in shape)

    declared = Interface(
        tuple(Input(name, sizes(shape)) for name, shape in inputs.items()),
        tuple(
            Output(name, sizes(shape), dtype=dtype if name == "y" else "float32")
            for name, shape in outputs.items()
        ),
        profiles=tuple(Profile(f"p{place}", {"b": B, "w": w}) for place, w in enumerate(PROFILES)),
    )
    weights = manifest.Weights(None, None, 0)
    made = manifest.Manifest(
        name="m",
        created="",
        model=manifest.ModelInfo("m", {}, weights, {}),
        interface=declared,
        target=manifest.TargetInfo("tensorrt-10", "tensorrt", "10", None),
        precision="fp32",
    )
    tensors = {**dict.fromkeys(inputs, _INPUT), **dict.fromkeys(outputs, _OUTPUT)}
    device = _cuda.Device(0)
    module = tensorrt(cuda, tensors, newer=newer)
    plan = _trt.deserialise(module, b"plan", made, "m", host_code=False)
    return Engine(made, EngineState(plan, EngineSizes(declared), device, graphs))


def expected(x: np.ndarray, z: np.ndarray, k: float = 1.0) -> dict[str, np.ndarray]:
    """The right outputs of the network. k must be a power of two."""
    middle = x * np.float32(3 * k)
    return {"y": middle - z, "s": middle.sum(1), "p": x[x > 0]}


class WrongNumbers(AssertionError):
    """The GPU did work in an order that was not prevented."""


def right(got: np.ndarray, want: np.ndarray, what: str) -> None:
    if got.shape != want.shape or not np.allclose(got, want, rtol=1e-5, atol=1e-5):
        raise WrongNumbers(f"{what}: {got}, expected {want}")
