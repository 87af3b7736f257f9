"""Counts what an engine does: calls, sizes, errors, memory and, if switched on, GPU time.

A call adds to one number under the engine's lock. All else is worked out when somebody reads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, TypedDict

from pipeline.errors import EngineError, InputError, OutOfMemory
from pipeline.runtime.sizes import Sized

if TYPE_CHECKING:
    from pipeline.runtime.state import EngineState
    from pipeline.spec.interface import Interface

# the kinds of errors, with the exception of each; the first that fits counts
ERRORS: tuple[tuple[str, type[Exception]], ...] = (
    ("out_of_memory", OutOfMemory),
    ("input", InputError),
    ("engine", EngineError),
    ("other", Exception),
)


class SizeMetrics(TypedDict):
    """The sizes of one dim in all calls.

    Attributes:
        min, max: the smallest and the largest size; None without a call.
        sum: the sum of the sizes.
        buckets: an upper bound to the number of calls up to it and above the bound before. The
            bounds are powers of two, and the dim's max.
    """

    min: int | None
    max: int | None
    sum: int
    buckets: dict[int, int]


class TimeMetrics(TypedDict):
    """Times of calls while `Engine.timing` was True.

    Attributes:
        calls: the calls that were timed and are done.
        queue_seconds: the sum of the times from a call's start to the start of its run on the GPU.
        gpu_seconds: the sum of the times of the runs on the GPU, with a graph's copies.
    """

    calls: int
    queue_seconds: float
    gpu_seconds: float


class Metrics(TypedDict):
    """An engine's numbers since it was loaded.

    Attributes:
        calls: the calls whose run was enqueued, by profile.
        graph_calls: those of them that used a captured graph.
        errors: calls and captures that raised an error, by kind (see `ERRORS`).
        memory_retries: how often memory was short, so that the engine freed all spare memory and
            tried again.
        captured: the number of captured graphs.
        sizes: the sizes of each dim.
        memory: the bytes of GPU memory that the engine holds, by use. Their sum is
            `Engine.device_memory`. ``weights`` is the plan's size if TensorRT does not report the
            weights' size. ``activations`` is TensorRT's activation memory. ``graphs`` are inputs
            and outputs of captured graphs. ``buffers`` are those of calls: in use, or kept for the
            next call.
        time: the times of calls while `Engine.timing` was True.
    """

    calls: dict[str, int]
    graph_calls: int
    errors: dict[str, int]
    memory_retries: int
    captured: int
    sizes: dict[str, SizeMetrics]
    memory: dict[str, int]
    time: TimeMetrics


class Counters:
    """The counts of an engine's calls. Every use needs the engine's lock.

    A call adds one to its `Sized`, of which the engine keeps a limited number. `fold` and
    `fold_all` add these counts to the totals. So memory is limited, whatever the sizes are.

    Args:
        interface: the artifact's interface.
        sized: the engine's `Sized`. Before one is removed, it must be folded.
    """

    def __init__(self, interface: Interface, sized: Mapping[Hashable, Sized]) -> None:
        self._sized = sized
        self._graph_calls = 0
        self.retries = 0
        self.errors = dict.fromkeys((kind for kind, _ in ERRORS), 0)
        self.time = TimeMetrics(calls=0, queue_seconds=0.0, gpu_seconds=0.0)
        self._names = [profile.name for profile in interface.profiles]
        self._calls = dict.fromkeys(self._names, 0)
        self._sizes = {
            name: SizeMetrics(
                min=None, max=None, sum=0, buckets=dict.fromkeys(_bounds(dim.min, dim.max), 0)
            )
            for name, dim in interface.dims.items()
        }
        self._bounds = {name: list(size["buckets"]) for name, size in self._sizes.items()}

    def failed(self, error: Exception) -> None:
        """Counts an error."""
        kind = next(kind for kind, exception in ERRORS if isinstance(error, exception))
        self.errors[kind] += 1

    def fold(self, sized: Sized) -> None:
        """Adds the counts of one `Sized` to the totals."""
        calls = sized.calls + sized.graph_calls
        if not calls:
            return
        self._graph_calls += sized.graph_calls
        sized.calls = sized.graph_calls = 0
        self._calls[self._names[sized.profile]] += calls
        for name, size in sized.sizes.items():
            found, bounds = self._sizes[name], self._bounds[name]
            found["sum"] += size * calls
            found["min"] = size if found["min"] is None else min(found["min"], size)
            found["max"] = size if found["max"] is None else max(found["max"], size)
            found["buckets"][bounds[bisect_left(bounds, size)]] += calls

    def fold_all(self) -> None:
        """Adds the counts of every `Sized` to the totals."""
        for sized in self._sized.values():
            self.fold(sized)

    def read(self, memory: dict[str, int], captured: int) -> Metrics:
        """A copy of all numbers."""
        self.fold_all()
        return Metrics(
            calls=dict(self._calls),
            graph_calls=self._graph_calls,
            errors=dict(self.errors),
            memory_retries=self.retries,
            captured=captured,
            sizes={
                dim: SizeMetrics(
                    min=size["min"], max=size["max"], sum=size["sum"], buckets={**size["buckets"]}
                )
                for dim, size in self._sizes.items()
            },
            memory=memory,
            time=TimeMetrics(**self.time),
        )


def _bounds(low: int, high: int) -> list[int]:
    """The upper bounds of a dim's buckets: powers of two between its min and max, and its max."""
    powers = [1 << n for n in range(high.bit_length())]
    return [*([0] if low == 0 < high else []), *(n for n in powers if low <= n < high), high]


def count_error(runs: EngineState, error: Exception) -> None:
    """Counts an error that a call or a capture raises."""
    with runs.lock:
        runs.counters.failed(error)


def read_metrics(runs: EngineState) -> Metrics:
    """An engine's numbers; see `pipeline.runtime.engine.Engine.metrics`."""
    with runs.lock, runs.device.current():
        if runs.timing is not None:
            runs.timing.collect()
        return runs.counters.read(_memory(runs), len(runs.graphs))


def _memory(runs: EngineState) -> dict[str, int]:
    """The GPU memory of an engine, by use."""
    graphs = list(runs.graphs.kept.values())
    activations = {id(lease): lease for lease in (runs.activation, *(g.activation for g in graphs))}
    activation = sum(lease.capacity for lease in activations.values() if lease is not None)
    copies = sum(lease.capacity for g in graphs for lease in (*g.inputs, *g.outputs))
    return {
        "weights": 0 if runs.closed else runs.plan.weights,
        "activations": activation,
        "graphs": copies,
        "buffers": runs.pool.nbytes - activation - copies,
    }
