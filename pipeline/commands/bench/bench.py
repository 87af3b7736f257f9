"""`pipeline bench`: what an engine takes at the sizes that matter, measured on the GPU here.

Every size has an engine loaded for it alone, so that its memory is its own. Inputs lie on the GPU,
random ones in the range that each declares, several sets in turn; a call gives its results there.
How calls are timed: `pipeline.commands.bench.measure`. Needs no torch.
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
    """One set of sizes; `why` is empty where it was measured.

    Args:
        plain: calls without a CUDA graph.
        graph: calls with one; None where there is none, and `graph_why` says why.
        load_s, first_call_s: seconds until the engine was loaded, and its first call done.
        memory_bytes: what the engine took of the GPU: plan, buffers and all that CUDA and
            TensorRT keep beside them, without the inputs. It is what the GPU has less of, so that
            other processes' doings are in it; None if they left it more than before.
        engine_bytes: what the engine itself knows of.
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
    """What was measured where, and when."""

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
) -> BenchReport:
    """Measures the engine of an artifact.

    Args:
        place: the artifact's folder.
        shapes: the sizes, as text; none means min, opt and max of every profile.
        method: how often calls are repeated.
        graph: also measure with CUDA graphs.
        plugins: files that the engine may load; see `pipeline.load`.

    Raises:
        ArtifactError, InputError: no artifact, no engine in it, a size that is not legal, or
            no GPU here that it runs on.
        EngineError: the engine does not load or does not run; a size that is too large for the
            GPU's memory is no error: its `why` says so.
    """
    artifact = Artifact.open(place)
    manifest = artifact.manifest
    declared = manifest.interface
    points = sizes_to_time(declared.dims, declared.profiles, declared.rules, shapes)

    # says what stands in the way before anything is measured
    with runtime.load(place, plugins=plugins) as engine:
        gpu = engine.gpu
    found = []
    for point in points:
        announce(f"measuring at {sizes_text(point.sizes) or 'its fixed sizes'}")
        try:
            found.append(_point(place, manifest, point, method, graph, plugins))
        except EngineError as error:
            found.append(PointBench(point.label, dict(point.sizes), str(error)))
    if all(point.why for point in found):
        raise EngineError(f"{place}: no size could be measured: {found[0].why}")
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
) -> PointBench:
    from pipeline.runtime import cuda as _cuda

    stream = _cuda.Stream(blocking=False)
    _cuda.synchronise()
    before = _cuda.memory()[0]
    start = time.perf_counter()
    with runtime.load(place, plugins=plugins) as engine:
        loaded = time.perf_counter() - start
        left = _cuda.memory()[0]
        sets = [feed(engine, one) for one in input_sets(manifest.interface.inputs, point.sizes)]
        before -= left - _cuda.memory()[0]  # the inputs are not the engine's

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
    """Times calls by CUDA events on their stream."""

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
    """Inputs on the GPU, in the dtypes that its TensorRT reads; those that it reads on the host
    as they are."""
    ports = engine._runs.plan.inputs
    return {
        port.name: arrays[port.name] if port.on_host else OnGpu(arrays[port.name], port.dtype)
        for port in ports
    }


class OnGpu:
    """An array on the GPU, as other libraries hand theirs over (``__cuda_array_interface__``)."""

    def __init__(self, array: np.ndarray, dtype: Any = None) -> None:
        from pipeline.runtime import cuda as _cuda

        array = np.ascontiguousarray(array, dtype)
        self._free, self.pointer = _cuda.free, 0
        if array.nbytes:
            self.pointer = _cuda.allocate(array.nbytes)
            if not self.pointer:
                raise EngineError(
                    f"the inputs need {array.nbytes} bytes more than the GPU has free"
                )
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
    """The report as a table."""
    version = f" {report.version}" if report.version else ""
    lines = [
        f"{report.name}, {report.precision}, {report.target}{version} on {report.gpu}",
        "milliseconds on the GPU, one call at a time: median (99 of 100 are below); "
        "calls a second, many in flight",
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
    """The report for machines."""
    return json.dumps({"ok": report.ok, **asdict(report)}, indent=2)


def _timing(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return "-", "-"
    return f"{timing.median_ms:.3f} ({timing.p99_ms:.3f})", f"{timing.calls_per_second:.0f}"


def _mib(nbytes: Any) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.0f} MiB"
