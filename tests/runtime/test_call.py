"""The fast paths of a call, without a GPU: plain arrays, and graphs with copies as nodes.

Stand-ins replace CUDA's graph calls, which need a GPU: they copy in host memory, as the nodes
state. tests/gpu/test_device_arrays.py tests real graphs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_engine_loading import F32, Broken, Dlpack, X

from pipeline.errors import EngineError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime import cuda_graph as _cuda_graph
from pipeline.runtime.array_interface import KnownArrays, plain
from pipeline.runtime.bindings import _allocator_class
from pipeline.runtime.cuda_graph import CapturedGraph
from pipeline.runtime.graphs import Graphs
from pipeline.runtime.sizes import OutputAtSizes, Sized
from pipeline.runtime.state import EngineState

AT = 0x7F0000000200
GOOD = {"version": 3, "shape": (2, 3), "typestr": "<f4", "data": (AT, False), "strides": None}


class Array:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def array(**more: Any) -> Any:
    return Array({**GOOD, **more})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses whose GPU was queried. Addresses from 2**46 on belong to GPU 0."""
    seen: list[int] = []

    def gpu_of(pointer: int) -> int:
        seen.append(pointer)
        return 0 if pointer >> 46 else -1

    monkeypatch.setattr(_cuda, "gpu_of", gpu_of)
    return seen


def test_plain_arrays(asked: list[int]) -> None:
    assert plain(X, array(), KnownArrays(0), 7) == (AT, (2, 3), False)
    assert plain(X, array(data=(AT, True), stream=7), KnownArrays(0), 7) == (AT, (2, 3), True)
    bare = Array({name: GOOD[name] for name in ("version", "shape", "typestr", "data")})
    assert plain(X, bare, KnownArrays(0), 7) == (AT, (2, 3), False)
    assert asked == [AT] * 3


def test_where_an_array_is_gets_asked_once_as_long_as_it_says_the_same(asked: list[int]) -> None:
    known, value = KnownArrays(0), array()
    for shape in ((2, 3), (3, 2), (6,)):
        value.__cuda_array_interface__["shape"] = shape
        assert plain(X, value, known, 7) == (AT, shape, False)
    assert asked == [AT]
    value.__cuda_array_interface__["data"] = (4096, False)  # now in host memory
    assert plain(X, value, known, 7) is None
    value.__cuda_array_interface__["data"] = (AT, False)
    assert plain(X, value, known, 7) is not None
    assert asked == [AT, 4096]
    for _ in range(3):  # other arrays at the address of a freed array
        value = None
        value = array()
        assert plain(X, value, known, 7) is not None
    assert asked == [AT, 4096, AT, AT, AT]
    many = [array() for _ in range(1000)]
    assert all(plain(X, one, known, 7) is not None for one in many)
    assert len(known._arrays) <= 64


def test_arrays_without_weak_references_are_asked_for_each_time(asked: list[int]) -> None:
    class Slotted:
        __slots__ = ("__cuda_array_interface__",)

    value, known = Slotted(), KnownArrays(0)
    value.__cuda_array_interface__ = GOOD
    for _ in range(3):
        assert plain(X, value, known, 7) == (AT, (2, 3), False)
    assert asked == [AT] * 3


@pytest.mark.parametrize(
    "value",
    [
        array(version=2),
        array(typestr="<f8"),
        array(typestr=">f4"),
        array(strides=(12, 4)),
        array(stream=8),  # to be waited for
        array(stream=1),
        array(mask=1),
        array(shape=[2, 3]),
        array(data=(AT + 4, False)),
        array(data=(0, False)),
        array(data=(4096, False)),  # in host memory
        Array({}),
        np.ones((2, 3), F32),
        Dlpack(np.ones((2, 3), F32)),
        Broken(),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_left_to_the_other_way(asked: list[int], value: Any) -> None:
    del asked
    assert plain(X, value, KnownArrays(0), 7) is None


def test_an_array_on_another_gpu_is_not_plain(asked: list[int]) -> None:
    assert plain(X, array(), KnownArrays(1), 7) is None and asked == [AT]


class Standin:
    """CUDA's graph calls in host memory. `refuses` lists the calls that fail."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.calls: list[str] = []
        self.core: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.refuses:
                return (SimpleNamespace(name="cudaErrorInvalidValue"),)
            return (0, *getattr(self, f"_{name}", lambda *_: ())(*arguments))

        if name.startswith("cuda"):
            return call
        raise AttributeError(name)

    def cudaGetErrorString(self, _: Any) -> tuple[int, bytes]:
        return 0, b"no"

    def _cudaStreamEndCapture(self, _: int) -> tuple[Any]:
        return (["core"],)

    def _cudaGraphCreate(self, _: int) -> tuple[Any]:
        return ([],)

    def _cudaGraphInstantiate(self, graph: Any, _: int) -> tuple[Any]:
        return (graph,)

    def _cudaGraphAddMemcpyNode1D(
        self, graph: Any, after: Any, count: int, *copy: Any
    ) -> tuple[Any]:
        assert len(after or ()) == count
        graph.append({"copy": copy, "on": True})
        return (graph[-1],)

    def _cudaGraphAddChildGraphNode(
        self, graph: Any, after: Any, count: int, child: Any
    ) -> tuple[Any]:
        assert len(after or ()) == count
        graph.append(child[0])
        return (child[0],)

    def _cudaGraphExecMemcpyNodeSetParams1D(self, _: Any, node: Any, *copy: Any) -> tuple[()]:
        node["copy"] = copy
        return ()

    def _cudaGraphNodeSetEnabled(self, _: Any, node: Any, on: int) -> tuple[()]:
        node["on"] = bool(on)
        return ()

    def _cudaGraphLaunch(self, graph: Any, _: int) -> tuple[()]:
        for node in graph:
            if node == "core":
                self.core()
            elif node["on"]:
                ctypes.memmove(*node["copy"][:3])
        return ()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Standin:
    made = Standin()
    spare = np.empty(4096, np.uint8)
    monkeypatch.setattr(_cuda_graph, "rt", made)
    monkeypatch.setattr(_cuda, "rt", made)
    monkeypatch.setattr(_cuda, "allocate", lambda _: spare.ctypes.data)
    monkeypatch.setattr(_cuda, "free", lambda _: None)

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        made.calls.append(f"copy on {stream}")
        ctypes.memmove(target, source, nbytes)

    monkeypatch.setattr(_cuda, "copy", copy)
    return made


class Doubler:
    """A graph of y = 2 x, and its results for the numbers of an array."""

    def __init__(self, cuda: Standin) -> None:
        self.x, self.y = np.zeros(4, F32), np.zeros(4, F32)
        cuda.core = lambda: np.multiply(self.x, 2, out=self.y)
        stream: Any = SimpleNamespace(handle=5)
        places = [[(a.ctypes.data, a.nbytes), (0, 0)] for a in (self.x, self.y)]
        self.graph = CapturedGraph(stream, lambda: True, *places)

    def __call__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.graph.launch(7, [x.ctypes.data, 64], [y.ctypes.data, 64])
        np.testing.assert_array_equal(y, 2 * x)


def test_a_graphs_copies_are_moved_where_addresses_change(cuda: Standin) -> None:
    double = Doubler(cuda)
    xs = [np.array([n, 1, 2, 3], F32) for n in range(3)]
    ys = [np.zeros(4, F32) for _ in range(3)]
    cuda.calls.clear()
    for x, y, moved in ((0, 0, 2), (0, 0, 0), (1, 0, 1), (1, 2, 1), (0, 1, 2)):
        double(xs[x], ys[y])
        expected = ["cudaGraphExecMemcpyNodeSetParams1D"] * moved + ["cudaGraphLaunch"]
        assert cuda.calls == expected
        cuda.calls.clear()


def test_memory_that_no_node_takes_is_copied_by_the_call(cuda: Standin) -> None:
    double = Doubler(cuda)
    x, y = np.arange(4, dtype=F32), np.zeros(4, F32)
    double(x, y)
    other = x + 1
    cuda.refuses = {"cudaGraphExecMemcpyNodeSetParams1D"}
    for _ in range(2):
        cuda.calls.clear()
        double(other, np.zeros(4, F32))
        assert cuda.calls.count("copy on 7") == 2
        assert cuda.calls.count("cudaGetLastError") == 2
    y[:] = 0
    double(other, y)
    cuda.refuses = set()
    cuda.calls.clear()
    double(x, y)
    assert "copy on 7" not in cuda.calls and cuda.calls.count("cudaGraphNodeSetEnabled") == 2


@pytest.mark.parametrize("refused", ["cudaGraphAddMemcpyNode1D", "cudaGraphAddChildGraphNode"])
def test_a_graph_that_takes_no_copies_is_launched_between_them(cuda: Standin, refused: str) -> None:
    cuda.refuses = {refused}
    double = Doubler(cuda)
    cuda.calls.clear()
    for n in range(2):
        double(np.full(4, n, F32), np.zeros(4, F32))
    assert cuda.calls == ["copy on 7", "cudaGraphLaunch", "copy on 7"] * 2


def test_a_run_that_fails_half_way_is_waited_for(cuda: Standin) -> None:
    """Part of the run is already enqueued, and no event marks its end.

    The next run may use another stream, and the caller may drop the inputs.
    """
    allocator = _allocator_class(SimpleNamespace(IOutputAllocator=object))()
    key, shapes = (((2,),), (), None), [(2,)]
    sized = Sized(key, {}, 0, (("x", (2,)),), (8,), (OutputAtSizes(X, None, 0, "output x"),))
    context = SimpleNamespace(
        ready=sized,
        generation=0,
        addresses={"x": 64},
        allocator=lambda _: allocator,
        execute=lambda stream: stream == 7 and not cuda.calls.append("execute"),
    )
    device = SimpleNamespace(own=SimpleNamespace(handle=5), events=_cuda.Events(), index=0)
    log = SimpleNamespace(spoke=False)
    plan: Any = SimpleNamespace(inputs=(X,), outputs=(X,), activation=1, log=log)
    declared = SimpleNamespace(profiles=(), dims={})
    sizes: Any = SimpleNamespace(most_bytes=lambda _: {}, interface=declared)
    runs = EngineState(plan, sizes, device, 1)  # type: ignore[arg-type]
    runs._sized[key], runs._contexts[0] = sized, context  # type: ignore[assignment]
    with pytest.raises(EngineError, match="does not report its shape"):
        runs.run(shapes, (), [64], 7, {}, None)
    assert cuda.calls == ["execute", "cudaDeviceSynchronize"]


def test_the_last_run_may_be_forgotten_meanwhile() -> None:
    """Another thread closes the engine between two reads of its last run."""
    event = object()
    looks = iter([(5, event), None])
    closing: Any = type("Closing", (), {"_last": property(lambda _: next(looks))})()
    assert EngineState.last(closing, event)  # type: ignore[arg-type]


def test_graphs_may_be_listed_while_other_threads_use_them() -> None:
    graphs = Graphs(2)

    class Used:
        """A graph that another thread's call uses at the same time."""

        def __init__(self, key: str) -> None:
            self.key = key

        @property
        def sizes(self) -> dict[str, int]:
            graphs.find(self.key)
            return {self.key: 1}

    for key in "ab":
        graphs.add(key, Used(key))  # type: ignore[arg-type]
    assert graphs.sizes == ({"a": 1}, {"b": 1})
