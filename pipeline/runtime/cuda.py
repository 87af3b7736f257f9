"""The parts of CUDA that an engine needs: memory, streams and events of one GPU.

Graphs are in `pipeline.runtime.cuda_graph`. Only these two modules import cuda.bindings. A handle
is freed with the Python object that holds it. So objects can be closed in any order, and an array
that outlives its engine stays readable.

Source: CUDA Runtime API reference (stream synchronisation behaviour).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from cuda.bindings import driver
from cuda.bindings import runtime as rt

from pipeline.errors import EngineError, InputError
from pipeline.machine.gpu import Gpu

# cudaStreamLegacy and cudaStreamPerThread; 0 and 1 both mean the legacy default stream
LEGACY, PER_THREAD = 1, 2
_FULL = rt.cudaError_t.cudaErrorMemoryAllocation
_HOST_TO_DEVICE = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
_DEVICE_TO_HOST = rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
_DEVICE_TO_DEVICE = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
_WHICH = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


def check(result: tuple[Any, ...], what: str) -> Any:
    """Returns the value of a CUDA call.

    Raises:
        EngineError: the call failed; the message has CUDA's error.
    """
    if result[0]:
        rt.cudaGetLastError()  # clears the error, or another library's next call would find it
        _, words = rt.cudaGetErrorString(result[0])
        text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
        raise EngineError(f"{what}: CUDA reports: {text} ({result[0].name})")
    return result[1] if len(result) > 1 else None


def allocate(nbytes: int) -> int:
    """Allocates bytes on the current GPU and returns their address; 0 if memory is short."""
    result = rt.cudaMalloc(nbytes)
    if result[0] == _FULL:
        rt.cudaGetLastError()
        return 0
    return int(check(result, f"allocating {nbytes} bytes"))


def free(pointer: int) -> None:
    """Frees memory; never raises, because it runs when objects are collected."""
    rt.cudaFree(pointer)


def memory() -> tuple[int, int]:
    """The current GPU's memory in bytes: (free, total)."""
    code, left, total = rt.cudaMemGetInfo()
    check((code,), "asking for the free memory")
    return int(left), int(total)


def synchronise() -> None:
    """Waits for all work on the current GPU."""
    check(rt.cudaDeviceSynchronize(), "waiting for the GPU")


def gpu_of(pointer: int) -> int:
    """CUDA's number of the GPU that an address belongs to; -1 if it is not CUDA memory."""
    code, index = driver.cuPointerGetAttribute(_WHICH, pointer)
    return -1 if code else int(index)


def to_device(pointer: int, host: Any, nbytes: int, stream: int) -> None:
    """Copies pageable host memory to the GPU; you may change it once this returns.

    Args:
        host: the address of the host memory, or a C-contiguous numpy array.
    """
    result = rt.cudaMemcpyAsync(pointer, host, nbytes, _HOST_TO_DEVICE, stream)
    if result[0]:
        check(result, "copying to the GPU")


def to_host(host: Any, pointer: int, nbytes: int, stream: int) -> None:
    """Copies to a host address or a C-contiguous numpy array; done when the stream is done."""
    result = rt.cudaMemcpyAsync(host, pointer, nbytes, _DEVICE_TO_HOST, stream)
    if result[0]:
        check(result, "copying from the GPU")


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copies memory on the GPU."""
    result = rt.cudaMemcpyAsync(target, source, nbytes, _DEVICE_TO_DEVICE, stream)
    if result[0]:
        check(result, "copying on the GPU")


def fill(pointer: int, byte: int, nbytes: int, stream: int) -> None:
    """Sets every byte of a block on the GPU."""
    check(rt.cudaMemsetAsync(pointer, byte, nbytes, stream), "filling memory on the GPU")


class Stream:
    """A new stream.

    A `blocking` stream is ordered with the legacy default stream in both directions. It waits for
    work that was enqueued there before, and work that is enqueued there later waits for it.
    """

    __slots__ = ("handle",)

    def __init__(self, *, blocking: bool) -> None:
        flags = 0 if blocking else rt.cudaStreamNonBlocking
        self.handle = int(check(rt.cudaStreamCreateWithFlags(flags), "creating a stream"))

    def synchronise(self) -> None:
        check(rt.cudaStreamSynchronize(self.handle), "waiting for the GPU")

    def __del__(self) -> None:
        if rt is not None and hasattr(self, "handle"):
            rt.cudaStreamDestroy(self.handle)


class Event:
    """A moment in a stream; its handle returns to the engine's `Events` when it is collected."""

    __slots__ = ("handle", "home")

    def __init__(self, handle: Any, home: Events) -> None:
        self.handle, self.home = handle, home

    def wait(self, stream: int) -> None:
        """Makes work that is enqueued on the stream from now on wait for the moment."""
        result = rt.cudaStreamWaitEvent(stream, self.handle, 0)
        if result[0]:
            check(result, "making a stream wait")

    def release(self) -> None:
        """Does nothing: the moment is already fixed (see `pipeline.runtime.pool.Moment`)."""

    def synchronise(self) -> None:
        """Makes the calling thread wait for the moment."""
        check(rt.cudaEventSynchronize(self.handle), "waiting for the GPU")

    def over(self) -> bool:
        """True once the moment has passed."""
        return not rt.cudaEventQuery(self.handle)[0]

    def __del__(self) -> None:
        home = self.home
        home.free.append(self.handle)
        if home.closed:
            home.close()


def elapsed(start: Event, end: Event) -> float:
    """Seconds between two moments that have passed; their `Events` have to be with `timing`."""
    result = rt.cudaEventElapsedTime(start.handle, end.handle)
    return float(check(result, "reading the time between two events")) / 1e3


class Reader:
    """Another library's stream that uses an array, until that library releases the array."""

    def __init__(self, stream: int, events: Events) -> None:
        self.stream, self._events = stream, events
        self._event: Event | None = None

    def release(self) -> None:
        with suppress(EngineError):  # the stream was destroyed: `wait` then waits for the whole GPU
            self._event = self._events.take(self.stream)

    def wait(self, stream: int) -> None:
        if self._event is None:
            synchronise()
        else:
            self._event.wait(stream)


class Events:
    """A pool of events.

    Args:
        timing: whether the events keep the time, which `elapsed` needs.

    Attributes:
        free: handles of events that nobody holds.
        closed: whether a returned event is freed at once.
    """

    __slots__ = ("_flags", "closed", "free")

    def __init__(self, *, timing: bool = False) -> None:
        self.free: deque[Any] = deque()
        self.closed = False
        self._flags = rt.cudaEventDefault if timing else rt.cudaEventDisableTiming

    def take(self, stream: int) -> Event:
        """The moment when all work that is on the stream so far is done."""
        try:
            handle = self.free.pop()
        except IndexError:
            handle = check(rt.cudaEventCreateWithFlags(self._flags), "creating an event")
        event = Event(handle, self)
        result = rt.cudaEventRecord(handle, stream)
        if result[0]:
            check(result, "recording an event in a stream")
        return event

    def close(self) -> None:
        """Frees the events that nobody holds; from now on, each other one when it is collected."""
        self.closed = True
        while self.free and rt is not None:
            try:
                rt.cudaEventDestroy(self.free.pop())
            except IndexError:  # another thread took the last one
                break


class Turns:
    """Orders the calls without ``stream=``, over all engines on a GPU.

    Each engine runs such calls on its own stream, and CUDA does not order these streams with each
    other. A caller who passes no stream can't know that there are several. So each call waits for
    the last call of every other engine.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[int, Event] = {}

    def enter(self, stream: int, device: Device) -> None:
        """Makes an engine's own stream wait for the other engines' calls so far."""
        if stream == device.own.handle:
            for number, event in tuple(self._last.items()):
                if number != device.number:
                    event.wait(stream)

    def leave(self, stream: int, device: Device, event: Event) -> None:
        """Records that an enqueued call ends at the event."""
        if stream != device.own.handle:
            return
        self._last[device.number] = event
        if len(self._last) > _MOST_TURNS:  # drops the entries of engines that are gone
            for number, old in tuple(self._last.items()):
                if old.over():
                    self._last.pop(number, None)


_TURNS: dict[int, Turns] = {}  # by GPU
_NUMBERS = count()
_MOST_TURNS = 4


class Device:
    """One GPU, with the objects that all arrays of an engine on it share.

    Args:
        index: CUDA's number of the GPU.

    Attributes:
        own: the stream of calls without ``stream=``; ordered with the legacy default stream.
        number: this object's number, unique in the process.
        turns: the order of these calls over all engines on the GPU.
        copies: the stream that copies results to the host while other calls run.
        alone: whether there is no other GPU, so that this one is always the current one.

    Raises:
        InputError: there is no such GPU.
    """

    def __init__(self, index: int) -> None:
        there = int(check(rt.cudaGetDeviceCount(), "counting the GPUs"))
        if type(index) is not int or not 0 <= index < there:
            raise InputError(f"device={index!r}: there are {there} GPUs here, from 0")
        self.index, self.number = index, next(_NUMBERS)
        self.alone = there == 1
        with self.current():
            self.gpu = _gpu(index)
            check(rt.cudaSetDevice(index), f"choosing GPU {index}")  # creates its context
            self.own = Stream(blocking=True)
            self.turns = _TURNS.setdefault(index, Turns())
            self.copies = Stream(blocking=False)
            self.events = Events()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes this GPU the calling thread's current one inside the block."""
        before = self.index if self.alone else int(check(rt.cudaGetDevice(), "asking for the GPU"))
        if before == self.index:
            yield
            return
        check(rt.cudaSetDevice(self.index), f"choosing GPU {self.index}")
        try:
            yield
        finally:
            rt.cudaSetDevice(before)

    def activate(self) -> None:
        """Gives the calling thread a CUDA context, which cuda.core needs (it asks the driver)."""
        if self.alone:
            rt.cudaSetDevice(self.index)


def _gpu(index: int) -> Gpu:
    properties = check(rt.cudaGetDeviceProperties(index), f"asking GPU {index}")
    name = properties.name
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return Gpu(text.rstrip("\0"), (int(properties.major), int(properties.minor)))
