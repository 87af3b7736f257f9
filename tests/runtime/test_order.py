"""The order of an engine's work, without a GPU. The numbers are right in every allowed order.

The GPU and TensorRT are pretended (`fake_cuda`, `fake_tensorrt`), and the engine is real.
A real GPU shows such faults only by luck: tests/gpu/test_device_arrays.py.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_cuda import ROOMY, PretendedCuda, nothing
from fake_tensorrt import (
    CallersArray,
    Pretend,
    WrongNumbers,
    expected,
    make_engine,
    right,
)

from pipeline.errors import ArtifactError, EngineError, InputError, OutOfMemory
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.device_array import DeviceArray
from pipeline.runtime.engine import Engine
from pipeline.runtime.hold import Held
from pipeline.runtime.state import EngineState

F32 = np.float32
REFUSED = ("no profile", "expected")
FAILED = (*REFUSED, "CUDA reports", "TensorRT reports", "TensorRT refused")
Arrays = dict[str, np.ndarray]


# two engines that share a buffer


def hand_over(pretend: Pretend, seed: int, *, ours: bool = False) -> None:
    """One engine writes a buffer and another one reads it, repeatedly, in calls without a stream.

    The buffer belongs to the caller, or (`ours`) is an earlier output.
    """
    cuda = pretend(seed)
    encode, decode = make_engine(cuda), make_engine(cuda)
    zero = CallersArray(cuda, np.zeros(5, F32))
    frames = [CallersArray(cuda, np.full((2, 5), n, F32)) for n in (1, 2, 3, 4)]
    buffer: Any = CallersArray(cuda, np.zeros((2, 5), F32))
    if ours:
        buffer = encode(x=frames[0], z=zero)["y"]
    results = []
    for frame in frames:
        encode(x=frame, z=zero, out={"y": buffer})
        results.append(decode(x=buffer, z=zero)["y"])
    for result, want in zip(results, (9, 18, 27, 36), strict=True):
        right(result.numpy(), np.full((2, 5), want, F32), "decoded")


@pytest.mark.parametrize("ours", [False, True], ids=["the caller's", "an output"])
@pytest.mark.parametrize("seed", range(20))
def test_two_engines_share_a_buffer(pretend: Pretend, seed: int, ours: bool) -> None:
    hand_over(pretend, seed, ours=ours)


@pytest.mark.parametrize("seed", range(20))
def test_another_thread_is_in_the_middle_of_a_call(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cuda = pretend(seed)
    encode, decode = make_engine(cuda), make_engine(cuda)
    arrays = [np.zeros(5, F32), *(np.full((2, 5), n, F32) for n in (0, 1, 7))]
    zero, buffer, one, other = (CallersArray(cuda, a) for a in arrays)
    decode(x=other, z=zero)
    run = EngineState.run

    def between(runs: EngineState, *arguments: Any) -> Any:
        if runs is decode._runs:
            encode(x=one, z=zero, out={"y": buffer})  # in the first thread
        return run(runs, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(EngineState, "run", between)
        decode(x=other, z=zero)  # in the second
    result = decode(x=buffer, z=zero)["y"]  # in the first again
    right(result.numpy(), np.full((2, 5), 9, F32), "decoded")


# random calls that callers may make


@dataclass
class Made:
    """Outputs that are alive, their right values, and their stream (None if none was named).

    Also whether others may still read y.
    """

    outputs: dict[str, Any]
    want: Arrays
    stream: int | None
    lent: bool = False


class Caller:
    """A caller that does random allowed things with engines and streams.

    It keeps its arrays alive while its streams use them, and destroys a stream only after its work.
    """

    STEPS = (
        "host", "host", "device", "device", "device", "device_out", "chain", "chain", "drop",
        "drop", "read", "read", "capture", "check", "new_stream", "poison", "profile", "wait",
        "timing",
    )  # fmt: skip

    def __init__(self, cuda: PretendedCuda, engines: Sequence[Engine], seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.cuda, self.engines, self.engine = cuda, engines, engines[0]
        self.streams = [cuda.make_stream(blocking=self.random.random() < 0.5) for _ in range(3)]
        self.made: list[Made] = []
        self.read_back: list[tuple[np.ndarray, np.ndarray]] = []
        self.kept: list[Any] = []

    def spend(self, steps: int, failing: float = 0) -> None:
        """Does this number of things, and checks all outputs at the end."""
        for _ in range(steps):
            self.engine = self.random.choice(self.engines)
            step = self.random.choice(self.STEPS)
            self.cuda.failing = failing
            try:
                getattr(self, step)()
                self.cuda.counts[step] += 1
            except OutOfMemory:
                self.cuda.counts["out of memory"] += 1
            except (InputError, EngineError) as error:
                meant = FAILED if failing else REFUSED
                assert any(words in str(error) for words in meant), error
            self.cuda.failing = 0
        self.cuda.finish()
        for got, want in self.read_back:
            right(got, want, "read by another")
        while self.made:
            self.check()

    def sizes(self) -> tuple[int, int]:
        choice, any_b, any_w = self.random.choice, *(self.random.random() < 0.5 for _ in "bw")
        b = choice([0, 1, 2, 3, 8]) if any_b else 2
        return b, choice([0, 1, 3, 5, 8, 16, 17, 33, 64]) if any_w else 5

    def values(self, *shape: int) -> np.ndarray:
        return self.numbers.uniform(-1, 1, shape).astype(F32)

    def some_stream(self) -> int | None:
        return self.random.choice([None, 0, *self.streams])

    def k(self) -> tuple[Arrays, float]:
        """The input k, if there is one, and its value."""
        k = self.random.choice([0.5, 1.0, 2.0])
        return ({"k": np.asarray(k, F32)}, k) if len(self.engine.inputs) == 3 else ({}, 1.0)

    def host(self) -> None:
        b, w = self.sizes()
        x, z = self.values(b, w), self.values(w)
        more, k = self.k()
        want = expected(x, z, k)
        for name, got in self.engine({"x": x, "z": z, **more}).items():
            right(got, want[name], f"on the host: {name}")

    def device(self) -> None:
        x, stream = self.values(*self.sizes()), self.some_stream()
        given = CallersArray(self.cuda, x)
        self.call(given, x, stream)
        if not stream:  # later work on that stream may overwrite the inputs
            self.cuda.enqueue(lambda: ctypes.memset(given.ptr, 0x55, x.nbytes), 0)

    def device_out(self) -> None:
        """Writes into the caller's memory, or into an output that is no longer needed."""
        free = [one for one in self.made if not one.lent and self.random.random() < 0.5]
        x = self.values(*(free[0].want["y"].shape if free else self.sizes()))
        out = free[0].outputs["y"] if free else CallersArray(self.cuda, np.zeros_like(x))
        if free:
            self.made.remove(free[0])
            if type(out) is CallersArray:  # nobody else would wait
                self.cuda.cudaStreamSynchronize(free[0].stream or 0)
        self.call(CallersArray(self.cuda, x), x, self.some_stream(), out={"y": out})
        assert self.made[-1].outputs["y"] is out

    def chain(self) -> None:
        """An output becomes an input, and may no longer be needed."""
        if not self.made:
            return
        before, stream = self.random.choice(self.made), self.some_stream()
        given, before.lent = before.outputs["y"], True
        if type(given) is CallersArray and (before.stream or stream):  # nobody else would wait
            self.cuda.cudaStreamSynchronize(before.stream or 0)
        if self.random.random() < 0.5:
            self.made.remove(before)
        self.call(given, before.want["y"], stream)

    def call(self, x: Any, value: np.ndarray, stream: int | None, **more: Any) -> None:
        z = self.values(value.shape[1])
        extra, k = self.k()
        inputs = {"x": x, "z": CallersArray(self.cuda, z), **extra}
        if stream:
            arrays = [*inputs.values(), *more.get("out", {}).values()]
            self.kept += [array for array in arrays if type(array) is CallersArray]
        if stream is not None:
            more["stream"] = stream
        self.made.append(Made(self.engine(inputs, **more), expected(value, z, k), stream or None))

    def drop(self) -> None:
        if self.made:
            self.made.pop(self.random.randrange(len(self.made)))

    def check(self) -> None:
        if not self.made:
            return
        one = self.made.pop(self.random.randrange(len(self.made)))
        self.cuda.failing = 0
        for name, array in one.outputs.items():
            if type(array) is CallersArray:
                self.cuda.cudaStreamSynchronize(one.stream or 0)
            right(array.numpy(), one.want[name], f"checked: {name}")

    def read(self) -> None:
        """Another library reads an output on its stream, and releases it."""
        if not self.made:
            return
        one = self.random.choice(self.made)
        name = self.random.choice(list(one.outputs))
        array, one.lent = one.outputs[name], True
        if type(array) is DeviceArray:
            stream = self.random.choice([_cuda.LEGACY, *self.streams])
            array.ready_for(stream)
            got, source = np.zeros(array.shape, F32), array.ptr
            self.cuda.enqueue(lambda: ctypes.memmove(got.ctypes.data, source, got.nbytes), stream)
            self.read_back.append((got, one.want[name]))

    def capture(self) -> None:
        if (
            len(self.engine.inputs) == len(self.engine.outputs) == 2
        ):  # no data-dependent output, and no input on the host
            self.engine.capture(dict(zip("bw", self.sizes(), strict=True)))

    def poison(self) -> None:
        self.engine.poison = self.random.random() < 0.3

    def profile(self) -> None:
        self.engine.profile = self.random.choice([None, None, 0, 1])

    def timing(self) -> None:
        self.engine.timing = self.random.random() < 0.7

    def wait(self) -> None:
        self.cuda.cudaStreamSynchronize(self.random.choice(self.streams))

    def new_stream(self) -> None:
        place = self.random.randrange(len(self.streams))
        old = self.streams[place]
        self.cuda.cudaStreamSynchronize(old)
        self.made = [one for one in self.made if one.stream != old]
        self.cuda.cudaStreamDestroy(old)
        self.streams[place] = self.cuda.make_stream(blocking=self.random.random() < 0.5)


def some_engines(pretend: Pretend, seed: int, count: int) -> tuple[PretendedCuda, list[Engine]]:
    """Engines of one kind on one GPU, which may be small."""
    chance = random.Random(seed)
    limit, eager = chance.choice([ROOMY, 40_000, 16_000]), chance.choice([0, 0.05, 0.3])
    cuda = pretend(seed, limit=limit, eager=eager)
    ways = {"newer": 0.5, "by_data": 0.3, "on_host": 0.25}
    kind = {way: chance.random() < often for way, often in ways.items()}
    engines = [make_engine(cuda, graphs=chance.choice([1, 3]), **kind) for _ in range(count)]
    return cuda, engines


def random_calls(pretend: Pretend, seed: int, failing: float = 0) -> None:
    Caller(*some_engines(pretend, seed, 2), seed).spend(120, failing)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(pretend: Pretend, seed: int) -> None:
    random_calls(pretend, seed)


@pytest.mark.parametrize("failing", [0.005, 0.02, 0.08])
@pytest.mark.parametrize("seed", range(8))
def test_random_calls_that_fail_now_and_then(pretend: Pretend, seed: int, failing: float) -> None:
    random_calls(pretend, seed, failing)


@pytest.mark.parametrize("seed", range(8))
def test_threads_share_engines(pretend: Pretend, seed: int) -> None:
    cuda, engines = some_engines(pretend, seed, 2)
    callers = [Caller(cuda, engines, 100 * seed + place) for place in range(4)]
    wrong: list[str] = []

    def work(caller: Caller) -> None:
        try:
            caller.spend(40)
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in callers]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    gc.enable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert wrong == []


# these tests notice wrong code


def forgetful(runs: EngineState, *arguments: Any, run: Any = EngineState.run) -> Any:
    """A run that ignores the run before."""
    runs._last = None
    return run(runs, *arguments)


@pytest.mark.parametrize(
    ("where", "name", "instead", "scenario"),
    [
        (_cuda.Event, "wait", nothing, random_calls),
        (_cuda.Reader, "wait", nothing, random_calls),
        (_cuda.Turns, "enter", nothing, hand_over),
        (DeviceArray, "ready_for", nothing, random_calls),
        (DeviceArray, "used_until", nothing, random_calls),
        (DeviceArray, "written", nothing, random_calls),
        (Held, "hold", nothing, random_calls),
        (EngineState, "run", forgetful, random_calls),
    ],
)
def test_what_is_broken_shows(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any,
    scenario: Callable[[Pretend, int], None],
) -> None:  # fmt: skip
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(WrongNumbers):
        for seed in range(60):
            scenario(pretend, seed)


# a plan that does not belong to its manifest


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "float16"])
def test_an_output_of_another_dtype_than_declared(pretend: Pretend, dtype: str) -> None:
    cuda = pretend(0)
    with pytest.raises(ArtifactError, match=f"y in float32.* in {dtype}: they are from different "):
        make_engine(cuda, dtype=dtype)


def test_float64_is_computed_in_float32(pretend: Pretend) -> None:
    x, z = np.full((1, 2), 0.9, F32), np.zeros(2, F32)
    y = make_engine(pretend(0), dtype="float64")(x=x, z=z)["y"]
    assert y.dtype == np.float64
    right(y, expected(x, z)["y"], "y")
