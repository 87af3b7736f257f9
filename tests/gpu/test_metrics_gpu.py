"""What an engine counts on a GPU, and what counting costs."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gpu_engines import Busy, Loaded, OnGpu, handles, picture
from on_gpu import ALONE, TARGET, WHY

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "engines"))

from engine_overhead import counting_cost

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TARGET is None, reason=WHY)]
CALLS = 500


def test_times_are_those_of_the_gpu(loaded: Loaded, busy: Busy) -> None:
    """A call waits for the work before it on its stream, and runs as long as CUDA's events say."""
    from pipeline.runtime import cuda as _cuda

    engine, (stream, _) = loaded("PICTURE"), handles()
    x = OnGpu(picture(96, 96))
    engine(x=x, stream=stream)
    _cuda.synchronise()
    engine.timing = True
    events = _cuda.Events(timing=True)
    before = events.take(stream)
    busy(stream)
    after = events.take(stream)
    outputs = engine(x=x, stream=stream)
    _cuda.synchronise()
    found, waited = engine.metrics()["time"], _cuda.elapsed(before, after)
    assert found["calls"] == 1 and waited > 1e-3
    # the call starts while the stream is busy, at most a few milliseconds after `before`
    assert 0.5 * waited < found["queue_seconds"] < 1.1 * waited + 1e-3
    assert 0 < found["gpu_seconds"] < waited
    del before, after, outputs
    events.close()


def test_memory_grows_with_graphs(loaded: Loaded) -> None:
    engine = loaded("PICTURE")
    engine(x=picture(50, 50))
    engine.capture({"h": 96, "w": 96})
    memory = engine.metrics()["memory"]
    assert sum(memory.values()) == engine.device_memory and min(memory.values()) > 0


@ALONE
def test_counting_takes_less_than_one_percent_of_a_call(
    loaded: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counting code alone against whole calls at the smallest size, with and without a graph.

    There is no way to switch counting off, so the code that counts is measured by itself.
    """
    from pipeline.runtime import cuda as _cuda

    engine, (stream, _) = loaded("PICTURE"), handles()
    x = OnGpu(np.zeros((1, 3, 4, 4), np.float32))
    for graph in (False, True):
        if graph:
            engine.capture({"h": 4, "w": 4})
        taken = []
        for _ in range(CALLS):
            start = time.perf_counter()
            engine(x=x, stream=stream)
            taken.append(time.perf_counter() - start)
            _cuda.synchronise()
        call, cost = statistics.median(taken), counting_cost(engine, graph=graph)
        with capsys.disabled():
            print(f"\ncounting {cost * 1e9:.0f} ns of a call of {call * 1e6:.1f} us")
        assert cost < 0.01 * call


@ALONE
def test_the_cost_of_timing(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    """Timing is off at first, because it costs host time. Ten rounds of both kinds take turns."""
    from pipeline.runtime import cuda as _cuda

    engine, (stream, _) = loaded("PICTURE"), handles()
    x = OnGpu(np.zeros((1, 3, 4, 4), np.float32))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for n in range(2 * CALLS):
        on = engine.timing = n // 50 % 2 == 1
        start = time.perf_counter()
        engine(x=x, stream=stream)
        taken[on].append(time.perf_counter() - start)
        _cuda.synchronise()
    without, timed = (statistics.median(taken[on]) * 1e6 for on in (False, True))
    with capsys.disabled():
        print(f"\na call takes {without:.1f} us, and {timed:.1f} us with timing")
    engine.timing = False
    assert engine.metrics()["time"]["calls"] == CALLS
