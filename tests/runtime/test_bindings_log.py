"""TensorRT's messages, assigned to the thread of the call.

Uses the real TensorRT-RTX. The out-of-memory text is passed to its logger by hand.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from pipeline.errors import EngineError, OutOfMemory
from pipeline.runtime.bindings import Log

trt = pytest.importorskip("tensorrt_rtx")
FULL = "Error Code 2: OutOfMemory (Requested size was 9 GiB)"


@pytest.fixture
def log() -> Log:
    """The log of engines."""
    log = Log.of(trt)
    log.clear()
    return log


@pytest.fixture
def other() -> Any:
    """Runs code in another thread, which is always the same."""
    with ThreadPoolExecutor(1) as pool:

        def call(work: Callable[[], Any]) -> Any:
            return pool.submit(work).result()

        yield call


def fails(log: Log) -> None:
    """A call of TensorRT that fails."""
    assert trt.Runtime(log.logger).deserialize_cuda_engine(b"no plan" * 100) is None


def complains(log: Log, text: str) -> None:
    log.logger.log(trt.ILogger.ERROR, text)


def test_tensorrt_complains_in_the_calling_thread(log: Log, other: Any) -> None:
    other(lambda: fails(log))
    assert str(log.error("here")) == "here: TensorRT reports: no reason given"
    assert "erialization" in str(other(lambda: log.error("there")))


@pytest.mark.parametrize("between", [fails, Log.clear, lambda log: log.error("other")])
def test_what_another_thread_does_takes_nothing_away(
    log: Log, other: Any, between: Callable[[Log], Any]
) -> None:
    complains(log, FULL)
    other(lambda: between(log))
    error = log.error("running")
    assert isinstance(error, OutOfMemory)
    assert str(error) == f"running: out of GPU memory: {FULL}"
    assert error.detail == FULL


def test_another_threads_lack_of_memory_is_not_ours(log: Log, other: Any) -> None:
    other(lambda: complains(log, FULL))
    error = log.error("running")
    assert type(error) is EngineError and FULL not in str(error)
    assert isinstance(other(lambda: log.error("there")), OutOfMemory)


def test_many_lines_of_others_push_nothing_out(log: Log, other: Any) -> None:
    complains(log, FULL)
    for n in range(100):
        other(partial(complains, log, f"line {n}"))
    assert isinstance(log.error("running"), OutOfMemory)


def test_an_error_is_told_once(log: Log) -> None:
    complains(log, FULL)
    log.error("running")
    assert str(log.error("again")) == "again: TensorRT reports: no reason given"


def test_a_thread_that_is_not_pythons(log: Log) -> None:
    """Its messages go to an error without a message."""
    for own in (True, False):
        done = threading.Event()

        def work(done: threading.Event = done) -> None:
            complains(log, FULL)
            done.set()

        _thread.start_new_thread(work, ())
        assert done.wait(10)
        if own:
            complains(log, "a bad size")
        assert isinstance(log.error("running"), OutOfMemory) is not own


def test_warnings_are_no_complaints(log: Log) -> None:
    log.logger.log(trt.ILogger.WARNING, FULL)
    assert type(log.error("running")) is EngineError
