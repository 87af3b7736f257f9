"""Tolerances of the parts of an output: boxes in pixels beside scores from 0 to 1."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.artifact.reproduce import StoredRun, reproduce_script
from pipeline.compare.verdict import judge, surely_agree
from pipeline.compare.weak_parts import weak_parts
from pipeline.errors import InputError
from pipeline.spec.closeness import Difference
from pipeline.spec.noise import Noise
from pipeline.spec.noise_parts import Sample, measured
from pipeline.spec.tensors import Tolerance

F32 = np.float32
EPS = float(np.finfo(F32).eps)


def detections(boxes: int, seed: int, axis: int = -1) -> np.ndarray:
    """(1, boxes, 10) float64: four coordinates up to 640, and six scores, most of them small."""
    random = np.random.default_rng(seed)
    scores = random.uniform(0.01, 1, (1, boxes, 6)) ** 4
    wide = random.uniform(-20, 640, (1, boxes, 4))
    return np.moveaxis(np.concatenate([wide, scores], -1), -1, axis)


def rounded(exact: np.ndarray, seed: int, units: float = 2.0) -> np.ndarray:
    """The array in float32, with a rounding error of a few units of each part's scale."""
    random = np.random.default_rng(seed)
    scale = np.where(np.abs(exact) > 1.5, 640.0, np.abs(exact))
    return (exact + random.uniform(-units, units, exact.shape) * EPS * scale).astype(F32)


def tolerance_of(exact: list[np.ndarray]) -> Tolerance:
    samples: list[Sample] = [(rounded(e, n), e, EPS) for n, e in enumerate(exact)]
    noise: Noise | None = None
    for moved, right, eps in samples:
        noise = Noise.between(moved, right, eps).worst(noise)
    assert noise is not None
    return measured(noise, samples, "y", "rounding")


@pytest.mark.parametrize("axis", [1, 2])
def test_each_scale_has_its_own_atol(axis: int) -> None:
    tolerance = tolerance_of([detections(300, 0, axis), detections(80, 1, axis)])
    assert tolerance.axis == axis and len(tolerance.parts) == 10
    assert set(tolerance.parts[:4]) == {tolerance.atol}
    (small,) = set(tolerance.parts[4:])
    assert 0 < small < 1e-2 * tolerance.atol
    assert str(tolerance).startswith(
        f"rtol 0.0001 or atol {tolerance.atol:g}, atol {small:g} for 6 of 10 indices of axis {axis}"
    )


def faults(right: np.ndarray) -> dict[str, np.ndarray]:
    """Wrong results by name; all but the last two hide under the atol of the whole output."""
    made = {name: right.copy() for name in ("scaled", "shifted", "one", "zeros", "boxes", "nan")}
    made["scaled"][..., 4:] *= 1.001
    made["shifted"][..., 4:] += 1e-4
    made["one"][0, 7, 6] += 1e-4
    made["zeros"][..., 4:] = np.where(right[..., 4:] < 1e-3, 0, right[..., 4:])
    made["boxes"][0, 3, 2] += 0.5
    made["nan"][0, 0, 9] = np.nan
    return made


@pytest.mark.parametrize("name", ["scaled", "shifted", "one", "zeros", "boxes", "nan"])
def test_a_planted_fault_fails(name: str) -> None:
    tolerance = tolerance_of([detections(300, 0), detections(80, 1)])
    right = detections(200, 2).astype(F32)
    wrong = faults(right)[name]
    (found,) = judge("a", "b", {"y": right}, {"y": wrong}, tolerance)
    assert not found.passed and not surely_agree(right, wrong, tolerance)
    if name == "one":
        assert found.kind == "differs" and found.facts["index"] == (0, 7, 6)
    whole = Tolerance(tolerance.rtol, tolerance.atol, "whole")
    (hidden,) = judge("a", "b", {"y": right}, {"y": wrong}, whole)
    assert hidden.passed == (name in ("scaled", "shifted", "one", "zeros"))


def test_a_right_result_passes_at_any_size() -> None:
    tolerance = tolerance_of([detections(300, 0), detections(80, 1)])
    for seed in range(2, 40):
        exact = detections(20 + 9 * seed, seed)
        right, other = exact.astype(F32), rounded(exact, seed, 20)
        (found,) = judge("a", "b", {"y": right}, {"y": other}, tolerance)
        assert found.passed, found.text
        assert Difference(right, other).within(tolerance)


def test_parts_never_widen() -> None:
    tolerance = tolerance_of([detections(300, 0), detections(80, 1)])
    assert max(tolerance.parts) <= tolerance.atol
    with pytest.raises(InputError, match="parts: must be from 0 to atol"):
        Tolerance(1e-4, 1e-5, "-", axis=1, parts=(1e-5, 2e-5))
    for words in ({"axis": 1}, {"parts": (1e-6,)}, {"axis": -1, "parts": (1e-6,)}):
        with pytest.raises(InputError, match="pass an axis and its parts, or neither"):
            Tolerance(1e-4, 1e-5, "-", **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 9, 10), (10,), (1, 10, 2), ()])
def test_an_output_of_another_shape_gets_the_smallest_atol(shape: tuple[int, ...]) -> None:
    tolerance = Tolerance(0.0, 1.0, "-", axis=2, parts=(1.0,) * 9 + (1e-6,))
    allowed = np.broadcast_to(tolerance.atol_at(shape), shape)
    if shape == (1, 9, 10):
        assert (allowed[..., :9] == 1).all() and (allowed[..., 9] == 1e-6).all()
    else:
        assert (allowed == 1e-6).all()


def test_a_part_with_the_atol_zero_must_be_equal_or_within_rtol() -> None:
    tolerance = Tolerance(1e-4, 1.0, "-", axis=1, parts=(1.0, 0.0))
    a = np.array([[3.0, 3.0], [0.0, 0.0]], F32)
    for place, passed in (((1, 0), True), ((1, 1), False)):
        b = a.copy()
        b[place] += 0.5
        assert judge("a", "b", {"y": a}, {"y": b}, tolerance)[0].passed is passed
    close = a * F32(1.00005)
    assert judge("a", "b", {"y": a}, {"y": close}, tolerance)[0].passed


def test_one_scale_has_one_atol() -> None:
    channels = np.geomspace(0.05, 1, 8)[:, None, None]
    exact = np.random.default_rng(0).uniform(-1, 1, (1, 8, 20, 20)) * channels
    assert tolerance_of([exact]).parts == ()


@pytest.mark.parametrize(
    "exact",
    [
        detections(5, 0),  # too few scores
        np.concatenate([detections(300, 0)[..., :4], np.zeros((1, 300, 2))], -1),  # no scores
        detections(300, 0).reshape(-1),
    ],
)
def test_what_cannot_be_measured_keeps_the_whole_atol(exact: np.ndarray) -> None:
    assert tolerance_of([exact]).parts == ()


def tiny_scores(seed: int) -> np.ndarray:
    """(1, 84, 300) float64: four sides up to 640, and 80 scores near 1e-5, as YOLOv8 at random."""
    random = np.random.default_rng(seed)
    scores = np.exp(random.normal(-11, 1, (1, 80, 300)))
    return np.concatenate([random.uniform(-20, 640, (1, 4, 300)), scores], 1)


def test_an_output_of_mostly_tiny_values_is_measured_by_parts() -> None:
    exact = [tiny_scores(0), tiny_scores(1)]
    samples: list[Sample] = []
    for n, e in enumerate(exact):
        moved = np.where(e < 1, rounded(e, n), rounded(e, n, 200.0))
        samples.append((moved, e, EPS))
    noise = Noise.between(*samples[0])
    with pytest.raises(InputError, match="no tolerance can be measured"):
        noise.tolerance("y", "rounding")
    found = measured(noise, samples, "y", "rounding")
    assert found.axis == 1 and set(found.parts[:4]) == {found.atol}
    assert 0.1 < found.atol < 6.4 and max(found.parts[4:]) < 1e-6
    noisy = [(moved * np.where(exact < 1, 1.05, 1.0), exact, EPS) for moved, exact, _ in samples]
    with pytest.raises(InputError, match="no tolerance can be measured"):  # no atol fits the scores
        measured(noise, noisy, "y", "rounding")


def test_an_axis_of_several_sizes_has_no_parts() -> None:
    shapes = [detections(300, 0, 1), detections(80, 1, 1)]
    assert tolerance_of([shapes[0].transpose(0, 2, 1), shapes[1].transpose(0, 2, 1)]).axis == 2
    odd = [np.repeat(s, n, 1) for n, s in enumerate(shapes, 1)]
    assert tolerance_of(odd).parts == ()


def test_a_part_with_much_noise_keeps_the_whole_atol_and_is_named() -> None:
    """Rounding moves the scores by 5 %: no atol fits them."""
    exact = detections(300, 0)
    moved = rounded(exact, 0)
    moved[..., 4:] *= F32(1.05)
    whole = Noise.between(moved, exact, EPS)
    tolerance = measured(whole, [(moved, exact, EPS)], "y", "rounding")
    assert tolerance.atol > 1 and tolerance.parts == ()
    assert whole.moved > 0.01
    (note,) = weak_parts([{"y": exact.astype(F32)}], {"y": tolerance})
    assert note.facts["count"] == 6


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_large_values_do_not_widen_the_tolerance_of_the_others(share: float) -> None:
    """A flat output has no axis of parts."""
    random = np.random.default_rng(0)
    exact = random.standard_normal(2000) * np.where(np.arange(2000) < 2000 * share, 1.0, 1e6)
    moved = exact.astype(F32)
    tolerance = Noise.between(moved, exact, EPS).tolerance("y", "rounding")
    limit = 1e-2 if share > 0.5 else 1e2
    assert tolerance.atol < limit


def test_parts_with_a_fitting_atol_are_not_named_as_weak() -> None:
    points = [{"y": detections(n, n).astype(F32)} for n in (200, 90)]
    tolerance = tolerance_of([detections(300, 0), detections(80, 1)])
    whole = Tolerance(tolerance.rtol, tolerance.atol, "whole")
    assert weak_parts(points, {"y": tolerance}) == []
    assert Tolerance(1e-4, 1e-5, "-", axis=1, parts=(1e-5, 1e-6)).parts
    assert whole.is_wider_than(tolerance) and not tolerance.is_wider_than(whole)
    assert not tolerance.is_wider_than(tolerance)


def test_the_script_says_what_it_cannot_check() -> None:
    tolerance = tolerance_of([detections(300, 0), detections(80, 1)])
    runs = [StoredRun("inputs.json", "torch.json")]
    words = "# Parts of an output have a smaller atol, which Polygraphy cannot check."
    assert words in reproduce_script(runs, {"y": tolerance}, flavour="tensorrt").splitlines()
    plain = {"y": Tolerance(1e-4, 1e-5, "-")}
    assert words not in reproduce_script(runs, plain, flavour="tensorrt")
