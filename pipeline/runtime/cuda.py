"""What an engine needs of CUDA: memory, streams and events of one GPU (graphs:
`pipeline.runtime.cuda_graph`).

All of cuda.bindings is in these two. Handles are freed with the Python object that holds them, so
that nothing has to be closed in some order, and an array that outlives its engine stays readable.

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
    """What a CUDA call gave.

    Raises:
        EngineError: it failed; in CUDA's words.
    """
    if result[0]:
        rt.cudaGetLastError()  # or the next call of another library finds this error
        _, words = rt.cudaGetErrorString(result[0])
        text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
        raise EngineError(f"{what}: CUDA says: {text} ({result[0].name})")
    return result[1] if len(result) > 1 else None


def allocate(nbytes: int) -> int:
    """The address of that many bytes on the current GPU; 0 where they are not to be had."""
    result = rt.cudaMalloc(nbytes)
    if result[0] == _FULL:
        rt.cudaGetLastError()
        return 0
    return int(check(result, f"allocating {nbytes} bytes"))


def free(pointer: int) -> None:
    """Gives memory back; never raises, since it is called when objects are collected."""
    rt.cudaFree(pointer)


def memory() -> tuple[int, int]:
    """Bytes (free, in all) of the current GPU."""
    code, left, total = rt.cudaMemGetInfo()
    check((code,), "asking for the free memory")
    return int(left), int(total)


def synchronise() -> None:
    """Waits for everything that runs on the current GPU."""
    check(rt.cudaDeviceSynchronize(), "waiting for the GPU")


def gpu_of(pointer: int) -> int:
    """CUDA's number of the GPU that an address belongs to; -1 where it is no memory of CUDA's."""
    code, index = driver.cuPointerGetAttribute(_WHICH, pointer)
    return -1 if code else int(index)


def to_device(pointer: int, host: Any, nbytes: int, stream: int) -> None:
    """Copies pageable host memory in; it may be changed once this returns.

    Args:
        host: its address, or a C-contiguous numpy array.
    """
    result = rt.cudaMemcpyAsync(pointer, host, nbytes, _HOST_TO_DEVICE, stream)
    if result[0]:
        check(result, "copying to the GPU")


def to_host(host: Any, pointer: int, nbytes: int, stream: int) -> None:
    """Copies out, to an address or a C-contiguous numpy array; done when the stream is."""
    result = rt.cudaMemcpyAsync(host, pointer, nbytes, _DEVICE_TO_HOST, stream)
    if result[0]:
        check(result, "copying from the GPU")


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copies from one place on the GPU to another."""
    result = rt.cudaMemcpyAsync(target, source, nbytes, _DEVICE_TO_DEVICE, stream)
    if result[0]:
        check(result, "copying on the GPU")


def fill(pointer: int, byte: int, nbytes: int, stream: int) -> None:
    """Sets every byte."""
    check(rt.cudaMemsetAsync(pointer, byte, nbytes, stream), "filling memory on the GPU")


class Stream:
    """A stream of one's own.

    A `blocking` one is ordered with the legacy default stream, both ways: what is enqueued there
    before goes before, what is enqueued there afterwards waits.
    """

    __slots__ = ("handle",)

    def __init__(self, *, blocking: bool) -> None:
        flags = 0 if blocking else rt.cudaStreamNonBlocking
        self.handle = int(check(rt.cudaStreamCreateWithFlags(flags), "making a stream"))

    def synchronise(self) -> None:
        check(rt.cudaStreamSynchronize(self.handle), "waiting for the GPU")

    def __del__(self) -> None:
        if rt is not None and hasattr(self, "handle"):
            rt.cudaStreamDestroy(self.handle)


class Event:
    """A moment in a stream; goes back to its `Events`, its engine's, when it is collected."""

    __slots__ = ("handle", "home")

    def __init__(self, handle: Any, home: Events) -> None:
        self.handle, self.home = handle, home

    def wait(self, stream: int) -> None:
        """What is enqueued on the stream from now on waits for the moment."""
        result = rt.cudaStreamWaitEvent(stream, self.handle, 0)
        if result[0]:
            check(result, "making a stream wait")

    def release(self) -> None:
        """Nothing: the moment is fixed (see `pipeline.runtime.pool.Moment`)."""

    def synchronise(self) -> None:
        """The calling thread waits for the moment."""
        check(rt.cudaEventSynchronize(self.handle), "waiting for the GPU")

    def over(self) -> bool:
        """True once the moment has passed."""
        return not rt.cudaEventQuery(self.handle)[0]

    def __del__(self) -> None:
        home = self.home
        home.free.append(self.handle)
        if home.closed:
            home.close()


class Reader:
    """Somebody else's stream, which uses an array until he lets go of it."""

    def __init__(self, stream: int, events: Events) -> None:
        self.stream, self._events = stream, events
        self._event: Event | None = None

    def release(self) -> None:
        with suppress(EngineError):  # a stream that is gone is waited for with the whole GPU
            self._event = self._events.take(self.stream)

    def wait(self, stream: int) -> None:
        if self._event is None:
            synchronise()
        else:
            self._event.wait(stream)


class Events:
    """Events that are used again and again.

    Attributes:
        free: handles of those that nobody holds.
        closed: what is given back is freed at once.
    """

    __slots__ = ("closed", "free")

    def __init__(self) -> None:
        self.free: deque[Any] = deque()
        self.closed = False

    def take(self, stream: int) -> Event:
        """The moment when all that was enqueued on the stream so far is done."""
        try:
            handle = self.free.pop()
        except IndexError:
            flags = rt.cudaEventDisableTiming
            handle = check(rt.cudaEventCreateWithFlags(flags), "making an event")
        event = Event(handle, self)
        result = rt.cudaEventRecord(handle, stream)
        if result[0]:
            check(result, "marking a moment in a stream")
        return event

    def close(self) -> None:
        """Frees the events that nobody holds, and from now on each when it is collected."""
        self.closed = True
        while self.free and rt is not None:
            try:
                rt.cudaEventDestroy(self.free.pop())
            except IndexError:  # another thread was faster
                break


class Turns:
    """The order of the calls that name no stream, of all engines on a GPU.

    Every engine has a stream of its own for them, and these are not ordered with each other; but
    who names no stream can't know that there is more than one. So each call waits for the last
    one of every other engine.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[int, Event] = {}

    def enter(self, stream: int, device: Device) -> None:
        """On an engine's own stream: makes it wait for the other engines' calls so far."""
        if stream == device.own.handle:
            for number, event in tuple(self._last.items()):
                if number != device.number:
                    event.wait(stream)

    def leave(self, stream: int, device: Device, event: Event) -> None:
        """A call is enqueued, and over by then."""
        if stream != device.own.handle:
            return
        self._last[device.number] = event
        if len(self._last) > _MOST_TURNS:  # of engines that are gone
            for number, old in tuple(self._last.items()):
                if old.over():
                    self._last.pop(number, None)


_TURNS: dict[int, Turns] = {}  # by GPU
_NUMBERS = count()
_MOST_TURNS = 4


class Device:
    """One GPU, and what all arrays of an engine on it share.

    Args:
        index: CUDA's number of it.

    Attributes:
        own: the stream of calls that name none; ordered with the legacy default stream.
        number: of this object alone, as long as the process lives.
        turns: the order of these calls, among all engines on the GPU.
        copies: the stream on which results are copied to the host, beside other calls.
        alone: there is no other GPU, so that this one is always the current one.

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
            check(rt.cudaSetDevice(index), f"choosing GPU {index}")  # makes its context
            self.own = Stream(blocking=True)
            self.turns = _TURNS.setdefault(index, Turns())
            self.copies = Stream(blocking=False)
            self.events = Events()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, this GPU is the calling thread's current one."""
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
        """Makes sure that the calling thread has a CUDA context (cuda.core asks the driver)."""
        if self.alone:
            rt.cudaSetDevice(self.index)


def _gpu(index: int) -> Gpu:
    properties = check(rt.cudaGetDeviceProperties(index), f"asking GPU {index}")
    name = properties.name
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return Gpu(text.rstrip("\0"), (int(properties.major), int(properties.minor)))
