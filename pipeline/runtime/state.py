"""The runs of an engine, one after the other: the part of `Engine` that needs its lock.

All runs share one activation buffer, and all runs in one profile share an execution context. So
each run waits for the run before, whichever stream that was on. Each run's outputs have separate
blocks, which the pool reuses when nobody holds them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipeline.errors import EngineError, OutOfMemory
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.array_interface import KnownArrays
from pipeline.runtime.bindings import Context, LoadedPlan
from pipeline.runtime.graphs import Captured, Graphs, capture
from pipeline.runtime.hold import Held
from pipeline.runtime.metrics import Counters
from pipeline.runtime.outputs import Result, caller_memory, finish, prepare
from pipeline.runtime.pool import DIRTY, QUIET, Lease, Pool
from pipeline.runtime.sizes import ONE_SIZE, EngineSizes, OutputAtSizes, Shape, Sized
from pipeline.runtime.timing import Timer, Timing
from pipeline.spec.dims import sizes_text

_MOST_SIZES = 512  # sets of sizes that are remembered
_POISON = 0xFF  # float32, float16: NaN; int: -1
_ACTIVATION = "activation memory"


class EngineState:
    """The state of a loaded engine.

    Args:
        graphs: how many captured graphs to keep.

    Attributes:
        first: the first input that TensorRT reads on the GPU; None if it reads all on the host.
        poison: whether to fill outputs with `_POISON` before each run.
        held: inputs of calls that are not done yet.
        known: arrays that are known to be on the GPU.
        shared: whether another thread's run has ever come between a run and its copies to the host.
        forced: the profile to run in; None for the best one.
        activation: the activation memory of the next run.
        timing: measures the calls; None if that is off.
    """

    def __init__(
        self, plan: LoadedPlan, sizes: EngineSizes, device: _cuda.Device, graphs: int
    ) -> None:
        self.plan, self.sizes, self.device = plan, sizes, device
        self.graphs = Graphs(graphs)
        self.poison = False
        self.forced: int | None = None
        self.closed = self.shared = False
        self.lock = threading.Lock()
        self.names = tuple(port.name for port in plan.inputs)
        self._whats = tuple(f"input {name}" for name in self.names)
        self.first = next((port.name for port in plan.inputs if not port.on_host), None)
        itemsizes = {port.name: port.dtype.itemsize for port in (*plan.inputs, *plan.outputs)}
        most = sizes.most_bytes(itemsizes)
        copies = {f"graph's {name}": nbytes for name, nbytes in most.items()}
        self.pool = Pool(_cuda, {**most, **copies, _ACTIVATION: max(plan.activation, 1)})
        self._own, self._events = device.own.handle, device.events
        self._nothing = self.pool.take("nothing", 1, QUIET)  # the address of empty arrays
        self._contexts: dict[int, Context] = {}
        self._sized: dict[Hashable, Sized] = {}
        self.activation: Lease | None = None
        self._generation = 0
        self._last: tuple[int, _cuda.Event] | None = None
        self.held, self.known = Held(), KnownArrays(device.index)
        self.counters = Counters(sizes.interface, self._sized)
        self.timing: Timing | None = None

    def capture(self, asked: Mapping[str, int]) -> None:
        """Captures a graph for these sizes; see `pipeline.runtime.engine.Engine.capture`."""
        sizes = self.sizes.check(asked)
        shapes = self.sizes.input_shapes(sizes)
        at = f"can't be captured at {sizes_text(sizes, ONE_SIZE)}"
        for port in self.plan.inputs:
            if port.on_host:
                raise EngineError(
                    f"{at}: TensorRT computes sizes on the host from {port.name}'s values"
                )
        with self.lock:
            self._check_open()
            key: Hashable = (tuple(shapes[name] for name in self.names), (), self.forced)
            sized = self._solved(key, [shapes[name] for name in self.names], [])
            for output in sized.outputs:
                if output.shape is None:
                    raise EngineError(f"{at}: the shape of {output.port.name} depends on the data")
            if self.graphs.find(key) is not None:
                return
            self.graphs.check()
            made = None
            with suppress(OutOfMemory):
                made = self._captured(sized)
            if made is None:
                self.counters.retries += 1
                self.pool.trim()
                self.graphs.make_room()
                made = self._captured(sized)
            self.graphs.make_room()
            self.graphs.add(key, made)

    def _captured(self, sized: Sized) -> Captured:
        after = None if self._last is None else self._last[1]
        sample = self.sizes.sample(sized.sizes)
        return capture(self.plan, sized, self.pool, sample, after, self._activate)

    def time(self, on: bool) -> None:
        """Switches `timing` on or off."""
        with self.lock:
            if self.timing is not None and not on:
                self.timing.close()
                self.timing = None
            elif self.timing is None and on:
                self._check_open()
                self.timing = Timing(self.counters.time)

    def close(self) -> None:
        """Frees everything except the blocks of outputs that somebody holds."""
        with self.lock, self.device.current():
            if self.closed:
                return
            self.closed = True
            with suppress(EngineError):
                _cuda.synchronise()
            if self.timing is not None:
                self.timing.close()
            self.timing = None
            self.graphs.clear()
            self._contexts.clear()
            self.counters.fold_all()
            self._sized.clear()
            self.held.clear()
            self._last = self.activation = None
            del self._nothing
            self.plan.engine = self.plan.runtime = None
            with suppress(EngineError):
                self.pool.close()
            self.device.events.close()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed; load it again")

    def run(
        self,
        shapes: Sequence[Shape],
        values: tuple[bytes, ...],
        places: Sequence[Any],
        stream: int,
        out: Mapping[str, Any],
        timer: Timer | None,
    ) -> tuple[list[Result], _cuda.Event]:
        """Enqueues one run; if memory is short, frees all spare memory and tries again.

        Args:
            shapes: the inputs' shapes.
            values: the bytes of the inputs that TensorRT reads on the host.
            places: for each input its address, or a numpy array to copy to the GPU.
            stream: the handle of the stream to run on.
            out: the caller's arrays to write outputs into.
            timer: measures the run.
        """
        if self.closed:
            self._check_open()
        key = (tuple(shapes), values, self.forced)
        try:
            return self._once(key, shapes, places, stream, out, timer)
        except OutOfMemory:
            pass  # leaving the block drops the error's frames, which hold blocks
        self.counters.retries += 1
        self.pool.trim()
        try:
            return self._once(key, shapes, places, stream, out, timer)
        except OutOfMemory as error:
            said, wanted, left = str(error), error.wanted, error.free
        # raised outside of the block: the first error's frames hold the outputs' blocks
        sizes = self.sizes.solve(dict(zip(self.names, shapes, strict=True)))
        raise OutOfMemory(
            f"at {sizes_text(sizes, ONE_SIZE)}: {said}; the engine still works at smaller sizes",
            wanted=wanted,
            free=left,
        )

    def _once(
        self,
        key: Hashable,
        shapes: Sequence[Shape],
        places: Sequence[Any],
        stream: int,
        out: Mapping[str, Any],
        timer: Timer | None,
    ) -> tuple[list[Result], _cuda.Event]:
        if self.plan.log.spoke:
            self.plan.log.clear()
        sized = self._sized.get(key) or self._solved(key, shapes, places)
        pointers: list[int] = []
        staged: list[Lease] = []
        for place in places:
            if type(place) is int:
                pointers.append(place or self._nothing.pointer)
                continue
            lease = self._staged(sized, len(pointers), place, stream)
            staged.append(lease)
            pointers.append(lease.pointer)
        targets = caller_memory(sized, out, pointers, self.known, stream) if out else {}
        if self._last is not None:
            before, event = self._last
            if not before == stream == self._own:
                event.wait(stream)
        captured = self.graphs.find(key) if self.graphs.kept else None
        try:
            if timer is not None:
                timer.begin(stream)
            if captured is None:
                done = self._enqueue(sized, pointers, targets, stream)
            else:
                done = self._replay(sized, captured, pointers, targets, stream)
            if timer is not None:
                timer.end(stream)
            event = self._events.take(stream)
        except BaseException:  # the next run can't wait for the part that is already enqueued
            with suppress(EngineError):
                _cuda.synchronise()
            raise
        self._last = (stream, event)
        if captured is None:
            sized.calls += 1
        else:
            sized.graph_calls += 1
        return done, event

    def _staged(self, sized: Sized, place: int, array: Any, stream: int) -> Lease:
        """Starts to copy an input to the GPU, and returns its block."""
        nbytes = sized.input_bytes[place]
        lease = self.pool.take(self.names[place], nbytes, stream, self._whats[place])
        if nbytes:
            _cuda.to_device(lease.pointer, array, nbytes, stream)
        return lease

    def last(self, event: _cuda.Event) -> bool:
        """Whether the event's run is still the last one."""
        last = self._last  # read once: another thread may close the engine
        return last is not None and last[1] is event

    def _enqueue(
        self, sized: Sized, pointers: Sequence[int], targets: Mapping[str, int], stream: int
    ) -> list[Result]:
        context = self._contexts.get(sized.profile) or self._context(sized.profile)
        if context.ready is not sized or context.generation != self._generation:
            self._set(context, sized, pointers)
        addresses, pool = context.addresses, self.pool
        for place, name in enumerate(self.names):
            if addresses.get(name) != pointers[place]:
                context.set_address(name, pointers[place])
        plain = not (targets or self.poison)
        done: list[Result] = []
        by_data: dict[str, Any] = {}
        lease: Lease | None
        for output in sized.outputs:
            port, shape = output.port, output.shape
            name = port.name
            if shape is None:
                by_data[name] = allocator = context.allocator(name)
                prepare(allocator, name, pool, stream, _POISON if self.poison else None)
                done.append((port, (), None))
                continue
            if plain:
                lease = pool.take(name, output.nbytes, stream, output.what)
                pointer = lease.pointer
            else:
                lease, pointer = self._place(output, targets, stream)
            if addresses.get(name) != pointer:
                context.set_address(name, pointer)
            done.append((port, shape, lease))
        if not context.execute(stream):
            raise self._failure(sized.profile, context, by_data)
        if by_data:
            done = [
                finish(r, by_data[r[0].name], sized, self.sizes, stream)
                if r[0].name in by_data
                else r
                for r in done
            ]
        return done

    def _set(self, context: Context, sized: Sized, pointers: Sequence[int]) -> None:
        """Sets a context's sizes."""
        context.set_shapes(sized.inputs)
        for port, pointer in zip(self.plan.inputs, pointers, strict=True):
            if port.on_host:
                context.set_address(port.name, pointer)
        if context.sized or context.generation != self._generation:
            self._activate(context)
        context.ready = sized

    def _replay(
        self,
        sized: Sized,
        captured: Captured,
        pointers: Sequence[int],
        targets: Mapping[str, int],
        stream: int,
    ) -> list[Result]:
        if self.poison:
            for block in captured.outputs:
                _cuda.fill(block.pointer, _POISON, block.capacity, stream)
        done: list[Result] = []
        into: list[int] = []
        for output in sized.outputs:
            lease, pointer = self._place(output, targets, stream)
            into.append(pointer)
            done.append((output.port, output.shape or (), lease))
        captured.graph.launch(stream, pointers, into)
        return done

    def _place(
        self, output: OutputAtSizes, targets: Mapping[str, int], stream: int
    ) -> tuple[Lease | None, int]:
        """Chooses an output's memory: the caller's, or a block."""
        name = output.port.name
        lease = None
        if name in targets:
            pointer = targets[name] or self._nothing.pointer
        else:
            lease = self.pool.take(name, output.nbytes, stream, output.what)
            pointer = lease.pointer
        if self.poison and output.nbytes:
            _cuda.fill(pointer, _POISON, output.nbytes, stream)
        return lease, pointer

    def _context(self, profile: int) -> Context:
        if profile not in self._contexts:
            own = self.device.own
            self._contexts[profile] = Context(self.plan, profile, own.handle)
            own.synchronise()  # the profile is chosen on this stream, but runs may be on others
        return self._contexts[profile]

    def _solved(self, key: Hashable, shapes: Sequence[Shape], places: Sequence[Any]) -> Sized:
        """Checks the inputs' shapes and works out the outputs' shapes."""
        known = self._sized.get(key)
        if known is not None:
            return known
        named = dict(zip(self.names, shapes, strict=True))
        sizes = self.sizes.solve(named)
        profile = self.sizes.profile(sizes, self.forced)
        context = self._context(profile)
        context.set_shapes(tuple(named.items()))
        for port, place in zip(self.plan.inputs, places, strict=False):
            if port.on_host:
                context.set_address(port.name, place)
        found = context.output_shapes()
        outputs = []
        for port in self.plan.outputs:
            shape, nbytes = found[port.name], 0
            if shape is not None:
                self.sizes.check_output(port.name, shape, sizes)
                nbytes = math.prod(shape) * port.dtype.itemsize
            outputs.append(OutputAtSizes(port, shape, nbytes, f"output {port.name}"))
        input_bytes = tuple(
            math.prod(shape) * port.dtype.itemsize
            for port, shape in zip(self.plan.inputs, shapes, strict=True)
        )
        if len(self._sized) >= _MOST_SIZES:
            oldest = next(iter(self._sized))
            self.counters.fold(self._sized[oldest])
            del self._sized[oldest]
        self._sized[key] = Sized(
            key, sizes, profile, tuple(named.items()), input_bytes, tuple(outputs)
        )
        return self._sized[key]

    def _activate(self, context: Context) -> Lease:
        """Sets the activation memory of a context whose shapes are set; grows it if needed.

        The engine has one such block. A graph may keep an older, smaller one.
        """
        need = max(context.activation_bytes(), 1)
        if self.activation is None or self.activation.capacity < need:
            self.activation = None
            self._generation += 1
            self.activation = self.pool.take(_ACTIVATION, need, DIRTY)
        context.set_activation(self.activation.pointer, self.activation.capacity)
        context.generation = self._generation
        return self.activation

    def _failure(self, profile: int, context: Context, by_data: Mapping[str, Any]) -> EngineError:
        """Returns a failed run's error, and drops the context, whose state is unknown."""
        own = next((a.error for a in by_data.values() if a.error is not None), None)
        with suppress(EngineError):
            _cuda.synchronise()
        self._contexts.pop(profile, None)
        error: EngineError = own or context.error()
        return error
