"""A pretended GPU in host memory, which does its work late and in any order that CUDA allows.

`PretendedCuda` replaces `cuda.bindings.runtime` in `pipeline.runtime.cuda` and
`pipeline.runtime.cuda_graph`. Enqueued work is done when somebody waits for it, or earlier, by
chance. Each time, the order is random among the orders that CUDA allows. So code that does not make
a stream wait computes wrong numbers. One seed gives one order. It models:

- streams, each in its order. Blocking streams and the legacy default stream wait for each other.
- events that are recorded again. A wait is for the last record before the wait.
- memory that is filled with rubbish at each allocation and release. Its addresses are used again at
  once, and so are the handles of streams. cudaFree waits for the whole GPU.
- too little memory (`limit`), calls that fail by chance (`failing`), and nodes of graphs that
  refuse other addresses (one change in ten)
- pageable memory, which is copied before the call returns
- a clock of the GPU. Each operation takes a millisecond.

It does not model several GPUs, the per-thread default stream, or operations that overlap. It also
does not model another order of the nodes of a graph, captures that other threads break, and sticky
errors. Copies to pageable memory are also late, unlike CUDA's.

Source: CUDA Runtime API reference (stream synchronisation behaviour).
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import runtime

from pipeline.runtime import cuda as _cuda

ROOMY = 1 << 23  # bytes; more than any test needs
ARENA = 1 << 24
_ALIGN, _RUBBISH = 512, 0x7B
_DEFAULT = (0, _cuda.LEGACY)
_ERRORS = runtime.cudaError_t
_ANSWERS = {
    "cudaGetDeviceCount": 1,
    "cudaGetDeviceProperties": SimpleNamespace(name=b"pretended", major=9, minor=0),
    "cudaGetErrorString": b"a pretended error",
    "cudaGetLastError": None,
    "cudaGraphDestroy": None,
    "cudaGraphExecDestroy": None,
    "cudaSetDevice": None,
}
_MAY_FAIL = {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord", "cudaGraphLaunch"}

Work = Callable[[], object]


def nothing(*_: Any) -> None:
    """The function of an operation that only has a place in the order."""


@dataclass(eq=False, slots=True)
class Operation:
    """Work of the GPU that follows other operations. `time`: when it was done."""

    work: Work
    after: Sequence[Operation] = ()
    done: bool = False
    time: int = 0


_OVER = Operation(nothing, (), True)


@dataclass
class Stream:
    """A stream and its last operation. `callers`: not an engine's, so a test may leave it."""

    blocking: bool
    callers: bool
    last: Operation = _OVER


@dataclass(eq=False)
class Node:
    """A part of a graph: captured operations, or one copy."""

    works: Sequence[Work]
    enabled: bool = True


Graph = list[Node]
Ready = dict[Node, Node]  # a graph that can be launched: the nodes and their settings


class PretendedCuda:
    """The calls of `cuda.bindings.runtime` that pipeline uses, and the caller's side of the GPU.

    Args:
        seed: The seed of the order of all work, and of failures.
        limit: The bytes that engines may allocate. The caller's arrays do not count.
        eager: How often enqueueing also does some waiting work, 0 to 1.

    Attributes:
        failing: How often a call that may fail does fail, 0 to 1.
        counts: The counts of some events.
        clock: Milliseconds.
        start: The start of its memory, which has `ARENA` bytes.
    """

    cudaMemcpyKind = runtime.cudaMemcpyKind
    cudaStreamCaptureMode = runtime.cudaStreamCaptureMode
    cudaStreamNonBlocking = runtime.cudaStreamNonBlocking
    cudaEventDisableTiming = runtime.cudaEventDisableTiming
    cudaEventDefault = runtime.cudaEventDefault

    def __init__(self, seed: int, *, limit: int = ROOMY, eager: float = 0.1) -> None:
        self.failing, self.counts, self.clock = 0.0, Counter[str](), 0
        self.random = random.Random(seed)
        self._limit, self._eager = limit, eager
        self._lock = threading.RLock()
        self._arena = (ctypes.c_ubyte * (ARENA + _ALIGN))()
        self.start = -(-ctypes.addressof(self._arena) // _ALIGN) * _ALIGN
        self._free = [(self.start, ARENA)]
        self._taken: dict[int, tuple[int, bool]] = {}  # bytes, and True for the caller's memory
        self._streams: dict[int, Stream] = {}
        self._handles, self._old_handles = itertools.count(1000), list[int]()
        self._events: dict[int, Operation] = {}
        self._timed: set[int] = set()  # the events that keep the time
        self._captures: dict[int, list[Work]] = {}
        self._legacy, self._waiting = (
            _OVER,
            list[Operation](),
        )  # the last operation of the legacy stream
        self._busy, self._freed_while_busy = False, list[int]()

    # the caller's side

    def make_stream(self, *, blocking: bool, callers: bool = True) -> int:
        """The handle of a new stream."""
        with self._lock:
            handle = self._old_handles.pop() if self._old_handles else next(self._handles)
            self._streams[handle] = Stream(blocking, callers)
            return handle

    def take(self, nbytes: int) -> int:
        """Allocates memory of the caller, and returns its address."""
        with self._lock:
            pointer = self._allocate(nbytes, callers=True)
            assert pointer, "the pretended GPU is too small for this test"
            return pointer

    def let_go(self, pointer: int) -> None:
        """Frees memory of the caller without waiting.

        Allocators that keep memory for the next array do the same.
        """
        with self._lock:
            nbytes, _ = self._taken.pop(pointer)
            ctypes.memset(pointer, _RUBBISH, nbytes)
            self._free.insert(0, (pointer, nbytes))

    def enqueue(self, work: Work, stream: int, *after: Operation) -> Operation:
        """Puts an operation onto a stream, or into its capture."""
        with self._lock:
            if stream in self._captures:
                self._captures[stream].append(work)
                return _OVER
            operation = Operation(work, [*after, *self._before(stream)])
            if stream in _DEFAULT:
                self._legacy = operation
            else:
                self._streams[stream].last = operation
            self._waiting.append(operation)
            if self.random.random() < self._eager and not self._busy:
                self._waiting = [one for one in self._waiting if not one.done]
                self._do(self.random.choice(self._waiting))
            return operation

    def finish(self) -> None:
        """Does all waiting work."""
        with self._lock:
            waiting = [one for one in self._waiting if not one.done]
            self.random.shuffle(waiting)
            for operation in waiting:
                self._do(operation)
            self._waiting = []

    def fails(self) -> bool:
        """True if a call that may fail has to fail now."""
        failed = self.failing > 0 and self.random.random() < self.failing
        self.counts["failed"] += failed
        return failed

    def left(self) -> dict[str, int]:
        """The memory, streams and events that engines have not freed."""
        return {
            "streams": sum(not stream.callers for stream in self._streams.values()),
            "events": len(self._events),
            "blocks": sum(not callers for _, callers in self._taken.values()),
        }

    # how it works

    def _before(self, stream: int) -> list[Operation]:
        """The operations before the next operation of a stream."""
        if stream in _DEFAULT:
            return [self._legacy, *(one.last for one in self._streams.values() if one.blocking)]
        mine = self._streams[stream]
        return [mine.last, self._legacy] if mine.blocking else [mine.last]

    @np.errstate(all="ignore")  # of rubbish, if the order is wrong
    def _do(self, operation: Operation) -> None:
        """Does an operation, after all operations before it."""
        assert not self._busy
        self._busy = True
        try:
            stack = [operation]
            while stack:
                one = stack[-1]
                missing = [before for before in one.after if not before.done]
                stack += missing
                if not missing:
                    one.work()
                    self.clock += 1
                    one.time = self.clock
                    one.done, one.work, one.after = True, nothing, ()  # is not done again
                    stack.pop()
        finally:
            self._busy = False
        while self._freed_while_busy:  # by what the operations held
            self.cudaFree(self._freed_while_busy.pop())

    def _used(self) -> int:
        return sum(nbytes for nbytes, callers in self._taken.values() if not callers)

    def _allocate(self, nbytes: int, *, callers: bool) -> int:
        nbytes = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        if not callers and self._used() + nbytes > self._limit:
            return 0
        for place, (pointer, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[place] = (pointer + nbytes, size - nbytes)
                self._taken[pointer] = nbytes, callers
                ctypes.memset(pointer, _RUBBISH, nbytes)
                return pointer
        return 0

    # CUDA's side

    def __getattr__(self, name: str) -> Any:
        """A call of CUDA: an error, or 0 and the result of the method with that name."""
        if not name.startswith("cuda"):
            raise AttributeError(name)
        if name in _ANSWERS:
            return lambda *_: (0, _ANSWERS[name])
        do = self.finish if name == "cudaDeviceSynchronize" else getattr(self, f"_{name}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name in _MAY_FAIL and self.fails():
                return (_ERRORS.cudaErrorUnknown,)
            with self._lock:
                answer = do(*arguments)
            if isinstance(answer, runtime.cudaError_t):
                return (answer, 0)
            return (0, *answer) if isinstance(answer, tuple) else (0, answer)

        return call

    def _cudaMalloc(self, nbytes: int) -> Any:
        return self._allocate(nbytes, callers=False) or _ERRORS.cudaErrorMemoryAllocation

    def _cudaFree(self, pointer: int) -> None:
        if self._busy:
            self._freed_while_busy.append(pointer)
        else:
            self.finish()
            self.let_go(pointer)

    def _cudaMemGetInfo(self) -> tuple[int, int]:
        return self._limit - self._used(), self._limit

    def _cudaMemcpyAsync(self, to: Any, source: Any, nbytes: int, kind: Any, stream: int) -> None:
        to, source = (getattr(place, "ctypes", place) for place in (to, source))  # numpy arrays
        if kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice:
            source = ctypes.string_at(source, nbytes)
        self.enqueue(lambda: ctypes.memmove(to, source, nbytes), stream)

    def _cudaMemsetAsync(self, pointer: int, byte: int, nbytes: int, stream: int) -> None:
        self.enqueue(lambda: ctypes.memset(pointer, byte, nbytes), stream)

    def _cudaStreamCreateWithFlags(self, flags: int) -> int:
        return self.make_stream(blocking=not flags, callers=False)

    def _cudaStreamDestroy(self, handle: int) -> None:
        del self._streams[handle]
        self._old_handles.append(handle)

    def _cudaStreamSynchronize(self, stream: int) -> None:
        for operation in self._before(stream):
            self._do(operation)

    def _cudaEventCreateWithFlags(self, flags: int) -> int:
        handle = next(self._handles)
        if flags == self.cudaEventDefault:
            self._timed.add(handle)
        self._events[handle] = _OVER
        return handle

    def _cudaEventDestroy(self, event: int) -> None:
        del self._events[event]

    def _cudaEventRecord(self, event: int, stream: int) -> Any:
        if stream not in (*_DEFAULT, *self._streams):
            return _ERRORS.cudaErrorInvalidResourceHandle
        self._events[event] = self.enqueue(nothing, stream)
        return None

    def _cudaStreamWaitEvent(self, stream: int, event: int, _: int) -> None:
        self.enqueue(nothing, stream, self._events[event])

    def _cudaEventSynchronize(self, event: int) -> None:
        self._do(self._events[event])

    def _cudaEventElapsedTime(self, start: int, end: int) -> Any:
        if not {start, end} <= self._timed:
            return _ERRORS.cudaErrorInvalidResourceHandle
        first, last = self._events[start], self._events[end]
        if not (first.done and last.done):
            return _ERRORS.cudaErrorNotReady
        return float(last.time - first.time)

    def _cudaEventQuery(self, event: int) -> Any:
        return None if self._events[event].done else _ERRORS.cudaErrorNotReady

    def _cudaStreamBeginCapture(self, stream: int, _: Any) -> None:
        self._captures[stream] = []

    def _cudaStreamEndCapture(self, stream: int) -> Graph:
        return [Node(self._captures.pop(stream))]

    def _cudaGraphCreate(self, _: int) -> Graph:
        return []

    def _cudaGraphAddMemcpyNode1D(self, graph: Graph, _: Any, __: int, *copy: Any) -> Node:
        graph.append(Node([partial(ctypes.memmove, *copy[:3])]))
        return graph[-1]

    def _cudaGraphAddChildGraphNode(self, graph: Graph, _: Any, __: int, child: Graph) -> Node:
        graph.append(Node([work for node in child for work in node.works]))
        return graph[-1]

    def _cudaGraphInstantiate(self, graph: Graph, _: int) -> Ready:
        return {node: replace(node) for node in graph}

    def _cudaGraphExecMemcpyNodeSetParams1D(self, graph: Ready, node: Node, *copy: Any) -> Any:
        if self.random.random() < 0.1:
            return _ERRORS.cudaErrorInvalidValue
        graph[node].works = [partial(ctypes.memmove, *copy[:3])]
        return None

    def _cudaGraphNodeSetEnabled(self, graph: Ready, node: Node, on: int) -> None:
        graph[node].enabled = bool(on)

    def _cudaGraphLaunch(self, graph: Ready, stream: int) -> None:
        self.counts["graphs launched"] += 1
        for work in [work for node in graph.values() if node.enabled for work in node.works]:
            self.enqueue(work, stream)
