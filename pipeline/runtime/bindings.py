"""The one place that knows how TensorRT 8.6, 10, 11 and RTX differ when they run an engine.

| | 8.6 | 10, 11, RTX |
|---|---|---|
| a context's activation memory | the most of all profiles | what the sizes of the call need |
| contexts of one profile | one, unless built with PROFILE_SHARING_0806 | any number |
| output allocator | `reallocate_output` | `reallocate_output_async` too |
| int64 | read and written as int32 | there |

Tried on 8.6.0; what stands here of 10 and 11 is from their documentation, RTX's from its Python
module (its engines run on no GPU that was at hand).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, EngineError, OutOfMemory
from pipeline.runtime.arrays import Port

_DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
    "BOOL": "bool", "UINT8": "uint8",
}  # fmt: skip
# what the model says, and what a TensorRT that lacks it computes in its place
_NARROWED = {
    (np.dtype(np.int64), np.dtype(np.int32)),
    (np.dtype(np.float64), np.dtype(np.float32)),
}
_FULL = ("out of memory", "outofmemory", "could not be allocated", "memory allocation failure")
_LOGS: dict[str, Log] = {}


class _Lines(threading.local):
    """What TensorRT said in this thread, since it was last cleared there; the last lines of it."""

    def __init__(self) -> None:
        self.said: deque[str] = deque(maxlen=30)


class Log:
    """TensorRT's complaints, by thread. There is one logger a process and flavour: TensorRT keeps
    the first that it is given, whatever comes later.

    TensorRT calls the logger in the thread whose call it complains about, so that an error is told
    in the words of its own thread's calls. What threads say that Python did not start, perhaps
    TensorRT's own, goes with the first error that has no words of its own.

    Attributes:
        spoke: TensorRT has complained at all; as long as it has not, nothing needs clearing.
    """

    def __init__(self, trt: Any) -> None:
        self._own = own = _Lines()
        self._strays: deque[str] = deque(maxlen=30)
        self.spoke = False
        whole, strays, worst = self, self._strays, (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity not in worst:
                    return
                whole.spoke = True
                own.said.append(message)
                if threading.get_ident() not in [thread.ident for thread in threading.enumerate()]:
                    strays.append(message)

        self.logger = Logger()

    @staticmethod
    def of(trt: Any) -> Log:
        """The log of this TensorRT."""
        if trt.__name__ not in _LOGS:
            _LOGS[trt.__name__] = Log(trt)
        return _LOGS[trt.__name__]

    def clear(self) -> None:
        """Forgets what came before in this thread; nothing that another thread's call said."""
        self._own.said.clear()
        self._strays.clear()

    def error(self, what: str) -> EngineError:
        """The error for something that failed in this thread, with TensorRT's own words."""
        said = list(self._own.said) or list(self._strays)
        self.clear()
        first = " ".join(said[0].split()) if said else "it does not say why"
        detail = "\n".join(said)
        if any(word in detail.lower() for word in _FULL):
            return _detailed(OutOfMemory(f"{what}: out of GPU memory: {first}"), detail)
        return _detailed(EngineError(f"{what}: TensorRT says: {first}"), detail)


def _detailed(error: EngineError, detail: str) -> EngineError:
    error.detail = detail
    return error


@dataclass
class Plan:
    """A deserialised engine, and what keeps it alive.

    Args:
        inputs, outputs: in TensorRT's order.
        weights: bytes on the GPU; the plan's own size where TensorRT can't tell (8.6).
        by_data: outputs whose shape was seen to depend on data.
        activation: the most bytes that a run of any size needs beside its inputs and outputs.
    """

    trt: Any
    log: Log
    runtime: Any
    engine: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: int
    by_data: set[str] = field(default_factory=set)

    @property
    def activation(self) -> int:
        newer = hasattr(self.engine, "device_memory_size_v2")
        return int(self.engine.device_memory_size_v2 if newer else self.engine.device_memory_size)


def deserialise(trt: Any, plan: bytes, manifest: Manifest, where: str, host_code: bool) -> Plan:
    """Makes an engine of a plan's bytes.

    Args:
        where: the artifact, for the errors.
        host_code: whether code for the CPU in the plan may be run.

    Raises:
        ArtifactError: TensorRT does not take the plan, or its inputs and outputs are not the
            manifest's.
        OutOfMemory: the weights do not fit.
        EngineError: a dtype that numpy does not have.
    """
    log = Log.of(trt)
    log.clear()
    runtime = trt.Runtime(log.logger)
    if hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = host_code
    engine = runtime.deserialize_cuda_engine(plan) if plan else None
    if engine is None:
        error = log.error(f"{where}: its plan does not load")
        if isinstance(error, OutOfMemory):
            raise error
        raise ArtifactError(f"{error}; run `pipeline build {where}` here", detail=error.detail)
    inputs, outputs = _ports(trt, engine, manifest, where)
    profiles = len(manifest.interface.profiles)
    if engine.num_optimization_profiles != max(profiles, 1):
        raise ArtifactError(
            f"{where}: its plan has {engine.num_optimization_profiles} profiles, its manifest "
            f"{profiles}: they do not belong together; run `pipeline build {where}`"
        )
    weights = len(plan)
    if hasattr(engine, "get_engine_stat"):
        weights = int(engine.get_engine_stat(trt.EngineStat.TOTAL_WEIGHTS_SIZE))
    return Plan(trt, log, runtime, engine, inputs, outputs, weights)


def _ports(
    trt: Any, engine: Any, manifest: Manifest, where: str
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """The engine's inputs and outputs, held against the manifest's."""
    interface = manifest.interface
    declared = {t.name: t.dtype for t in interface.tensors}
    inputs: list[Port] = []
    outputs: list[Port] = []
    for place in range(engine.num_io_tensors):
        name = engine.get_tensor_name(place)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise EngineError(f"{where}: {name} is {kind}, which numpy does not have")
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        if on_host and not is_input:
            raise EngineError(
                f"{where}: TensorRT computes {name} on the host, which can't be had here"
            )
        dtype = np.dtype(_DTYPES[kind])
        port = Port(name, dtype, np.dtype(declared.get(name) or dtype), on_host)
        if port.declared != dtype and (port.declared, dtype) not in _NARROWED:
            raise ArtifactError(
                f"{where}: its plan has {name} in {dtype}, its manifest in {port.declared}: they "
                f"do not belong together; run `pipeline build {where}`"
            )
        (inputs if is_input else outputs).append(port)
    for word, ports, names in (
        ("inputs", inputs, [t.name for t in interface.inputs]),
        ("outputs", outputs, [t.name for t in interface.outputs]),
    ):
        has, says = sorted(p.name for p in ports), sorted(names)
        if has != says:
            raise ArtifactError(
                f"{where}: its plan has the {word} {', '.join(has)}, its manifest {', '.join(says)}"
                f": they do not belong together; run `pipeline build {where}`"
            )
    return tuple(inputs), tuple(outputs)


class Context:
    """An execution context, bound to one profile, without activation memory of its own.

    Args:
        stream: handle; the profile is chosen on it. It has to be waited for before the first run.

    Attributes:
        ready: what it is set to run, as its user calls it; None where that has to be set anew.
        sized: how much activation memory it needs goes by the sizes, which have to be set before
            it is given; otherwise it is given once.
        generation: of the activation memory that it was given, as its user counts.
        addresses: of tensors, as they are set.

    Raises:
        EngineError: TensorRT refuses. `OutOfMemory` where that is why.
    """

    def __init__(self, plan: Plan, profile: int, stream: int) -> None:
        self._plan, trt, engine = plan, plan.trt, plan.engine
        plan.log.clear()
        what = f"an execution context for profile {profile}"
        self.sized = False
        if hasattr(trt, "ExecutionContextAllocationStrategy"):
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = engine.create_execution_context(strategy)
            self.sized = hasattr(context, "update_device_memory_size_for_shapes")
        else:
            context = engine.create_execution_context_without_device_memory()
        if context is None:
            raise plan.log.error(what)
        self._context, self._profile = context, profile
        self.ready: object = None
        self.generation = -1
        self.addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self.execute: Callable[[int], bool] = context.execute_async_v3
        if context.active_optimization_profile != profile and not (
            context.set_optimization_profile_async(profile, stream)
        ):
            raise plan.log.error(what)

    def set_shapes(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """The inputs' shapes; what the context was set to before is gone."""
        self.ready = None
        for name, shape in shapes:
            if not self._context.set_input_shape(name, shape):
                raise self._plan.log.error(f"setting {name} to {list(shape)}")

    def output_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Every output's shape at the inputs' shapes; None where it depends on data.

        8.6 says so of a fresh context only: after a run it gives that run's shape. So what was seen
        to depend on data once is remembered.
        """
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise self._plan.log.error(f"inferring shapes: {error}") from error
        if missing:
            raise self._plan.log.error(f"inferring shapes: {', '.join(missing)} not set")
        found: dict[str, tuple[int, ...] | None] = {}
        for port in self._plan.outputs:
            shape = tuple(self._context.get_tensor_shape(port.name))
            if any(size < 0 for size in shape):
                self._plan.by_data.add(port.name)
            found[port.name] = None if port.name in self._plan.by_data else shape
        return found

    def activation_bytes(self) -> int:
        """What a run at the inputs' shapes needs."""
        if self.sized:
            return int(self._context.update_device_memory_size_for_shapes())
        return self._plan.activation

    def set_activation(self, pointer: int, nbytes: int) -> None:
        """Gives it the memory to compute in."""
        if hasattr(self._context, "set_device_memory"):
            self._context.set_device_memory(pointer, nbytes)
        else:
            self._context.device_memory = pointer

    def set_address(self, name: str, pointer: int) -> None:
        """Where a tensor is; on the GPU, or on the host for a port that is `on_host`."""
        if not self._context.set_tensor_address(name, pointer):
            raise self._plan.log.error(f"setting the address of {name}")
        self.addresses[name] = pointer

    def allocator(self, name: str) -> Any:
        """The output's allocator, made and set once; see `_allocator_class`."""
        if name not in self._allocators:
            allocator = _allocator_class(self._plan.trt)()
            if not self._context.set_output_allocator(name, allocator):
                raise self._plan.log.error(f"setting the allocator of {name}")
            self._allocators[name] = allocator
        return self._allocators[name]

    def error(self) -> EngineError:
        """Why `execute` gave False."""
        return self._plan.log.error("running the engine")


def _allocator_class(trt: Any) -> Any:
    """An IOutputAllocator that asks `give(bytes)` for an address, and keeps the shape.

    `lease` is its user's. 8.6 also asks between runs, when sizes are set, for as much as the run
    before took, and fails the next run if it gets nothing: `idle` gives that, a lease, which is
    kept in `spare`. TensorRT prints and swallows what a callback raises, so that `error` keeps it.
    """

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.idle: Callable[[int], Any] | None = None
            self.spare: Any = None
            self.prepare(None)

        def prepare(self, give: Callable[[int], int] | None) -> None:
            self.give = give
            self.lease: Any = None
            self.shape: tuple[int, ...] | None = None
            self.error: EngineError | None = None

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            del name, memory, alignment  # every block is aligned to 512 bytes
            try:
                if self.give is not None:
                    return self.give(size)
                if self.idle is None:
                    return 0
                self.spare = None  # goes back first, to be given again
                self.spare = self.idle(size)
                return int(self.spare.pointer)
            except EngineError as error:
                self.error = error.with_traceback(None)  # which would hold this very object
                return 0

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            del stream  # the one that the call is on
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:
            del name
            self.shape = tuple(shape)

    return Allocator
