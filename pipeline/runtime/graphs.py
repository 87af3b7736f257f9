"""Captured CUDA graphs of an engine, by sizes.

A graph keeps the addresses that it was captured with. So it has its own inputs and outputs,
includes the copies into and out of them, and keeps its activation memory. It also has its own
execution context, as NVIDIA advises: a shared context that prepares other sizes in between would
change the graph's results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import EngineError, InputError, OutOfMemory
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.bindings import Context, LoadedPlan
from pipeline.runtime.cuda_graph import CapturedGraph
from pipeline.runtime.pool import DIRTY, Lease, Pool
from pipeline.runtime.sizes import ONE_SIZE, Sized
from pipeline.spec.dims import sizes_text


@dataclass
class Captured:
    """A graph and its memory, freed together.

    Args:
        inputs, outputs: memory blocks, in the order of the engine's inputs and outputs.
        activation, context: they have to live as long as the graph.
    """

    sizes: Mapping[str, int]
    graph: CapturedGraph
    inputs: list[Lease]
    outputs: list[Lease]
    activation: Lease
    context: Context


class Graphs:
    """Keeps at most `most` graphs, and frees the least recently used one first.

    Attributes:
        kept: the graphs by the call's key, least recently used first.
    """

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise InputError(f"graphs={most!r}: give the number of graphs to keep, 0 or more")
        self._most = most
        self.kept: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def sizes(self) -> tuple[Mapping[str, int], ...]:
        """The sizes, least recently used first."""
        kept = list(self.kept.values())  # a copy: calls in other threads reorder the graphs
        return tuple(dict(captured.sizes) for captured in kept)

    def find(self, key: Hashable) -> Captured | None:
        """Returns a call's graph and makes it the most recently used one."""
        found = self.kept.get(key)
        if found is not None:
            self.kept.move_to_end(key)
        return found

    def check(self) -> None:
        """Raises `InputError` if no graphs are kept."""
        if self._most == 0:
            raise InputError("graphs=0 keeps no graphs; load the engine with more")

    def make_room(self) -> None:
        """Makes room for one more graph. Waits for the GPU if it has to free one."""
        if len(self.kept) >= self._most:
            _cuda.synchronise()
            while len(self.kept) >= self._most:
                self.kept.popitem(last=False)

    def add(self, key: Hashable, captured: Captured) -> None:
        self.kept[key] = captured

    def clear(self) -> None:
        self.kept.clear()


def capture(
    plan: LoadedPlan,
    sized: Sized,
    pool: Pool,
    sample: Mapping[str, np.ndarray[Any, Any]],
    after: _cuda.Event | None,
    activate: Callable[[Context], Lease],
) -> Captured:
    """Captures a run at these sizes.

    Args:
        sample: inputs for a run before the capture: on arbitrary ones, a loop might never end.
        after: the last run's event; the capture waits for it, since it shares activation memory.
        activate: sets the activation memory of a context whose shapes are set.

    Raises:
        EngineError: TensorRT or CUDA can't capture this network.
        OutOfMemory: GPU memory is too short for the graph's buffers.
    """
    stream = _cuda.Stream(blocking=False)
    if after is not None:
        after.wait(stream.handle)
    try:
        context = Context(plan, sized.profile, stream.handle)
    except OutOfMemory:
        raise
    except EngineError as error:
        raise EngineError(
            f"can't be captured at {sizes_text(sized.sizes, ONE_SIZE)}: TensorRT 8.6 allows one "
            "context per profile, unless the engine was built with profile sharing: run "
            "`pipeline build` again",
            detail=f"{error}\n{error.detail}",
        ) from error
    context.set_shapes(sized.inputs)
    activation = activate(context)

    def block(name: str, nbytes: int) -> Lease:
        lease = pool.take(f"graph's {name}", nbytes, DIRTY, f"the graph's {name}")
        context.set_address(name, lease.pointer)
        return lease

    names = [name for name, _ in sized.inputs]
    inputs = [block(name, nbytes) for name, nbytes in zip(names, sized.input_bytes, strict=True)]
    outputs = [block(output.port.name, output.nbytes) for output in sized.outputs]
    for port, lease in zip(plan.inputs, inputs, strict=True):
        value = np.ascontiguousarray(sample[port.name], port.dtype)
        if value.nbytes:
            _cuda.to_device(lease.pointer, value, value.nbytes, stream.handle)
    # TensorRT defers work after a change of shapes; one run keeps that work out of the graph
    if not context.execute(stream.handle):
        raise context.error()
    stream.synchronise()
    try:
        graph = CapturedGraph(
            stream,
            lambda: context.execute(stream.handle),
            [(lease.pointer, n) for lease, n in zip(inputs, sized.input_bytes, strict=True)],
            [(lease.pointer, o.nbytes) for lease, o in zip(outputs, sized.outputs, strict=True)],
        )
    except EngineError as error:
        said = context.error()
        raise EngineError(
            f"can't be captured at {sizes_text(sized.sizes, ONE_SIZE)}: {error} (loops and "
            "branches that depend on data can't be captured); the engine works without a graph",
            detail=f"{said}\n{said.detail}",
        ) from error
    finally:
        stream.synchronise()
    return Captured(sized.sizes, graph, inputs, outputs, activation, context)
