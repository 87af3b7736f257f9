"""Determinism, order and unwritten elements, with faults planted in outputs of ONNX Runtime.

The same checks run on real engines on a GPU: tests/gpu/test_verify_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import FeedRunner

from pipeline.compare.engine_checks import (
    DETERMINISM,
    ORDER,
    UNWRITTEN,
    Checked,
    Subject,
    check_engine,
)
from pipeline.errors import EngineError, OutOfMemory
from pipeline.graph.session import run_onnx
from pipeline.spec.closeness import apart
from pipeline.spec.profiles import Point
from pipeline.spec.tensors import Feed, Tolerance
from pipeline.spec.verdicts import Check

F32 = np.float32
TOLERANCE = {"y": Tolerance(1e-3, 1e-4, "test"), "n": Tolerance(1e-3, 1e-4, "test")}
TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[b,4] x) => (float[b,4] y, int64[2] n) { y = Tanh(x)  n = Shape(x) }"""
POINTS = [Point(f"size {n}", {"b": n}) for n in (1, 7, 3, 5, 2)]
RNG = np.random.default_rng(0)
FEEDS = [{"x": RNG.uniform(-1, 1, (p.sizes["b"], 4)).astype(F32)} for p in POINTS]
Outputs = dict[str, np.ndarray]
Fault = Callable[["Engine", Outputs], None]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[Outputs]:
    """ONNX Runtime's outputs at every point."""
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return list(run_onnx(path, FEEDS))


class Engine:
    """Returns the right outputs, changed by `fault`, in its buffers, which may be poisoned."""

    def __init__(self, right: list[Outputs], fault: Callable[[Engine, Outputs], None]) -> None:
        self.right, self.fault = right, fault
        self.calls = 0
        self.before: Outputs = {}

    def run(self, feed: Feed) -> Outputs:
        return self._run(feed, fill=0x00)

    def poisoned(self, feed: Feed) -> Outputs:
        return self._run(feed, fill=0xFF)

    def _run(self, feed: Feed, fill: int) -> Outputs:
        index = next(n for n, known in enumerate(FEEDS) if known["x"] is feed["x"])
        outputs = {name: array.copy() for name, array in self.right[index].items()}
        self.empty = {name: np.full(a.nbytes, fill, np.uint8) for name, a in outputs.items()}
        self.calls += 1
        self.fault(self, outputs)
        self.before = outputs
        return outputs


def all_of(engine: Engine) -> Checked:
    subject = Subject(FeedRunner("engine", engine.run), FeedRunner("engine", engine.poisoned))
    first = [engine.run(feed) for feed in FEEDS]
    return check_engine(subject, POINTS, FEEDS, first, TOLERANCE)


def checked(engine: Engine) -> dict[str, Check]:
    done = all_of(engine)
    assert [info.run for info in done.checks] == ["engine"] * 3 and not done.notes
    return {info.name: info for info in done.checks}


def none(engine: Engine, outputs: Outputs) -> None:
    del engine, outputs


def noise(by: float) -> Callable[[Engine, Outputs], None]:
    def fault(engine: Engine, outputs: Outputs) -> None:
        outputs["y"][-1, -1] += by * (engine.calls % 2)

    return fault


def leftovers(engine: Engine, outputs: Outputs) -> None:
    """After a larger size, the last row has the values of the size before."""
    y, old = outputs["y"], engine.before.get("y")
    if old is not None and len(old) > len(y):
        y[-1] = old[len(y) - 1]


def hole(name: str) -> Callable[[Engine, Outputs], None]:
    def fault(engine: Engine, outputs: Outputs) -> None:
        array = outputs[name]
        outputs[name] = array = array.copy()
        array.flat[-1] = engine.empty[name].view(array.dtype)[-1]

    return fault


def failed(infos: dict[str, Check]) -> set[str]:
    return {name for name, info in infos.items() if not info.passed}


def test_a_good_engine(right: list[Outputs]) -> None:
    infos = checked(Engine(right, none))
    assert list(infos) == [DETERMINISM, UNWRITTEN, ORDER]
    assert not failed(infos)
    assert [info.text for info in infos.values()] == [
        "3 runs at each of 5 sizes: bit-identical",
        "every element is written at each of 5 sizes",
        "5 sizes in another order: bit-identical",
    ]
    assert [info.kind for info in infos.values()] == [
        "bit-identical", "all-written", "bit-identical",
    ]  # fmt: skip
    assert all(info.sizes == {} for info in infos.values())


def test_noise_within_the_tolerance_is_told(right: list[Outputs]) -> None:
    infos = checked(Engine(right, noise(5e-5)))
    assert not failed(infos)
    told = infos[DETERMINISM]
    assert told.text.startswith("3 runs at each of 5 sizes: y differs by up to 5e-05")
    assert told.text.endswith(", within the tolerance") and told.kind == "within-tolerance"
    assert told.sizes


def test_noise_beyond_the_tolerance_fails(right: list[Outputs]) -> None:
    infos = checked(Engine(right, noise(0.01)))
    assert DETERMINISM in failed(infos)
    assert infos[DETERMINISM].text == (
        "3 runs at each of 5 sizes: y differs by up to 0.01, beyond the tolerance"
    )
    assert infos[DETERMINISM].kind == "beyond-tolerance"


@pytest.mark.parametrize("small", [False, True])
def test_what_an_earlier_run_left(right: list[Outputs], small: bool) -> None:
    def fault(engine: Engine, outputs: Outputs) -> None:
        y = outputs["y"].copy()
        leftovers(engine, outputs)
        if small:  # well within the tolerance, but a deterministic engine never differs
            outputs["y"] = y + F32(1e-6) * (outputs["y"] != y)

    infos = checked(Engine(right, fault))
    assert failed(infos) == {ORDER}
    assert infos[DETERMINISM].kind == "bit-identical"
    assert infos[ORDER].kind == "differs-from-repeats"
    assert infos[ORDER].text.endswith(", although repeated runs are bit-identical")


@pytest.mark.parametrize("name", ["y", "n"])
def test_an_element_that_is_not_written(right: list[Outputs], name: str) -> None:
    infos = checked(Engine(right, hole(name)))
    assert UNWRITTEN in failed(infos)
    size = 4 if name == "y" else 2
    assert infos[UNWRITTEN].text == f"1 of {size} elements of {name} are not written"
    assert infos[UNWRITTEN].kind == "not-written"
    assert infos[UNWRITTEN].facts == {"count": 1, "of": size, "output": name}
    assert infos[UNWRITTEN].sizes == {"b": 1}


def test_ones_that_are_meant_are_written(right: list[Outputs]) -> None:
    def fault(engine: Engine, outputs: Outputs) -> None:
        del engine
        outputs["n"] = np.full(2, -1, np.int64)  # every byte is 0xFF

    assert not failed(checked(Engine(right, fault)))


def test_an_output_that_comes_and_goes(right: list[Outputs]) -> None:
    def fault(engine: Engine, outputs: Outputs) -> None:
        if engine.calls % 2:
            del outputs["n"]

    infos = checked(Engine(right, fault))
    assert {DETERMINISM, ORDER} <= failed(infos)
    assert "n differs by up to infinity" in infos[DETERMINISM].text


@pytest.mark.parametrize(
    ("want", "got", "far", "within"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, True),
        ([1.0, np.nan], [1.0, np.nan], 0.0, True),
        ([1.0, np.nan], [1.0, -np.nan], 0.0, True),  # its sign has no meaning
        ([1.0, 2.0], [1.0, 2.001], 1e-3, True),
        ([1.0, 2.0], [1.0, 2.01], 1e-2, False),
        ([1.0, 2.0], [1.0, np.nan], np.inf, False),
        ([1.0, np.inf], [1.0, 2.0], np.inf, False),
        ([1.0, np.inf], [1.0, -np.inf], np.inf, False),
    ],
)
def test_how_far_apart(want: Any, got: Any, far: float, within: bool) -> None:
    a, b = np.array(want, F32), np.array(got, F32)
    assert apart(a, b, TOLERANCE["y"]) == (pytest.approx(far, rel=1e-3), within)


def test_other_shapes_types_and_whole_numbers_are_apart() -> None:
    a = np.ones((2, 3), F32)
    for other in (a.T, a.astype(np.float64), None):
        assert apart(a, other, TOLERANCE["y"]) == (np.inf, False)
    assert apart(np.array([1000]), np.array([1001]), TOLERANCE["y"]) == (1.0, False)
    # float64 has not all of these
    assert apart(np.array([2**60]), np.array([2**60 + 5]), TOLERANCE["y"]) == (1.0, False)
    assert apart(np.array([True]), np.array([False]), TOLERANCE["y"]) == (1.0, False)
    zero = apart(np.array([0.0], F32), np.array([-0.0], F32), TOLERANCE["y"])
    assert 0 < zero[0] < 1e-300 and zero[1]


def test_without_sizes_nothing_is_claimed() -> None:
    engine = Subject(FeedRunner("engine", dict), FeedRunner("engine", dict))
    assert check_engine(engine, [], [], [], TOLERANCE) == Checked()


FULL = "9 GiB are wanted, 1 GiB is free"


def full(when: Callable[[Engine, Outputs], bool], error: type[Exception] = OutOfMemory) -> Fault:
    """Runs out of memory after the first round, which made the outputs to compare."""

    def fault(engine: Engine, outputs: Outputs) -> None:
        if engine.calls > len(FEEDS) and when(engine, outputs):
            raise error(FULL)

    return fault


def test_a_size_that_does_not_fit_is_named_and_the_others_checked(right: list[Outputs]) -> None:
    done = all_of(Engine(right, full(lambda _, outputs: len(outputs["y"]) == 7)))
    assert [(info.name, info.passed, info.text) for info in done.checks] == [
        (DETERMINISM, True, "3 runs at each of 4 sizes: bit-identical"),
        (UNWRITTEN, True, "every element is written at each of 4 sizes"),
        (ORDER, True, "4 sizes in another order: bit-identical"),
    ]
    assert {note.kind for note in done.notes} == {"check-out-of-memory"}
    assert [note.text for note in done.notes] == [
        f"{name} of engine: not done at size 7 (b=7): {FULL}"
        for name in (DETERMINISM, UNWRITTEN, ORDER)
    ]


def test_where_no_size_fits_a_check_is_not_done(right: list[Outputs]) -> None:
    done = all_of(Engine(right, full(lambda *_: True)))
    assert done.checks == []
    for name, note in zip((DETERMINISM, UNWRITTEN, ORDER), done.notes, strict=True):
        start = f"{name} of engine: not done, no size fits into the GPU's memory: at "
        assert note.kind == "check-not-done"
        assert note.text.startswith(start) and note.text.endswith(f": {FULL}")
        names = note.facts["names"]
        assert isinstance(names, tuple) and sorted(map(str, names)) == sorted(map(str, POINTS))


def test_a_fault_where_it_fits_is_found(right: list[Outputs]) -> None:
    def fault(engine: Engine, outputs: Outputs) -> None:
        full(lambda _, outputs: len(outputs["y"]) == 7)(engine, outputs)
        hole("y")(engine, outputs)

    done = all_of(Engine(right, fault))
    infos = {info.name: info for info in done.checks}
    assert UNWRITTEN in failed(infos) and len(done.notes) == 3


def test_a_difference_counts_though_a_later_run_does_not_fit(right: list[Outputs]) -> None:
    def fault(engine: Engine, outputs: Outputs) -> None:
        if engine.calls > len(FEEDS) + 3:
            raise OutOfMemory(FULL)
        outputs["y"][-1, -1] += engine.calls

    done = all_of(Engine(right, fault))
    assert [(info.name, info.passed) for info in done.checks] == [(DETERMINISM, False)]
    assert done.checks[0].sizes == {"b": 1}


def test_no_repeat_no_claim_that_repeats_are_equal(right: list[Outputs]) -> None:
    """If the repeats did not fit in memory, the order check uses the tolerance, not equal bits."""

    def fault(engine: Engine, outputs: Outputs) -> None:
        if len(FEEDS) < engine.calls <= 2 * len(FEEDS):  # the first repeat of every size
            raise OutOfMemory(FULL)
        outputs["y"][-1, -1] += 5e-5 * (engine.calls % 2)

    done = all_of(Engine(right, fault))
    assert {info.name for info in done.checks} == {UNWRITTEN, ORDER}
    assert not failed({info.name: info for info in done.checks})
    assert "y differs by up to 5" in done.checks[1].text


def test_other_errors_are_no_lack_of_memory(right: list[Outputs]) -> None:
    with pytest.raises(EngineError, match="9 GiB"):
        all_of(Engine(right, full(lambda *_: True, EngineError)))
