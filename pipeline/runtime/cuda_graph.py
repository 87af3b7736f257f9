"""A captured CUDA graph, with the copies into and out of its memory as parts of it.

One launch then does what would be a call of CUDA's for every input and output. Where a copy comes
from or goes to is set anew only where it changed; that does not touch what is enqueued already.

Source: CUDA Runtime API reference (graph management).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cuda.bindings import runtime as rt

from pipeline.errors import EngineError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.cuda import check

_DEVICE_TO_DEVICE = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
_THREAD_LOCAL = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal


class Graph:
    """A captured graph, ready to be launched."""

    __slots__ = ("_copies_in", "_copies_out", "_exec", "_graph")

    def __init__(
        self,
        stream: _cuda.Stream,
        enqueue: Callable[[], bool],
        inputs: Sequence[tuple[int, int]] = (),
        outputs: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Captures what `enqueue` puts onto the stream (which must be no default stream).

        Other threads may go on calling CUDA meanwhile (thread-local capture).

        Args:
            inputs, outputs: addresses and bytes of the memory that is copied into before, and out
                of afterwards.

        Raises:
            EngineError: it could not be captured; the stream is as it was before.
        """
        captured = _captured(stream, enqueue)
        self._copies_in = [_Copy(pointer, nbytes) for pointer, nbytes in inputs]
        self._copies_out = [_Copy(pointer, nbytes) for pointer, nbytes in outputs]
        copies = [copy for copy in (*self._copies_in, *self._copies_out) if copy.nbytes]
        try:
            if copies:
                # nodes that no other graph may hold, or no room: each call copies then
                with suppress(EngineError):
                    self._join(captured, max(copy.nbytes for copy in copies))
                    return
                for copy in copies:
                    copy.node = None
            self._exec = check(rt.cudaGraphInstantiate(captured, 0), "making the captured graph")
        finally:
            rt.cudaGraphDestroy(captured)

    def _join(self, captured: Any, nbytes: int) -> None:
        """Makes one graph of the captured one and the copies."""
        spare = _cuda.allocate(nbytes)  # where copies come from and go to until the first launch
        if not spare:
            raise EngineError(f"no room for {nbytes} bytes")
        try:
            graph = self._graph = check(rt.cudaGraphCreate(0), "making a graph")
            first = [
                copy.add(graph, [], copy.pointer, spare) for copy in self._copies_in if copy.nbytes
            ]
            result = rt.cudaGraphAddChildGraphNode(graph, first or None, len(first), captured)
            core = check(result, "adding the captured graph")
            for copy in self._copies_out:
                if copy.nbytes:
                    copy.add(graph, [core], spare, copy.pointer)
            self._exec = check(rt.cudaGraphInstantiate(graph, 0), "making the captured graph")
        finally:
            _cuda.free(spare)

    def launch(self, stream: int, sources: Sequence[int] = (), targets: Sequence[int] = ()) -> None:
        """Enqueues the copies in, the graph, and the copies out.

        Args:
            sources, targets: addresses for the inputs' and the outputs' values, in their order.
        """
        late: list[tuple[int, _Copy]] = []
        for place, copy in enumerate(self._copies_in):
            pointer = sources[place]
            if copy.other != pointer and not copy.move(self._exec, copy.pointer, pointer):
                _cuda.copy(copy.pointer, pointer, copy.nbytes, stream)
        for place, copy in enumerate(self._copies_out):
            pointer = targets[place]
            if copy.other != pointer and not copy.move(self._exec, pointer, copy.pointer):
                late.append((pointer, copy))
        result = rt.cudaGraphLaunch(self._exec, stream)
        if result[0]:
            check(result, "launching a captured graph")
        for pointer, copy in late:
            _cuda.copy(pointer, copy.pointer, copy.nbytes, stream)

    def __del__(self) -> None:
        if rt is not None:
            if hasattr(self, "_exec"):
                rt.cudaGraphExecDestroy(self._exec)
            if hasattr(self, "_graph"):  # the copies' nodes are named by it
                rt.cudaGraphDestroy(self._graph)


class _Copy:
    """A copy between a graph's own memory and somebody else's, which changes.

    Attributes:
        pointer, nbytes: of the graph's own memory.
        other: what the node is set to; None before the first launch, and where it is off.
        node: None where there is none, so that a call has to copy.
    """

    __slots__ = ("_off", "nbytes", "node", "other", "pointer")

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer, self.nbytes = pointer, nbytes
        self.other: int | None = None
        self.node: Any = None
        self._off = False

    def add(self, graph: Any, after: Sequence[Any], target: int, source: int) -> Any:
        """Makes the node."""
        result = rt.cudaGraphAddMemcpyNode1D(
            graph, list(after) or None, len(after), target, source, self.nbytes, _DEVICE_TO_DEVICE
        )
        self.node = check(result, "adding a copy to a graph")
        return self.node

    def move(self, graph: Any, target: int, source: int) -> bool:
        """Sets the node anew; false where the call has to copy (memory of a kind that nodes
        can't be changed to)."""
        if not self.nbytes:
            return True
        if self.node is None:
            return False
        self.other = None
        result = rt.cudaGraphExecMemcpyNodeSetParams1D(
            graph, self.node, target, source, self.nbytes, _DEVICE_TO_DEVICE
        )
        failed = bool(result[0])
        if failed:
            rt.cudaGetLastError()  # or the next call of another library finds this error
        if failed != self._off:
            check(rt.cudaGraphNodeSetEnabled(graph, self.node, self._off), "switching a copy")
            self._off = failed
        if not failed:
            self.other = source if target == self.pointer else target
        return not failed


def _captured(stream: _cuda.Stream, enqueue: Callable[[], bool]) -> Any:
    check(rt.cudaStreamBeginCapture(stream.handle, _THREAD_LOCAL), "beginning a capture")
    done = False
    try:
        done = enqueue()
    finally:
        result = rt.cudaStreamEndCapture(stream.handle)  # ends a failed one too
        rt.cudaGetLastError()
    graph = check(result, "capturing")
    if not done:
        rt.cudaGraphDestroy(graph)
        raise EngineError("capturing: TensorRT refused")
    return graph
