"""GPU arrays as inputs and outputs: no copies, the order of streams, graphs."""

from __future__ import annotations

import ctypes
import re
import weakref
from typing import Any

import numpy as np
import pytest
from gpu_engines import (
    Built,
    Busy,
    ByDlpack,
    Loaded,
    OnGpu,
    References,
    handles,
    hosted,
    in_a_process,
    picture,
    same,
    sizes,
    streams,
)
from on_gpu import TARGET, WHY

import pipeline
from pipeline import InputError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TARGET is None, reason=WHY)]


def spread(array: Any, stream: int) -> Any:
    """The array that another library makes with DLPack."""
    from cuda.core.utils import StridedMemoryView

    return StridedMemoryView.from_dlpack(array, stream)


def read(pointer: int, like: np.ndarray, stream: int) -> np.ndarray:
    """Copies from the GPU in a stream's order. Waits for that stream only."""
    from cuda.bindings import runtime as rt

    from pipeline.runtime import cuda as _cuda

    result = np.empty_like(like)
    _cuda.to_host(result.ctypes.data, pointer, like.nbytes, stream)
    assert not rt.cudaStreamSynchronize(stream)[0]
    return result


@pytest.mark.parametrize("kind", [OnGpu, ByDlpack])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_values_and_no_copies(loaded: Loaded, reference: References, kind: Any, which: int) -> None:
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine.poison = True
    stream = [None, *streams()][which]
    for turn, (h, w) in enumerate(sizes(8)):
        x = kind(picture(h, w, turn))
        out = engine(x=x, stream=stream)
        assert all(
            isinstance(array, pipeline.runtime.device_array.DeviceArray) for array in out.values()
        )
        assert out["y"].shape == (1, 4, 2 * h, 2 * w)
        assert out["y"].nbytes == 4 * 4 * 4 * h * w
        same(hosted(out), right(x=picture(h, w, turn)))
        context = engine._runs._contexts[0]
        assert context.addresses["x"] == x.ptr
        assert context.addresses["y"] == out["y"].ptr


def test_output_into_the_callers_memory(loaded: Loaded, reference: References) -> None:
    engine, x = loaded("PICTURE"), picture(10, 12)
    want = reference("PICTURE")(x=x)
    for kind in (OnGpu, ByDlpack):
        for graph in (False, True):
            mine = kind(np.zeros((1, 4, 20, 24), np.float32))
            got = engine(x=OnGpu(x), out={"y": mine})
            assert got["y"] is mine
            if not graph and kind is OnGpu:
                assert engine._runs._contexts[0].addresses["y"] == mine.ptr
            np.testing.assert_array_equal(mine.numpy(), got_again(engine, x)["y"])
            np.testing.assert_allclose(mine.numpy(), want["y"], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(got["z"].numpy(), want["z"], rtol=1e-4, atol=1e-4)
            engine.capture({"h": 10, "w": 12})
    mine = OnGpu(np.zeros((1, 4, 20, 24), np.float32))
    whole = OnGpu(np.zeros((1, 4, 96, 96), np.float32))
    image = {**whole.__cuda_array_interface__, "shape": (1, 3, 48, 48)}
    inside = type("Part", (), {"__cuda_array_interface__": image})()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"q": mine}, "no output 'q'; the outputs are: y, z, top"),
        ({"y": OnGpu(np.zeros((1, 4, 20, 23), np.float32))}, "y: shape .* expected .1, 4, 20, 24"),
        ({"y": OnGpu(np.zeros((1, 4, 20, 24), np.float16))}, "y: dtype float16, expected float32"),
        ({"y": np.zeros((1, 4, 20, 24), np.float32)}, "y: is a numpy array"),
        ({"y": OnGpu(mine.value, data=(mine.ptr, True))}, "y: is read-only"),
        ({"y": mine, "z": part_of(mine, (1, 4))}, "z: shares memory with output y"),
    ]
    for out, words in bad:
        with pytest.raises(InputError, match=f"out: .*{words}"):
            engine(x=OnGpu(x), out=out)
    with pytest.raises(InputError, match="out: y: shares memory with input x"):
        engine(x=inside, out={"y": whole})
    with pytest.raises(InputError, match="out: pass a dict"):
        engine(x=OnGpu(x), out=[mine])
    with pytest.raises(InputError, match="out= needs inputs on the GPU"):
        engine(x=x, out={"y": mine})
    same(engine(x=x), want)


def test_output_into_an_output(loaded: Loaded, reference: References, busy: Busy) -> None:
    """The array is ready after its last writer, not after its first."""
    engine, right = loaded("PICTURE"), reference("PICTURE")
    mine, theirs = handles()
    first, second = OnGpu(picture(30, 30, 1)), OnGpu(picture(30, 30, 2))
    want = right(x=picture(30, 30, 2))["y"]
    for stream, other in ((None, None), (mine, mine), (None, theirs), (mine, theirs)):
        y = engine(x=first, stream=stream)["y"]
        y.numpy()
        busy(other or engine._runs.device.own.handle)
        assert engine(x=second, out={"y": y}, stream=other)["y"] is y
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-4)


def got_again(engine: pipeline.Engine, x: np.ndarray) -> dict[str, np.ndarray]:
    return hosted(engine(x=OnGpu(x)))


def part_of(array: Any, shape: tuple[int, ...]) -> Any:
    interface = {**OnGpu(array.value).__cuda_array_interface__, "data": (array.ptr, False)}
    return type("Part", (), {"__cuda_array_interface__": {**interface, "shape": shape}})()


def test_what_is_refused(loaded: Loaded) -> None:
    engine, x = loaded("PICTURE"), OnGpu(picture(10, 12))
    strides = (3 * 10 * 12 * 8, 10 * 12 * 8, 12 * 8, 8)
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (OnGpu(picture(10, 12), strides=strides), {}, "x: is not C-contiguous"),
        (
            OnGpu(picture(10, 13), shape=(1, 3, 10, 12), data=(x.ptr + 4, False)),
            {},
            "multiple of 256",
        ),
        (OnGpu(picture(10, 12), version=2), {}, "x: the OnGpu can't be read"),
        (object(), {}, "x: is a object; pass a numpy array, or an array on the GPU"),
        (x, {"stream": "s"}, "stream='s': pass a handle"),
        (x, {"stream": 2}, "per-thread default stream"),
    ]
    for value, how, words in bad:
        with pytest.raises(InputError, match=words):
            engine(x=value, **how)
    cache = loaded("CACHE")
    past, new = np.zeros((2, 4, 8), np.float32), np.zeros((2, 1, 8), np.float32)
    with pytest.raises(InputError, match="new: is a numpy array, but other inputs are on the GPU"):
        cache(past=OnGpu(past), new=new)
    with pytest.raises(InputError, match="new: is a OnGpu, but other inputs are numpy arrays"):
        cache(past=past, new=OnGpu(new))


def test_waits_for_the_producer(loaded: Loaded, reference: References, busy: Busy) -> None:
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine(x=picture(30, 30))
    producer, consumer = handles()
    for turn, (kind, stream) in enumerate(
        [(OnGpu, None), (ByDlpack, None), (OnGpu, consumer), (ByDlpack, consumer)]
    ):
        value = picture(30, 30, turn)
        busy(producer)
        x = kind(value, producer)  # copied in after the other work of the stream
        same(hosted(engine(x=x, stream=stream)), right(x=value))
        if kind is ByDlpack:
            assert x.asked == [stream or engine._runs.device.own.handle]


def test_ordered_with_the_default_stream(loaded: Loaded, reference: References, busy: Busy) -> None:
    from pipeline.runtime import cuda as _cuda

    engine, right = loaded("PICTURE"), reference("PICTURE")
    for turn, stream in enumerate((None, 0, 1, None)):
        old, value = picture(30, 30, 10 + turn), picture(30, 30, turn)
        x, fresh = OnGpu(old), OnGpu(value)
        busy(0)
        _cuda.copy(x.ptr, fresh.ptr, value.nbytes, 0)
        out = engine(x=x, stream=stream)
        want = right(x=value)
        # only the legacy default stream waits
        got = read(out["y"].ptr, want["y"], 0)
        np.testing.assert_allclose(got, want["y"], rtol=1e-4, atol=1e-4)
        # later work on that stream may overwrite the input
        busy(engine._runs.device.own.handle)
        out = engine(x=x, stream=stream)
        _cuda.fill(x.ptr, 0, value.nbytes, 0)
        np.testing.assert_allclose(out["y"].numpy(), want["y"], rtol=1e-4, atol=1e-4)


def test_consumers_wait(loaded: Loaded, reference: References, busy: Busy) -> None:
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine(x=picture(30, 30))
    mine, theirs = handles()
    x = picture(30, 30, 3)
    want = right(x=x)["y"]
    for stream in (None, mine):
        own = engine._runs.device.own.handle
        busy(stream or own)
        out = engine(x=OnGpu(x, stream or own), stream=stream)["y"]
        view = spread(out, theirs)
        assert (view.ptr, view.shape, view.dtype) == (out.ptr, out.shape, out.dtype)
        np.testing.assert_allclose(read(view.ptr, want, theirs), want, rtol=1e-4, atol=1e-4)
        busy(stream or own)
        out = engine(x=OnGpu(x, stream or own), stream=stream)["y"]
        interface = out.__cuda_array_interface__
        assert interface["data"] == (out.ptr, False)
        got = read(out.ptr, want, interface["stream"])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert out.__dlpack_device__() == (2, 0)
    with pytest.raises(BufferError, match="stays on its GPU"):
        out.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="copy=True is not supported"):
        out.__dlpack__(copy=True)


def test_outputs_are_not_overwritten(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine.poison = True
    first, second = streams()
    held = []
    for turn in range(9):
        stream = (None, first, second)[turn % 3]
        held.append(engine(x=OnGpu(picture(20, 20, turn)), stream=stream))
    assert len({out["y"].ptr for out in held}) == 9
    views = [spread(out["y"], engine._runs.device.own.handle) for out in held[:3]]
    pointers = [view.ptr for view in views]
    kept = [hosted(out) for out in held]
    del held[:3]  # the DLPack arrays are still alive
    for turn in range(9, 15):
        out = engine(x=OnGpu(picture(20, 20, turn)), stream=(None, first, second)[turn % 3])
        assert out["y"].ptr not in pointers
    for turn, view in enumerate(views):
        got = read(view.ptr, kept[turn]["y"], engine._runs.device.own.handle)
        np.testing.assert_array_equal(got, kept[turn]["y"])
    for turn, out in enumerate(held, 3):
        same(hosted(out), right(x=picture(20, 20, turn)))


def test_memory_is_used_again_in_order(loaded: Loaded, busy: Busy) -> None:
    from pipeline.runtime import cuda as _cuda

    engine = loaded("PICTURE")
    mine, theirs = handles()
    x = [OnGpu(picture(20, 20, turn)) for turn in range(4)]
    keep = OnGpu(np.zeros((1, 4, 40, 40), np.float32))
    own = engine._runs.device.own.handle
    for stream, consumer in ((mine, mine), (mine, theirs), (None, theirs), (None, 1)):
        out = engine(x=x[0], stream=stream)["y"]
        want, pointer = out.numpy(), out.ptr
        view = spread(out, consumer)
        busy(consumer)
        _cuda.copy(keep.ptr, view.ptr, keep.value.nbytes, consumer)  # is late
        del out, view
        again = engine(x=x[1], stream=stream)["y"]
        assert again.ptr == pointer
        assert not np.array_equal(again.numpy(), want)
        np.testing.assert_array_equal(keep.numpy(), want)
        del again
    # a block that another stream freed is not reused
    first = engine(x=x[2], stream=mine)["y"]
    pointer = first.ptr
    del first
    assert engine(x=x[3], stream=theirs)["y"].ptr != pointer
    assert engine(x=x[3], stream=mine)["y"].ptr == pointer
    assert own


def test_inputs_live_until_they_are_read(loaded: Loaded, reference: References, busy: Busy) -> None:
    engine, x = loaded("PICTURE"), picture(30, 30, 1)
    engine(x=x)
    busy(engine._runs.device.own.handle)
    given = OnGpu(x)
    alive = weakref.ref(given)
    out = engine(x=given)
    del given
    assert alive() is not None
    same(hosted(out), reference("PICTURE")(x=x))
    engine(x=OnGpu(x))
    assert alive() is None


def test_captured_graphs(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("PICTURE", graphs=2), reference("PICTURE")
    engine.poison = True
    a, b, c = ({"h": h, "w": w} for h, w in ((20, 20), (33, 40), (96, 96)))
    before = engine.device_memory
    engine.capture(a)
    engine.capture(b)
    engine.capture(a)
    assert engine.captured == (b, a)
    held: list[tuple[Any, np.ndarray]] = []
    first, second = streams()
    for turn, at in enumerate((a, c, b, a, b, c, a, a, b, c, b, a)):
        x = picture(at["h"], at["w"], turn)
        same(engine(x=x), right(x=x))
        same(hosted(engine(x=ByDlpack(x), stream=(None, first, second)[turn % 3])), right(x=x))
        held.append((engine(x=OnGpu(x)), x))
    for out, x in held:
        same(hosted(out), right(x=x))
    assert engine.captured == (b, a)
    engine.capture(c)
    assert engine.captured == (a, c)
    assert len(engine._runs.graphs) == 2
    x = picture(33, 40)
    same(engine(x=x), right(x=x))
    mine = OnGpu(np.zeros((1, 4, 192, 192), np.float32))
    x = picture(96, 96, 5)
    assert engine(x=OnGpu(x), out={"y": mine})["y"] is mine
    np.testing.assert_allclose(mine.numpy(), right(x=x)["y"], rtol=1e-4, atol=1e-4)
    assert engine.device_memory > before
    for sizes_, words in (
        ({"h": 20}, "no size for w; the dims are: h, w"),
        ({"h": 20, "w": 97}, r"w=97 is outside 4\.\.96"),
        ({"h": 20, "w": 20, "b": 1}, "no dim 'b'"),
        ({"h": 20, "w": 2.5}, "w=2.5 is not a whole number"),
    ):
        with pytest.raises(InputError, match=words):
            engine.capture(sizes_)
    none = loaded("PICTURE", graphs=0)
    with pytest.raises(InputError, match="graphs=0 keeps no graphs"):
        none.capture(a)


def test_a_graphs_copies_go_where_each_call_says(
    loaded: Loaded, reference: References, busy: Busy
) -> None:
    """Calls that are enqueued but not done keep their addresses."""
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine.capture({"h": 30, "w": 30})
    mine, theirs = handles()
    xs = [picture(30, 30, turn) for turn in range(4)]
    wanted = [right(x=x) for x in xs]
    given = [OnGpu(x) for x in xs]
    (captured,) = engine._runs.graphs.kept.values()
    for stream in (None, mine):
        busy(stream or engine._runs.device.own.handle)
        held = [engine(x=given[turn % 4], stream=stream) for turn in range(12)]
        for turn, out in enumerate(held):
            same(hosted(out), wanted[turn % 4])
    # the copies are graph nodes with the addresses of the last call
    assert [copy.other for copy in captured.graph._copies_in] == [given[3].ptr]
    assert [copy.other for copy in captured.graph._copies_out] == [
        held[-1][output.name].ptr for output in engine._runs.plan.outputs
    ]
    # the same addresses again, and new ones, into the caller's memory
    x, y = OnGpu(xs[0]), OnGpu(np.zeros((1, 4, 60, 60), np.float32))
    for turn in range(4):
        x = OnGpu(xs[turn]) if turn % 2 else x
        want = wanted[turn if turn % 2 else max(turn - 1, 0)]
        engine(x=x, stream=theirs, out={"y": y})
        np.testing.assert_allclose(y.numpy(), want["y"], rtol=1e-4, atol=1e-4)


def test_a_graph_takes_memory_of_a_pool(loaded: Loaded, reference: References) -> None:
    """Memory of cudaMallocAsync, as an input and an output."""
    from cuda.bindings import runtime as rt

    from pipeline.runtime import cuda as _cuda

    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine.capture({"h": 20, "w": 20})
    (stream, _), large = handles(), np.zeros((1, 4, 40, 40), np.float32)
    x = picture(20, 20, 3)
    code, place = rt.cudaMallocAsync(x.nbytes, stream)
    assert not code
    code, into = rt.cudaMallocAsync(large.nbytes, stream)
    assert not code
    try:
        _cuda.to_device(int(place), x, x.nbytes, stream)
        pooled, target = (
            type("Pooled", (), {"__cuda_array_interface__": {
                "version": 3, "shape": like.shape, "typestr": "<f4", "data": (int(at), False),
                "strides": None, "stream": stream,
            }})()
            for like, at in ((x, place), (large, into))
        )  # fmt: skip
        for _ in range(2):
            engine(x=pooled, stream=stream, out={"y": target})
            got = read(int(into), large, stream)
            np.testing.assert_allclose(got, right(x=x)["y"], rtol=1e-4, atol=1e-4)
    finally:
        for pointer in (place, into):
            assert not rt.cudaFreeAsync(pointer, stream)[0]


def test_graphs_of_two_profiles(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("TWO_PROFILES"), reference("TWO_PROFILES")
    engine.poison = True
    points = ({"b": 4, "s": 1}, {"b": 8, "s": 60}, {"b": 1, "s": 100})
    for at in points:
        engine.capture(at)
    for turn, at in enumerate((*points, *points, {"b": 2, "s": 5}, *points)):
        x = np.random.default_rng(turn).uniform(-1, 1, (at["b"], at["s"], 8)).astype(np.float32)
        same(engine(x=x), right(x=x))
    assert len(engine.captured) == 3


LOOP = """
import sys
import numpy as np
import pipeline

x = np.array([1, 2, 3, 4], np.float32)
engine = pipeline.load(sys.argv[1])
print(engine(x=x)["y"].tolist())
try:
    engine.capture({})
except pipeline.EngineError as error:
    print(error)
print(engine.captured, [engine(x=x * np.float32(s))["y"].tolist() for s in (1, 30, 0.5)])
"""


def _no_cudnn() -> bool:
    try:
        ctypes.CDLL("libcudnn_ops_infer.so.8")
    except OSError:
        return TARGET is not None and TARGET.name == "tensorrt-8.6"
    return False


@pytest.mark.skipif(
    _no_cudnn(), reason="8.6.0 ends the process on a Loop where libcudnn_ops_infer.so.8 is missing"
)
def test_loops_are_not_captured(built: Built) -> None:
    once = "[16.0, 32.0, 48.0, 64.0]"
    first, why, after = in_a_process(LOOP, built("LOOP")).splitlines()
    assert first == once
    assert re.match(r"can't be captured at its only size: .*loops", why), why
    assert after == f"() [{once}, [30.0, 60.0, 90.0, 120.0], {once}]"
