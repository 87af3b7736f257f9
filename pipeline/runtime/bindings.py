"""The only module that knows how TensorRT 8.6, 10, 11 and RTX differ when they run an engine.

| | 8.6 | 10, 11, RTX |
|---|---|---|
| a context's activation memory | the maximum over all profiles | as the call's sizes need |
| contexts of one profile | one, unless built with PROFILE_SHARING_0806 | any number |
| output allocator | `reallocate_output` | `reallocate_output_async` too |
| int64 | read and written as int32 | supported |

8.6.0 was tested. The facts on 10 and 11 are from their documentation, those on RTX from its Python
module: no GPU that runs its engines was available.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

import numpy as np

from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, EngineError, OutOfMemory
from pipeline.runtime.arrays import Port

_DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
    "BOOL": "bool", "UINT8": "uint8",
}  # fmt: skip
# a dtype of the model, and the one that a TensorRT without it computes in instead
_NARROWED = {
    (np.dtype(np.int64), np.dtype(np.int32)),
    (np.dtype(np.float64), np.dtype(np.float32)),
}
_FULL = ("out of memory", "outofmemory", "could not be allocated", "memory allocation failure")
_LOGS: dict[str, Log] = {}


class _Lines(threading.local):
    """TensorRT's last messages in this thread since the last `Log.clear` there."""

    def __init__(self) -> None:
        self.said: deque[str] = deque(maxlen=30)


class Log:
    """TensorRT's error messages, by thread.

    A process has one logger for each flavour: TensorRT keeps the first logger that it receives and
    ignores later ones.

    TensorRT calls the logger in the thread whose call failed, so each thread's error shows that
    thread's messages. Messages from threads that Python did not start (perhaps TensorRT's own) go
    to the first error without messages.

    Attributes:
        spoke: whether TensorRT has logged any error yet. If not, nothing needs clearing.
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
        """Forgets this thread's messages so far; those of other threads' calls stay."""
        self._own.said.clear()
        self._strays.clear()

    def error(self, what: str) -> EngineError:
        """The error for a failure in this thread, with TensorRT's messages."""
        said = list(self._own.said) or list(self._strays)
        self.clear()
        first = " ".join(said[0].split()) if said else "no reason given"
        detail = "\n".join(said)
        if any(word in detail.lower() for word in _FULL):
            return _detailed(OutOfMemory(f"{what}: out of GPU memory: {first}"), detail)
        return _detailed(EngineError(f"{what}: TensorRT reports: {first}"), detail)


def _detailed(error: EngineError, detail: str) -> EngineError:
    error.detail = detail
    return error


@dataclass
class LoadedPlan:
    """A deserialised engine, and the objects that keep it alive.

    Args:
        inputs, outputs: the ports, in TensorRT's order.
        weights: bytes of weights on the GPU; the plan's size if TensorRT doesn't report it (8.6).
        by_data: outputs whose shape has proved to depend on data.
        config: TensorRT-RTX's settings of a run (`pipeline.runtime.rtx`); None for its defaults.
        activation: the most bytes that a run of any size needs besides its inputs and outputs.
    """

    trt: Any
    log: Log
    runtime: Any
    engine: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: int
    by_data: set[str] = field(default_factory=set)
    config: Any = None

    @property
    def activation(self) -> int:
        newer = hasattr(self.engine, "device_memory_size_v2")
        return int(self.engine.device_memory_size_v2 if newer else self.engine.device_memory_size)


def deserialise(
    trt: Any, plan: bytes, manifest: Manifest, where: str, host_code: bool
) -> LoadedPlan:
    """Makes an engine from a plan's bytes.

    Args:
        where: the artifact's name in error messages.
        host_code: whether CPU code in the plan may run.

    Raises:
        ArtifactError: TensorRT does not load the plan, or its inputs and outputs differ from the
            manifest's.
        OutOfMemory: the weights do not fit.
        EngineError: a tensor has a dtype that numpy lacks.
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
        raise ArtifactError(
            f"{error}; run `pipeline build {quote(where)}` here", detail=error.detail
        )
    inputs, outputs = _ports(trt, engine, manifest, where)
    profiles = len(manifest.interface.profiles)
    if engine.num_optimization_profiles != max(profiles, 1):
        raise ArtifactError(
            f"{where}: its plan has {engine.num_optimization_profiles} profiles, its manifest "
            f"{profiles}: they are from different builds; run `pipeline build {quote(where)}`"
        )
    weights = len(plan)
    if hasattr(engine, "get_engine_stat"):
        weights = int(engine.get_engine_stat(trt.EngineStat.TOTAL_WEIGHTS_SIZE))
    return LoadedPlan(trt, log, runtime, engine, inputs, outputs, weights)


def _ports(
    trt: Any, engine: Any, manifest: Manifest, where: str
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """The engine's inputs and outputs, compared with the manifest's."""
    interface = manifest.interface
    declared = {t.name: t.dtype for t in interface.tensors}
    inputs: list[Port] = []
    outputs: list[Port] = []
    for place in range(engine.num_io_tensors):
        name = engine.get_tensor_name(place)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise EngineError(f"{where}: {name} is {kind}, a type that numpy lacks")
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        if on_host and not is_input:
            raise EngineError(
                f"{where}: TensorRT computes {name} on the host, which is not supported here"
            )
        dtype = np.dtype(_DTYPES[kind])
        port = Port(name, dtype, np.dtype(declared.get(name) or dtype), on_host)
        if port.declared != dtype and (port.declared, dtype) not in _NARROWED:
            raise ArtifactError(
                f"{where}: its plan has {name} in {dtype}, its manifest in {port.declared}: they "
                f"are from different builds; run `pipeline build {quote(where)}`"
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
                f": they are from different builds; run `pipeline build {quote(where)}`"
            )
    return tuple(inputs), tuple(outputs)


class Context:
    """An execution context, bound to one profile; its user provides the activation memory.

    Args:
        stream: the handle of the stream that the profile is chosen on. Wait for this stream before
            the first run.

    Attributes:
        ready: the user's key for the sizes that are set; None if they have to be set again.
        sized: whether the activation memory depends on the sizes. If so, set the sizes first, then
            the memory; otherwise set the memory once.
        generation: the user's number of the activation memory that is set.
        addresses: the address that is set for each tensor.

    Raises:
        EngineError: TensorRT refuses; `OutOfMemory` if memory is short.
    """

    def __init__(self, plan: LoadedPlan, profile: int, stream: int) -> None:
        self._plan, trt, engine = plan, plan.trt, plan.engine
        plan.log.clear()
        what = f"an execution context for profile {profile}"
        self.sized = False
        if hasattr(trt, "ExecutionContextAllocationStrategy"):
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            if plan.config is not None:
                plan.config.set_execution_context_allocation_strategy(strategy)
            context = engine.create_execution_context(plan.config or strategy)
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
        """Sets the inputs' shapes, in place of earlier ones."""
        self.ready = None
        for name, shape in shapes:
            if not self._context.set_input_shape(name, shape):
                raise self._plan.log.error(f"setting {name} to {list(shape)}")

    def output_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Every output's shape at the inputs' shapes; None if it depends on data.

        8.6 reports the dependence only in a fresh context: after a run it returns that run's shape.
        So such outputs are remembered.
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
        """Bytes of activation memory that a run at the inputs' shapes needs."""
        if self.sized:
            return int(self._context.update_device_memory_size_for_shapes())
        return self._plan.activation

    def set_activation(self, pointer: int, nbytes: int) -> None:
        """Sets the activation memory."""
        if hasattr(self._context, "set_device_memory"):
            self._context.set_device_memory(pointer, nbytes)
        else:
            self._context.device_memory = pointer

    def set_address(self, name: str, pointer: int) -> None:
        """Sets a tensor's address: on the GPU, or on the host for a port that is `on_host`."""
        if not self._context.set_tensor_address(name, pointer):
            raise self._plan.log.error(f"setting the address of {name}")
        self.addresses[name] = pointer

    def allocator(self, name: str) -> Any:
        """The output's allocator, created and set once; see `_allocator_class`."""
        if name not in self._allocators:
            allocator = _allocator_class(self._plan.trt)()
            if not self._context.set_output_allocator(name, allocator):
                raise self._plan.log.error(f"setting the allocator of {name}")
            self._allocators[name] = allocator
        return self._allocators[name]

    def error(self) -> EngineError:
        """The error after `execute` returned False."""
        return self._plan.log.error("running the engine")


def _allocator_class(trt: Any) -> Any:
    """The class of an IOutputAllocator that gets an address from `give(bytes)` and keeps the shape.

    The user sets `lease`. 8.6 also asks for memory between runs, when sizes are set: as much as the
    last run used. If it gets none, the next run fails. So `idle` returns a lease for it, which
    `spare` keeps. TensorRT prints and drops a callback's exception, so `error` keeps it.
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
                self.spare = None  # returned first, so that the pool can hand it out again
                self.spare = self.idle(size)
                return int(self.spare.pointer)
            except EngineError as error:
                self.error = error.with_traceback(None)  # the traceback would keep this object
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
