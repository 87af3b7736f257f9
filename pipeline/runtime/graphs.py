"""Captured CUDA graphs of an engine, by sizes.

A graph holds the addresses that it was captured with. So it has inputs and outputs of its own,
with the copies into and out of them as parts of it, and keeps the activation memory that it was
captured with. It has an execution context of its own too, as NVIDIA advises (one context for each
captured graph): what a context prepared for other sizes in between would show in its results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import EngineError, InputError, OutOfMemory
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.bindings import Context, Plan
from pipeline.runtime.cuda_graph import Graph
from pipeline.runtime.pool import DIRTY, Lease, Pool
from pipeline.runtime.sizes import ONE_SIZE, Sized
from pipeline.spec.dims import sizes_text


@dataclass
class Captured:
    """A graph and all that it needs; freed with it.

    Args:
        inputs, outputs: blocks in the order of the engine's inputs and outputs.
        keep: what has to live as long as the graph.
    """

    sizes: Mapping[str, int]
    graph: Graph
    inputs: list[Lease]
    outputs: list[Lease]
    keep: tuple[Any, ...]


class Graphs:
    """The graphs that are kept: at most `most`, the least recently used goes first.

    Attributes:
        kept: by the call's key, least recently used first.
    """

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise InputError(f"graphs={most!r}: give how many to keep, 0 or more")
        self._most = most
        self.kept: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def sizes(self) -> tuple[Mapping[str, int], ...]:
        """The sizes, least recently used first."""
        kept = list(self.kept.values())  # at once: calls of other threads move them
        return tuple(dict(captured.sizes) for captured in kept)

    def find(self, key: Hashable) -> Captured | None:
        """The graph of a call, which thereby is the most recently used one."""
        found = self.kept.get(key)
        if found is not None:
            self.kept.move_to_end(key)
        return found

    def check(self) -> None:
        """Raises `InputError` where none are kept."""
        if self._most == 0:
            raise InputError("graphs=0 keeps no graphs; load the engine with more")

    def make_room(self) -> None:
        """Before one is added. Waits for the GPU where one has to go."""
        if len(self.kept) >= self._most:
            _cuda.synchronise()
            while len(self.kept) >= self._most:
                self.kept.popitem(last=False)

    def add(self, key: Hashable, captured: Captured) -> None:
        self.kept[key] = captured

    def clear(self) -> None:
        self.kept.clear()


def capture(
    plan: Plan,
    sized: Sized,
    pool: Pool,
    sample: Mapping[str, np.ndarray[Any, Any]],
    after: _cuda.Event | None,
    activate: Callable[[Context], Lease],
) -> Captured:
    """Captures a run at these sizes.

    Args:
        sample: inputs to run with before: with some others a loop might never end.
        after: what has to be over before; the activation memory is shared.
        activate: gives a context, its shapes set, the memory to compute in.

    Raises:
        EngineError: TensorRT or CUDA can't capture this network.
        OutOfMemory: there is no room for the graph's buffers.
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
            f"can't be captured at {sizes_text(sized.sizes, ONE_SIZE)}: TensorRT 8.6 gives a "
            "profile to one context, unless the engine was built with profile sharing: run "
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
    # once before, so that what a change of shapes puts off does not end up in the graph
    if not context.execute(stream.handle):
        raise context.error()
    stream.synchronise()
    try:
        graph = Graph(
            stream,
            lambda: context.execute(stream.handle),
            [(lease.pointer, n) for lease, n in zip(inputs, sized.input_bytes, strict=True)],
            [(lease.pointer, o.nbytes) for lease, o in zip(outputs, sized.outputs, strict=True)],
        )
    except EngineError as error:
        said = context.error()
        raise EngineError(
            f"can't be captured at {sizes_text(sized.sizes, ONE_SIZE)}: {error} (loops and "
            "branches by data are not to be captured)",
            detail=f"{said}\n{said.detail}",
        ) from error
    finally:
        stream.synchronise()
    return Captured(sized.sizes, graph, inputs, outputs, (context, activation))
