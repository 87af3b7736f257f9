"""A captured CUDA graph that includes the copies into and out of its memory.

One launch replaces a CUDA call for every input and output. A copy's address is set again only if it
changed; this does not affect launches that are already enqueued.

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


class CapturedGraph:
    """A captured graph, ready to be launched."""

    __slots__ = ("_copies_in", "_copies_out", "_exec", "_graph")

    def __init__(
        self,
        stream: _cuda.Stream,
        enqueue: Callable[[], bool],
        inputs: Sequence[tuple[int, int]] = (),
        outputs: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Captures the work that `enqueue` puts on the stream.

        Other threads may call CUDA meanwhile (thread-local capture).

        Args:
            stream: the stream to capture; it must not be a default stream.
            enqueue: puts the work on the stream; returns False on failure.
            inputs, outputs: (address, bytes) of each buffer that is copied into before the run, and
                out of after it.

        Raises:
            EngineError: the capture failed; the stream is as it was before.
        """
        captured = _captured(stream, enqueue)
        self._copies_in = [_Copy(pointer, nbytes) for pointer, nbytes in inputs]
        self._copies_out = [_Copy(pointer, nbytes) for pointer, nbytes in outputs]
        copies = [copy for copy in (*self._copies_in, *self._copies_out) if copy.nbytes]
        try:
            if copies:
                # fails for nodes that can't be in a child graph, and if memory is short; then each
                # call makes the copies
                with suppress(EngineError):
                    self._join(captured, max(copy.nbytes for copy in copies))
                    return
                for copy in copies:
                    copy.node = None
            self._exec = check(
                rt.cudaGraphInstantiate(captured, 0), "instantiating the captured graph"
            )
        finally:
            rt.cudaGraphDestroy(captured)

    def _join(self, captured: Any, nbytes: int) -> None:
        """Joins the captured graph and the copies into one graph."""
        spare = _cuda.allocate(nbytes)  # the copies' other address until the first launch
        if not spare:
            raise EngineError(f"no GPU memory for {nbytes} bytes")
        try:
            graph = self._graph = check(rt.cudaGraphCreate(0), "creating a graph")
            first = [
                copy.add(graph, [], copy.pointer, spare) for copy in self._copies_in if copy.nbytes
            ]
            result = rt.cudaGraphAddChildGraphNode(graph, first or None, len(first), captured)
            core = check(result, "adding the captured graph")
            for copy in self._copies_out:
                if copy.nbytes:
                    copy.add(graph, [core], spare, copy.pointer)
            self._exec = check(
                rt.cudaGraphInstantiate(graph, 0), "instantiating the captured graph"
            )
        finally:
            _cuda.free(spare)

    def launch(self, stream: int, sources: Sequence[int] = (), targets: Sequence[int] = ()) -> None:
        """Enqueues the copies in, the graph, and the copies out.

        Args:
            sources: the address to copy each input from, in the order of `inputs`.
            targets: the address to copy each output to, in the order of `outputs`.
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
            if hasattr(self, "_graph"):  # kept until now: the copies' nodes belong to it
                rt.cudaGraphDestroy(self._graph)


class _Copy:
    """A copy between a graph's own memory and another address, which changes from call to call.

    Attributes:
        pointer, nbytes: the address and size of the graph's own memory.
        other: the other address that the node is set to; None before the first launch, and while
            the node is off.
        node: the graph's node; None if there is none, so that each call makes the copy.
    """

    __slots__ = ("_off", "nbytes", "node", "other", "pointer")

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer, self.nbytes = pointer, nbytes
        self.other: int | None = None
        self.node: Any = None
        self._off = False

    def add(self, graph: Any, after: Sequence[Any], target: int, source: int) -> Any:
        """Adds the copy's node to a graph, and returns the node."""
        result = rt.cudaGraphAddMemcpyNode1D(
            graph, list(after) or None, len(after), target, source, self.nbytes, _DEVICE_TO_DEVICE
        )
        self.node = check(result, "adding a copy to a graph")
        return self.node

    def move(self, graph: Any, target: int, source: int) -> bool:
        """Sets the node's addresses; False if the call has to make the copy.

        A node can't be changed to some kinds of memory.
        """
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
            rt.cudaGetLastError()  # clears the error, or another library's next call would find it
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
        result = rt.cudaStreamEndCapture(stream.handle)  # ends a failed capture too
        rt.cudaGetLastError()
    graph = check(result, "capturing")
    if not done:
        rt.cudaGraphDestroy(graph)
        raise EngineError("capturing: TensorRT refused")
    return graph
