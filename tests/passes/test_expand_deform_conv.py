"""expand_deform_conv: a large image, half precision, and faults that must be noticed."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from pass_harness import apply, assert_same, own, run

from pipeline.passes.case import Case
from pipeline.passes.expand_deform_conv import PASS

POSITIVE = own("expand_deform_conv", "positive")


def named(name: str) -> Case:
    (case,) = (c for c in POSITIVE if c.name == name)
    return case


def test_far_from_the_corner_the_places_are_still_right() -> None:
    """Normalising a place and back rounds by 3e-5 of a pixel at 1000 columns."""
    case = named("plain")
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 4, 5, 1000), "k": (6, 4, 3, 3), "o": (1, 18, 3, 998)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    after, _ = apply(PASS, case.model())
    (right,), (y,) = run(case.model(), feeds), run(after, feeds)
    assert np.abs(y - right).max() < 1e-4 * np.abs(right).max()


@pytest.mark.parametrize("fault", ["x for y", "corners", "border"])
def test_a_wrong_grid_is_noticed(fault: str) -> None:
    case = named("strides, pads, dilations")
    feeds = case.feeds(case.shapes[1])
    graph = gs.import_onnx(apply(PASS, case.model())[0])
    (sample,) = (n for n in graph.nodes if n.op == "GridSample")
    (join,) = (n for n in graph.nodes if n.outputs[0] is sample.inputs[1])
    if fault == "x for y":
        join.inputs = join.inputs[::-1]
    elif fault == "corners":
        sample.attrs["align_corners"] = 1
    else:
        sample.attrs["padding_mode"] = "border"
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(gs.export_onnx(graph), feeds))


def test_half_precision_is_sampled_in_float32() -> None:
    """Half precision has no number for column 500.3: its steps there are 0.25 and 0.5."""
    case = named("mask and bias")
    half = Case(**{**vars(case), "text": case.text.replace("float[", "float16[")})
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 4, 5, 600), "k": (6, 4, 3, 3), "o": (1, 18, 3, 598), "b": (6,)}
    shapes["m"] = (1, 9, 3, 598)
    feeds = {name: rng.normal(size=s).astype(np.float16) for name, s in shapes.items()}
    (right,) = run(case.model(), {name: f.astype(np.float32) for name, f in feeds.items()})
    after, _ = apply(PASS, half.model())
    onnx.checker.check_model(after, full_check=True)
    (y,) = run(after, feeds)
    assert y.dtype == np.float16
    assert np.abs(y - right).max() < 2e-3 * np.abs(right).max()
