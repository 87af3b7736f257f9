"""Random sizes after the planned ones: which are drawn, and what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pipeline.compare.plan import Job
from pipeline.compare.random_sizes import RandomSizes, compare_random_sizes
from pipeline.convert.report import Report
from pipeline.errors import CompareError
from pipeline.spec.dims import Dim, kept_rules
from pipeline.spec.interface import Interface
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.profiles import Point, Profile, points

TOLERANCE = Tolerance(1e-4, 1e-5, "a product")
SECONDS = 1e6  # so that the number of sizes ends the search


@dataclass(frozen=True)
class Function:
    """Computes y from x with NumPy."""

    name: str
    function: Callable[[np.ndarray], np.ndarray]
    precision: Any = "fp32"

    def run(self, feeds: Iterable[Mapping[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        for feed in feeds:
            yield {"y": self.function(feed["x"])}


def interface(rules: tuple[str, ...] = ()) -> Interface:
    h, w = Dim("h", 4, 64, 400, multiple_of=2), Dim("w", 3, 50, 90)
    spec = ModelSpec(
        "m", lambda _: None, (Input("x", (2, h, w)),), (Output("y", (2, h, w)),),
        tolerance=TOLERANCE, rules=rules,
    )  # fmt: skip
    own = spec.interface.settled({"y": (2, "h", "w")}, {"y": "float32"})
    profiles = (Profile("small", {"h": (4, 8, 40)}), Profile("tall", {"h": (60, 64, 400)}))
    return replace(own, profiles=tuple(p.resolve(own.dims) for p in profiles))


def search(function: Callable[[np.ndarray], np.ndarray], **more: Any) -> RandomSizes:
    own = interface(more.pop("rules", ()))
    planned = points(own.dims, own.profiles, (), own.rules)
    runners = [Function("torch", lambda x: x * 2), Function("exported", function)]
    return compare_random_sizes(
        Job(own, planned, 1 << 40), runners, more.pop("planned", planned),
        more.pop("seconds", SECONDS), lambda sizes: own.sample(sizes, 0), more.pop("seed", 0),
    )  # fmt: skip


def test_a_rare_size_is_found() -> None:
    found = search(lambda x: x * 2 + (x.shape[1] == 122))
    assert {point.sizes["h"] for point in found.failed} == {122}
    assert [point.label for point in found.failed] == ["random"] * 2
    assert found.compared > 20


def test_an_error_of_the_reference_is_not_repeated() -> None:
    """A repeated run would not show that the model remembers an earlier call."""

    def remember(x: np.ndarray) -> np.ndarray:
        raise CompareError(f"remembers at {x.shape}")

    with pytest.raises(CompareError, match="remembers"):
        search(remember)


def test_a_short_range_is_seen_whole() -> None:
    """Also if a tenth of the time is nothing. Independent sizes would miss a fifth of the range."""
    seen: list[int] = []

    def double(x: np.ndarray) -> np.ndarray:
        seen.append(x.shape[2])
        return x * 2

    search(double, seconds=0.0)
    assert set(range(3, 91)) <= set(seen[:160])


def test_a_fault_where_the_reference_is_near_zero_is_found() -> None:
    own = interface()
    planned = points(own.dims, own.profiles, (), own.rules)

    def torch(x: np.ndarray) -> np.ndarray:
        return x * np.float32(1e-8 if x.shape[1] == 122 else 2)

    def found(function: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
        runners = [Function("torch", torch), Function("exported", function)]
        job, sample = Job(own, planned, 1 << 40), lambda sizes: own.sample(sizes, 0)
        return compare_random_sizes(job, runners, planned, SECONDS, sample, 0).failed

    assert found(torch) == []
    wrong = found(lambda x: x * 2)
    assert wrong and {point.sizes["h"] for point in wrong} == {122}


def test_a_run_that_fails_ends_the_search() -> None:
    def fails(x: np.ndarray) -> np.ndarray:
        if x.shape[2] == 77:
            raise RuntimeError("too wide")
        return x * 2

    assert [point.sizes["w"] for point in search(fails).failed] == [77]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.astype(np.float64) * 2,
        lambda x: (x * 2)[:1],
        lambda x: np.where(x > 0.99, np.nan, x * 2).astype(np.float32),
    ],
    ids=["dtype", "shape", "NaN"],
)
def test_what_differs(function: Callable[[np.ndarray], np.ndarray]) -> None:
    assert search(function).failed


def test_every_size_is_legal_new_and_in_a_profile() -> None:
    seen: list[dict[str, int]] = []

    def note(x: np.ndarray) -> np.ndarray:
        seen.append({"h": x.shape[1], "w": x.shape[2]})
        return x * 2

    own = interface(("h + w <= 300",))
    planned = points(own.dims, own.profiles, (), own.rules)
    found = search(note, rules=own.rules)
    assert found.failed == [] and found.compared == len(seen) == 1000
    assert all(any(p.allows(sizes) for p in own.profiles) for sizes in seen)
    assert all(kept_rules(own.rules, sizes) for sizes in seen)
    assert all(sizes["h"] % 2 == 0 for sizes in seen)
    assert not any(point.sizes in seen for point in planned)
    assert len({tuple(sizes.values()) for sizes in seen}) == len(seen)
    areas = [sizes["h"] * sizes["w"] for sizes in seen[:10]]
    assert areas == sorted(areas)


def test_no_size_is_larger_than_the_planned_ones() -> None:
    seen: list[int] = []
    search(lambda x: seen.append(x.size) or x * 2, planned=[Point("opt", {"h": 8, "w": 50})])
    assert seen and max(seen) <= 2 * 8 * 50


def test_the_search_ends_where_few_sizes_keep_the_rules() -> None:
    """Each size that is drawn costs some 30 us, also if it breaks a rule."""
    own = interface(("h == 2 * w + 200",))
    planned = points(own.dims, own.profiles, (), own.rules)
    begin = time.process_time()
    found = search(lambda x: x * 2, rules=own.rules, planned=planned)
    assert found.failed == [] and time.process_time() - begin < 1.0


def test_the_seed_decides() -> None:
    def sizes(seed: int) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        search(lambda x: seen.append(x.shape) or x * 2, seed=seed)
        return seen

    assert sizes(1) == sizes(1) != sizes(2)


def test_nothing_to_compare_with() -> None:
    own = interface()
    job = Job(own, (), 1 << 40)
    one = [Function("exported", lambda x: x)]
    at = [Point("opt", {"h": 8, "w": 50})]
    assert compare_random_sizes(job, one, at, 9.0, lambda _: {}, 0) == RandomSizes()


def test_the_manifest_says_how_many(converted: Report) -> None:
    comparison = converted.manifest.comparison
    assert comparison is not None
    (found,) = (note for note in comparison.notes if note.kind == "random-sizes")
    assert found.facts["count"] >= 1
    assert not found.fails
