"""What an engine counts, without a GPU.

The GPU and TensorRT are pretended (`fake_cuda`, `fake_tensorrt`), and the engine is real.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_cuda import ROOMY, nothing
from fake_tensorrt import B, CallersArray, Pretend, W, make_engine

from pipeline import EngineError, InputError, OutOfMemory
from pipeline.runtime.engine import Engine

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "engines"))

from engine_overhead import counting_cost

F32 = np.float32
WIDE, NARROW = "p0", "p1"  # the profiles; NARROW has w up to 16 and its opt is 3


def run(engine: Engine, b: int, w: int) -> None:
    engine(x=np.zeros((b, w), F32), z=np.zeros(w, F32))


def test_calls_sizes_and_graphs(pretend: Pretend) -> None:
    engine = make_engine(pretend(0))
    before = engine.metrics()
    assert before["calls"] == {WIDE: 0, NARROW: 0} and before["sizes"]["w"]["min"] is None
    for w in (64, 33, 32, 3, 3):
        run(engine, 2, w)
    engine.capture({"b": 2, "w": 3})
    for _ in range(4):
        run(engine, 2, 3)
    found = engine.metrics()
    assert found["calls"] == {WIDE: 3, NARROW: 6}
    assert found["graph_calls"] == 4 and found["captured"] == 1
    buckets = {0: 0, 1: 0, 2: 0, 4: 6, 8: 0, 16: 0, 32: 1, 64: 2}
    assert found["sizes"]["w"] == {"min": 3, "max": 64, "sum": 147, "buckets": buckets}
    assert found["sizes"]["b"]["buckets"] == {0: 0, 1: 0, 2: 9, 4: 0, 8: 0}
    assert found["errors"] == {"out_of_memory": 0, "input": 0, "engine": 0, "other": 0}
    assert before["calls"] == {WIDE: 0, NARROW: 0}, "an older reading has changed"
    engine.close()
    after = engine.metrics()
    assert after["calls"] == found["calls"] and after["memory"]["weights"] == 0
    json.dumps(after)


def test_memory_by_use(pretend: Pretend) -> None:
    cuda = pretend(0)
    engine = make_engine(cuda)
    for b, w in ((1, 3), (8, 64), (2, 8)):
        engine.capture({"b": b, "w": w})
        run(engine, b, w)
        memory = engine.metrics()["memory"]
        assert sum(memory.values()) == engine.device_memory
        assert memory["weights"] == len(b"plan") and min(memory.values()) > 0
    # x and y of (8, 64), (2, 8) and (1, 3); z and s; each in blocks of 512 bytes
    assert memory["graphs"] == sum(
        512 * -(-4 * n // 512) for b, w in ((8, 64), (2, 8), (1, 3)) for n in (b * w, w, b * w, b)
    )


def test_errors_by_kind(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pretend(0)
    engine = make_engine(cuda)
    for refused in (lambda: run(engine, 2, 65), lambda: engine(y=1), lambda: engine.capture({})):
        with pytest.raises(InputError):
            refused()
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", Mock(side_effect=MemoryError))  # of the host
        with pytest.raises(MemoryError):
            run(engine, 2, 8)
    cuda.failing = 1.0
    with pytest.raises(EngineError):
        run(engine, 2, 8)
    cuda.failing = 0.0
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        run(engine, 2, 8)
    found = engine.metrics()
    assert found["errors"] == {"out_of_memory": 0, "input": 3, "engine": 2, "other": 1}
    assert sum(found["calls"].values()) == 1  # its run was enqueued before memory of the host ended


def test_out_of_memory(pretend: Pretend) -> None:
    cuda = pretend(0, limit=12 * 512)
    engine = make_engine(cuda)
    run(engine, 1, 3)
    assert engine.metrics()["memory_retries"] == 0
    for tries in (1, 2, 3):
        with pytest.raises(OutOfMemory):
            run(engine, 8, 64)
        found = engine.metrics()
        assert found["errors"]["out_of_memory"] == found["memory_retries"] == tries
    with pytest.raises(OutOfMemory):
        engine.capture({"b": 8, "w": 64})
    run(engine, 1, 3)
    found = engine.metrics()
    assert found["errors"] == {"out_of_memory": 4, "input": 0, "engine": 0, "other": 0}
    assert found["memory_retries"] == 4 and sum(found["calls"].values()) == 2
    assert sum(found["memory"].values()) - len(b"plan") <= 12 * 512


class Worker(threading.Thread):
    """Runs random sizes, some of them too large, and counts what it did."""

    def __init__(self, engines: Sequence[Engine], seed: int, calls: int) -> None:
        super().__init__(daemon=True)
        self.engines, self.random, self.steps = engines, random.Random(seed), calls
        self.calls: Counter[int] = Counter()
        self.sizes: Counter[tuple[int, str, int]] = Counter()
        self.errors: Counter[tuple[int, str]] = Counter()

    def run(self) -> None:
        for _ in range(self.steps):
            place = self.random.randrange(len(self.engines))
            b, w = self.random.randrange(B[2] + 2), self.random.randrange(W[2] + 8)
            try:
                run(self.engines[place], b, w)
            except OutOfMemory:
                self.errors[place, "out_of_memory"] += 1
            except InputError:
                self.errors[place, "input"] += 1
            except EngineError:
                self.errors[place, "engine"] += 1
            else:
                self.calls[place] += 1
                self.sizes[place, "b", b] += 1
                self.sizes[place, "w", w] += 1
            if self.random.random() < 0.1:
                self.engines[place].metrics()
            if self.random.random() < 0.05:
                self.engines[place].timing = self.random.random() < 0.5


@pytest.mark.parametrize(("seed", "limit"), [(0, ROOMY), (1, 24 * 512), (2, 16 * 512)])
def test_the_sums_of_many_threads_are_exact(pretend: Pretend, seed: int, limit: int) -> None:
    cuda = pretend(seed, limit=limit)
    engines = [make_engine(cuda) for _ in range(2)]
    workers = [Worker(engines, 100 * seed + n, 120) for n in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    gc.enable()
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not any(worker.is_alive() for worker in workers)
    calls, sizes, errors = (
        sum((getattr(worker, name) for worker in workers), Counter())
        for name in ("calls", "sizes", "errors")
    )
    assert sum(calls.values()) + sum(errors.values()) == 8 * 120
    assert errors[0, "input"] > 0 and (limit == ROOMY or errors[0, "out_of_memory"] > 0)
    for place, engine in enumerate(engines):
        found = engine.metrics()
        assert sum(found["calls"].values()) == calls[place] > 0
        for kind in found["errors"]:
            assert found["errors"][kind] == errors[place, kind], kind
        for dim in "bw":
            mine = {n: c for (at, name, n), c in sizes.items() if (at, name) == (place, dim)}
            assert found["sizes"][dim]["sum"] == sum(n * c for n, c in mine.items())
            assert found["sizes"][dim]["min"] == min(mine)
            assert found["sizes"][dim]["max"] == max(mine)
            low = -1
            for bound, count in found["sizes"][dim]["buckets"].items():
                assert count == sum(c for n, c in mine.items() if low < n <= bound)
                low = bound


def test_endless_sizes_take_limited_memory(pretend: Pretend) -> None:
    engine = make_engine(pretend(0))
    every = list(itertools.product(range(B[2] + 1), range(W[2] + 1)))
    assert len(every) > 512, "too few sizes to forget any"
    for turn in range(2):
        for b, w in every:
            run(engine, b, w)
            assert len(engine._runs.counters._sized) <= 512
        # a new size adds only the removed one's count to the totals: all 512 would take 15 us
        assert sum(sized.calls for sized in engine._runs._sized.values()) == 512
        found = engine.metrics()
        assert sum(found["calls"].values()) == (turn + 1) * len(every)
        for place, dim in enumerate("bw"):
            assert found["sizes"][dim]["sum"] == (turn + 1) * sum(at[place] for at in every)
    assert len(found["sizes"]["b"]["buckets"]) + len(found["sizes"]["w"]["buckets"]) == 13


# times


def test_the_times_of_a_call(pretend: Pretend) -> None:
    cuda = pretend(0, eager=0)
    engine, stream = make_engine(cuda), cuda.make_stream(blocking=False)
    x, z = (CallersArray(cuda, np.zeros(shape, F32)) for shape in ((2, 5), (5,)))
    assert engine.timing is False
    engine(x=x, z=z, stream=stream)
    cuda.cudaStreamSynchronize(stream)
    engine.timing = True
    for _ in range(5):
        cuda.enqueue(nothing, stream)
    engine(x=x, z=z, stream=stream)
    assert engine.metrics()["time"] == {"calls": 0, "queue_seconds": 0, "gpu_seconds": 0}
    submitted = engine._runs.timing.pending[0][0]  # type: ignore[union-attr]
    submitted.synchronise()  # the GPU reaches it at once: its stream has no other work
    cuda.cudaStreamSynchronize(stream)
    # five operations, a wait for the first call, and the event; then the network's three operations
    # and the event
    assert engine.metrics()["time"] == times(1, 0.007, 0.004)
    engine.capture({"b": 2, "w": 5})
    engine(x=x, z=z, stream=stream)
    cuda.cudaStreamSynchronize(stream)
    cuda.finish()
    found = engine.metrics()["time"]
    assert found["calls"] == 2 and found["queue_seconds"] == pytest.approx(
        0.007
    )  # begun before it was submitted
    assert found["gpu_seconds"] >= 0.004 + 0.008  # the graph copies two inputs and two outputs
    engine.timing = False
    engine(x=x, z=z, stream=stream)
    cuda.finish()
    assert engine.metrics()["time"] == found
    engine.timing = True
    engine(x=x, z=z, stream=stream)
    engine.close()
    assert engine.metrics()["time"]["calls"] == 3 and engine.timing is False
    with pytest.raises(EngineError, match="closed"):
        engine.timing = True


def times(calls: int, queue: float, gpu: float) -> dict[str, Any]:
    return {
        "calls": calls,
        "queue_seconds": pytest.approx(queue),
        "gpu_seconds": pytest.approx(gpu),
    }


def test_a_long_queue_is_timed_in_part(pretend: Pretend) -> None:
    cuda = pretend(0, eager=0)
    engine, stream = make_engine(cuda), cuda.make_stream(blocking=False)
    engine.timing = True
    x, z = (CallersArray(cuda, np.zeros(shape, F32)) for shape in ((2, 5), (5,)))
    for _ in range(300):
        engine(x=x, z=z, stream=stream)
    assert len(engine._runs.timing.pending) == 256  # type: ignore[union-attr]
    cuda.finish()
    assert engine.metrics()["time"]["calls"] == 256
    engine(x=x, z=z, stream=stream)
    cuda.finish()
    found = engine.metrics()
    assert found["time"]["calls"] == 257 and sum(found["calls"].values()) == 301


# the cost


def test_counting_costs_little(pretend: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is loose, because the machine may be busy. tests/gpu compares with real calls."""
    engine = make_engine(pretend(0))
    run(engine, 2, 8)
    for graph in (False, True):
        cost = counting_cost(engine, graph=graph)
        with capsys.disabled():
            print(f"\ncounting a call{' with a graph' * graph}: {cost * 1e9:.0f} ns")
        assert 0 < cost < 2e-6
    assert sum(engine.metrics()["calls"].values()) == 1
