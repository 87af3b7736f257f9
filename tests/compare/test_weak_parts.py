"""Outputs with several kinds of numbers, which one tolerance does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.compare.verdict import judge
from pipeline.compare.weak_parts import weak_parts
from pipeline.spec.noise import Noise
from pipeline.spec.tensors import Tolerance


def detections(boxes: int, seed: int) -> np.ndarray:
    """(1, boxes, 5) float64: pixels up to 640, and scores, most of them small."""
    random = np.random.default_rng(seed)
    scores = random.uniform(0, 0.1, (1, boxes, 1)) ** 2
    return np.concatenate([random.uniform(0, 640, (1, boxes, 4)), scores], -1)


def measured(exact: np.ndarray) -> Tolerance:
    moved = exact.astype(np.float32)
    return Noise.between(moved, exact, float(np.finfo(np.float32).eps)).tolerance("y", "float32")


def test_scores_beside_boxes() -> None:
    points = [detections(300, 0), detections(40, 1)]
    tolerance = measured(points[0])
    right = [{"y": p.astype(np.float32)} for p in points]
    zeros = {"y": right[0]["y"].copy()}
    zeros["y"][..., 4] *= 0.6
    (result,) = judge("torch", "engine", right[0], zeros, tolerance)
    assert result.passed  # this must be reported
    (note,) = weak_parts(right, {"y": tolerance})
    assert note.kind == "weak-parts" and note.facts["names"] == (4,)
    assert note.text.startswith("y: 1 of 5 indices of axis 2 (4) have a root mean square of at mo")
    assert f"atol={tolerance.atol:.3g} could hide a fault" in note.text
    # as separate outputs they have fitting tolerances
    apart = [{"boxes": r["y"][..., :4], "scores": r["y"][..., 4:]} for r in right]
    fitting = {"boxes": tolerance, "scores": measured(points[0][..., 4:])}
    assert weak_parts(apart, fitting) == []


def test_a_channel_of_an_image() -> None:
    image = np.random.default_rng(0).normal(0, 5e3, (2, 8, 4, 4)).astype(np.float32)
    image[:, [3, 7]] = 1e-3
    (note,) = weak_parts([{"y": image}, {"y": image[..., :3]}], {"y": Tolerance(1e-4, 0.05, "-")})
    assert note.kind == "weak-parts" and note.facts["names"] == (3, 7)
    assert note.text.startswith(
        "y: 2 of 8 indices of axis 1 (3, 7) have a root mean square of at most 0.001. "
    )


@pytest.mark.parametrize(
    "arrays",
    [
        [np.full((2, 3), 1e-6, np.float32)],  # all values are small: another check refuses this
        [np.ones((2, 3), np.float32)],
        [np.array([[1, 0]], np.int64)],
        [np.zeros((0, 3), np.float32)],
        [np.array([1.0, 0.0], np.float32)],  # rows, not parts
        [np.array([[1.0, 0.0]], np.float32), np.array([[1.0, 0.0, 1.0]], np.float32)],  # dynamic
    ],
)
def test_nothing_to_tell(arrays: list[np.ndarray]) -> None:
    assert weak_parts([{"y": a} for a in arrays], {"y": Tolerance(1e-4, 1e-4, "-")}) == []
