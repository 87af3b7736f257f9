"""`pipeline bench`: measures time and memory of an engine on this machine's GPU.

The engine is loaded again for each set of sizes, so that memory is measured for each alone. Inputs
and outputs stay on the GPU. Inputs are random, in their declared ranges; calls use several sets of
inputs in turn. `pipeline.commands.bench.measure` times the calls. No torch is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest, now
from pipeline.artifact.values import filled
from pipeline.commands.bench.measure import Method, Timing, input_sets, timed
from pipeline.errors import EngineError, InputError
from pipeline.runtime import engine as runtime
from pipeline.spec.dims import sizes_text
from pipeline.spec.profiles import Point, sizes_to_time

if TYPE_CHECKING:
    from pipeline.runtime.engine import Engine

Announce = Callable[[str], None]


@dataclass(frozen=True)
class PointBench:
    """The measurement of one set of sizes.

    Args:
        label: The name of the set of sizes.
        sizes: The size of each dim.
        why: Why this set of sizes was not measured; empty if it was measured.
        plain: Calls without a CUDA graph.
        graph: Calls with a CUDA graph; None if there is none, and `graph_why` says why.
        load_s, first_call_s: Seconds to load the engine, and seconds of the first call.
        memory_bytes: How much free GPU memory the engine took, without the inputs: plan, buffers,
            and what CUDA and TensorRT keep. Other processes change this number. None if more
            memory was free afterwards.
        engine_bytes: The memory that the engine itself reports, in bytes.
    """

    label: str
    sizes: Mapping[str, int]
    why: str = ""
    plain: Timing | None = None
    graph: Timing | None = None
    graph_why: str = ""
    load_s: float | None = None
    first_call_s: float | None = None
    memory_bytes: int | None = None
    engine_bytes: int | None = None


@dataclass(frozen=True)
class BenchReport:
    """All measurements of one engine, with the GPU and the date."""

    name: str
    target: str
    version: str | None
    precision: str
    gpu: str
    date: str
    method: Method
    points: tuple[PointBench, ...]

    @property
    def ok(self) -> bool:
        """True if every size was measured."""
        return not any(point.why for point in self.points)


def bench(
    place: Path,
    *,
    shapes: Sequence[str] = (),
    method: Method = Method(),  # noqa: B008  # frozen
    graph: bool = True,
    announce: Announce = lambda _: None,
    plugins: Sequence[str] = (),
    host_code: bool = False,
) -> BenchReport:
    """Measures the engine of an artifact.

    Args:
        place: The folder of the artifact.
        shapes: The sizes as text (``h=440,w=1024``). By default min, opt and max of every profile.
        method: How often calls are repeated.
        graph: Whether to measure with a CUDA graph too.
        announce: Called with each step that begins.
        plugins, host_code: The code that the engine may run; see `pipeline.load`.

    Raises:
        ArtifactError, InputError: There is no artifact, the artifact has no engine, a size is not
            legal, or the engine cannot run on a GPU of this machine.
        EngineError: No set of sizes could be measured. If only some fail, `why` has the reason.
    """
    artifact = Artifact.open(place)
    manifest = filled(artifact.manifest, place)
    declared = manifest.interface
    points = sizes_to_time(declared.dims, declared.profiles, declared.rules, shapes)

    # raises the errors of the engine before anything is measured
    how = runtime.settled(manifest, host_code)
    with runtime.load_own(place, plugins, how) as engine:
        gpu = engine.gpu
    found = []
    for point in points:
        announce(f"measure at {sizes_text(point.sizes) or 'the fixed sizes'}")
        try:
            found.append(_point(place, manifest, point, method, graph, plugins, how))
        except EngineError as error:
            found.append(PointBench(point.label, dict(point.sizes), str(error)))
    if all(point.why for point in found):
        raise EngineError(f"{place}: cannot measure any size: {found[0].why}")
    return BenchReport(
        manifest.name,
        manifest.target.name,
        manifest.target.version,
        manifest.precision,
        gpu,
        now(),
        method,
        tuple(found),
    )


def _point(
    place: Path,
    manifest: Manifest,
    point: Point,
    method: Method,
    graph: bool,
    plugins: Sequence[str],
    how: runtime.Loading,
) -> PointBench:
    from pipeline.runtime import cuda as _cuda

    stream = _cuda.Stream(blocking=False)
    _cuda.synchronise()
    before = _cuda.memory()[0]
    start = time.perf_counter()
    with runtime.load_own(place, plugins, how) as engine:
        loaded = time.perf_counter() - start
        left = _cuda.memory()[0]
        sets = [feed(engine, one) for one in input_sets(manifest.interface.inputs, point.sizes)]
        before -= left - _cuda.memory()[0]  # without the inputs

        def call(n: int) -> object:
            return engine(sets[n % len(sets)], stream=stream.handle)

        clock = EventClock(stream.handle)
        start = time.perf_counter()
        call(0)
        stream.synchronise()
        first = time.perf_counter() - start
        plain = timed(call, clock, method)
        captured, why = None, "not asked for"
        if graph:
            captured, why = _with_graph(engine, point, call, clock, method)
        _cuda.synchronise()
        taken = before - _cuda.memory()[0]
        return PointBench(
            point.label,
            dict(point.sizes),
            plain=plain,
            graph=captured,
            graph_why=why,
            load_s=loaded,
            first_call_s=first,
            memory_bytes=taken if taken > 0 else None,
            engine_bytes=engine.device_memory,
        )


def _with_graph(
    engine: Engine,
    point: Point,
    call: Callable[[int], object],
    clock: EventClock,
    method: Method,
) -> tuple[Timing | None, str]:
    try:
        engine.capture(point.sizes)
    except (EngineError, InputError) as error:
        return None, str(error)
    return timed(call, clock, method), ""


class EventClock:
    """Times calls with CUDA events on their stream."""

    def __init__(self, stream: int) -> None:
        from cuda.bindings import runtime as rt

        from pipeline.runtime.cuda import check

        self._rt, self._check, self._stream = rt, check, stream
        self._start, self._end = (check(rt.cudaEventCreate(), "making an event") for _ in range(2))

    def one(self, call: Callable[[], object]) -> float:
        return self.many(lambda _: call(), 1)

    def many(self, call: Callable[[int], object], count: int) -> float:
        rt, check = self._rt, self._check
        check(rt.cudaEventRecord(self._start, self._stream), "marking the start")
        for n in range(count):
            call(n)
        check(rt.cudaEventRecord(self._end, self._stream), "marking the end")
        check(rt.cudaEventSynchronize(self._end), "waiting for the GPU")
        return float(check(rt.cudaEventElapsedTime(self._start, self._end), "taking the time"))

    def __del__(self) -> None:
        for event in (getattr(self, "_start", None), getattr(self, "_end", None)):
            if event is not None:
                self._rt.cudaEventDestroy(event)


def feed(engine: Engine, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Copies inputs to the GPU in the engine's dtypes. Inputs that TensorRT reads on the host stay
    there."""
    ports = engine._runs.plan.inputs
    return {
        port.name: arrays[port.name] if port.on_host else OnGpu(arrays[port.name], port.dtype)
        for port in ports
    }


class OnGpu:
    """An array on the GPU with ``__cuda_array_interface__``, as other libraries have."""

    def __init__(self, array: np.ndarray, dtype: Any = None) -> None:
        from pipeline.runtime import cuda as _cuda

        array = np.ascontiguousarray(array, dtype)
        self._free, self.pointer = _cuda.free, 0
        if array.nbytes:
            self.pointer = _cuda.allocate(array.nbytes)
            if not self.pointer:
                raise EngineError(f"not enough GPU memory for an input of {array.nbytes} bytes")
            _cuda.to_device(self.pointer, array.ctypes.data, array.nbytes, 0)
            _cuda.synchronise()
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if self.pointer:
            self._free(self.pointer)


def report_text(report: BenchReport) -> str:
    """Returns the report as a table."""
    version = f" {report.version}" if report.version else ""
    lines = [
        f"{report.name}, {report.precision}, {report.target}{version} on {report.gpu}",
        "milliseconds of one call on the GPU: median (99th percentile); "
        "calls per second, with many calls at a time",
        "",
    ]
    rows = [("sizes", "", "no graph", "calls/s", "CUDA graph", "calls/s", "GPU memory", "held")]
    for point in report.points:
        sizes = sizes_text(point.sizes) or "fixed"
        if point.why:
            rows.append((sizes, point.label, f"not measured: {point.why}", "", "", "", "", ""))
            continue
        rows.append(
            (
                sizes, point.label, *_timing(point.plain), *_timing(point.graph),
                _mib(point.memory_bytes), _mib(point.engine_bytes),
            )
        )  # fmt: skip
    widths = [max(len(row[n]) for row in rows if len(row[2]) < 40) for n in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    why = {p.graph_why for p in report.points if p.graph is None and p.graph_why}
    return "\n".join([*lines, *(f"no CUDA graph: {text}" for text in sorted(why))])


def report_json(report: BenchReport) -> str:
    """Returns the report as JSON."""
    return json.dumps({"ok": report.ok, **asdict(report)}, indent=2)


def _timing(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return "-", "-"
    return f"{timing.median_ms:.3f} ({timing.p99_ms:.3f})", f"{timing.calls_per_second:.0f}"


def _mib(nbytes: Any) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.0f} MiB"
