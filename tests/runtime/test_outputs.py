"""The outputs of an engine, without a GPU: which streams wait, and for how long.

Streams are recorded, not run. On a GPU: tests/gpu/test_device_arrays.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_engine_loading import F32, Host, X

from pipeline.errors import EngineError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.bindings import _allocator_class
from pipeline.runtime.device_array import DeviceArray
from pipeline.runtime.outputs import Done, prepare, take_over
from pipeline.runtime.pool import DIRTY, Pool

OWN, A, B = 100, 101, 102  # streams


class Told(_cuda.Event):
    """An event that records who had to wait for it."""

    __slots__ = ("waiting",)

    def __init__(self, engine: Any) -> None:
        super().__init__(0, engine)
        self.waiting: list[int] = []

    def wait(self, stream: int) -> None:
        self.waiting.append(stream)


def some_engine() -> Any:
    """The engine that events return to. Each engine has its events."""
    return _cuda.Events()


def output(pool: Pool, stream: int, event: _cuda.Event) -> DeviceArray:
    device: Any = SimpleNamespace(
        index=0, own=SimpleNamespace(handle=OWN), current=nullcontext, events=None
    )
    return DeviceArray(pool.take("y", 40, stream), (10,), F32, device, event)


@pytest.fixture
def pool() -> Pool:
    return Pool(Host(total=1 << 20))


def test_an_engine_on_another_stream_is_waited_for(pool: Pool) -> None:
    mine, one, two = some_engine(), some_engine(), some_engine()
    done = Told(mine)
    y = output(pool, A, done)
    assert not y.enter(A) and done.waiting == []
    assert y.enter(B) and done.waiting == [B]
    last = {id(engine): Told(engine) for _ in range(1000) for engine in (one, two)}
    for _ in range(1000):
        for engine in (one, two):
            last[id(engine)] = Told(engine)
            y.used_until(last[id(engine)])
    # an engine's runs wait for each other, so the end of the last run is the end of all
    assert sorted(map(id, y._lease.after)) == sorted(map(id, last.values()))
    pointer = y.ptr
    del y
    assert pool.take("y", 40, A).pointer == pointer
    assert all(event.waiting == [A] for event in last.values())


def test_an_output_that_is_written_again(pool: Pool) -> None:
    mine, other = some_engine(), some_engine()
    first, second = Told(mine), Told(other)
    y = output(pool, A, first)
    y.written(B, second)
    assert not second.waiting
    assert y.enter(A) is False and second.waiting == [A]  # the block still returns to A
    assert y.enter(B) is True and second.waiting == [A]
    y.ready_for(OWN)
    assert second.waiting == [A, OWN]
    assert y.__cuda_array_interface__["stream"] == OWN and second.waiting == [A, OWN, OWN]
    assert first.waiting == []
    pointer = y.ptr
    y._lease.after = [moment for moment in y._lease.after if moment is second]
    del y
    assert pool.take("y", 40, A).pointer == pointer
    assert second.waiting == [A, OWN, OWN, A]


def test_readers_of_the_same_stream_are_one(pool: Pool) -> None:
    y = output(pool, A, Told(some_engine()))
    for _ in range(3):
        for stream in (A, B, OWN):
            y.ready_for(stream)
    assert [getattr(reader, "stream", None) for reader in y._lease.after] == [B, OWN]
    y._lease.after.clear()  # freeing them needs a GPU


def test_a_consumer_that_names_no_stream(pool: Pool) -> None:
    y = output(pool, A, Told(some_engine()))
    y.ready_for(-1)
    assert y._lease.stream == DIRTY and y._lease.after == []


def test_an_allocator_is_asked_between_runs_too(pool: Pool) -> None:
    """8.6.0 calls it when sizes are set, and fails the next run without memory (on an H200)."""
    allocator = _allocator_class(pytest.importorskip("tensorrt_rtx"))()

    def ask() -> int:
        return int(allocator.reallocate_output("x", 0, 40, 256))

    def run(stream: int, count: int, *, asks: bool) -> Done:
        done = Done(X, (), None)
        prepare(allocator, "x", pool, stream, None)
        assert not asks or ask()
        allocator.notify_shape("x", (count,))
        take_over(done, allocator, stream)
        return done

    assert ask() == 0  # before a run, no call has set the stream
    first = run(A, 10, asks=True)
    given = ask()
    assert first.lease is not None and given not in (0, first.lease.pointer)
    assert ask() == given  # not a single block more
    second = run(B, 10, asks=False)
    assert second.lease is not None
    assert (second.lease.pointer, second.lease.stream, second.shape) == (given, B, (10,))
    with pytest.raises(
        EngineError, match=r"output x: TensorRT reports the shape \[10\] but asked for less memory"
    ):
        run(B, 10, asks=False)
    assert ask() not in (0, given, first.lease.pointer)
    assert run(A, 7, asks=True).lease is not None
    np.testing.assert_array_equal(first.shape, (10,))
    allocator.spare = None
    del first, second
    pool.close()
    assert pool.nbytes == 0
