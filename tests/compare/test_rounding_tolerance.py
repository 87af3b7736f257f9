"""The measured tolerance of an engine in half precision: what it allows, and what it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.rounding_tolerance import rounding_tolerances, wide_tolerances
from pipeline.compare.runners import Ground
from pipeline.graph.session import run_onnx
from pipeline.machine.progress import silent
from pipeline.machine.resources import Stopwatch
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import Dim
from pipeline.spec.interface import Interface
from pipeline.spec.model import Tolerance
from pipeline.spec.profiles import Point
from pipeline.spec.tensors import Feed, Input, Output, Precision

TIGHT = Tolerance(1e-5, 1e-6, "float32 rounding")
N = Dim("n", 1, 8, 64)
BODY = "a = MatMul(x, k) b = Relu(a) y = MatMul(b, k)"


class Case:
    """A model of x [n, 64] with one output, and its inputs at two sizes."""

    def __init__(
        self, folder: Path, body: str = BODY, own: Tolerance = TIGHT, dtype: str = "float"
    ):
        self.path, self.own = folder / "model.onnx", own
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[n,64] x) => ({dtype}[n,m] y) {{ {body} }}"""
        )
        weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(weights, "k"))
        onnx.save(model, self.path)
        self.points = [Point(str(n), {"n": n}) for n in (8, 64)]
        self.feeds: list[Feed] = [
            {"x": np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32)}
            for n in (8, 64)
        ]
        self.plain = list(run_onnx(self.path, self.feeds))

    def tolerance(self, precision: Precision) -> Tolerance:
        declared = Interface((Input("x", (N, 64)),), (Output("y", (N, 64), self.own),))
        ground = Ground(self.points, self.feeds, silent, Stopwatch())
        return rounding_tolerances(self.path, declared, precision, ground, self.plain)["y"]

    def passes(self, precision: Precision, gain: float = 1.0) -> list[bool]:
        """Whether half.onnx, with its output times `gain`, is within the tolerance at each size."""
        tolerance = self.tolerance(precision)
        half = HalfRunner(self.path, precision, plain=True).run(self.feeds)
        return [
            Difference(want["y"], got["y"] * np.float32(gain), wide=False).within(tolerance)
            for want, got in zip(self.plain, half, strict=True)
        ]


@pytest.mark.parametrize(("precision", "gain"), [("fp16", 1.01), ("bf16", 1.08)])
def test_a_right_engine_passes_and_a_wrong_one_does_not(
    tmp_path: Path, precision: Precision, gain: float
) -> None:
    case = Case(tmp_path)
    assert all(case.passes(precision))
    # fp16 has an error of 0.1 % here, and bf16 of 0.8 %
    assert not any(case.passes(precision, gain))


def test_it_is_a_few_times_the_rounding(tmp_path: Path) -> None:
    case = Case(tmp_path)
    fp16, bf16 = case.tolerance("fp16"), case.tolerance("bf16")
    assert 6 < bf16.atol / fp16.atol < 10
    for precision, tolerance in (("fp16", fp16), ("bf16", bf16)):
        half = HalfRunner(case.path, precision, plain=True).run(case.feeds)
        off = max(
            float(np.abs(a["y"] - b["y"]).max()) for a, b in zip(case.plain, half, strict=True)
        )
        assert 2 * off < tolerance.atol < 8 * off
        assert f"simulated {precision} rounding" in tolerance.why
        assert "; 4 times that is allowed" in tolerance.why


def test_the_text_names_the_rule_that_gave_the_number(tmp_path: Path) -> None:
    # the product is small beside what it is added to, so the floor is wider than the noise
    body = "f = Constant<value = float {0.001}>() a = MatMul(x, k) b = Mul(a, f) y = Add(x, b)"
    case = Case(tmp_path, body)
    tolerance = case.tolerance("fp16")
    rms = max(float(np.sqrt(np.square(p["y"].astype(float)).mean())) for p in case.plain)
    assert tolerance.atol == pytest.approx(2 * 2**-10 * rms, rel=0.05)
    assert "; at least 2 units in the last place of its root mean square" in tolerance.why
    assert "4 times" not in tolerance.why


def test_a_model_that_rounding_destroys_gets_no_wide_tolerance(tmp_path: Path) -> None:
    """The difference of two results that are almost equal: little but rounding is left."""
    body = "f = Constant<value = float {1.0001}>() j = Mul(k, f) a = MatMul(x, k)"
    case = Case(tmp_path, f"{body} c = MatMul(a, k) d = MatMul(a, j) y = Sub(c, d)")
    tolerance = case.tolerance("fp16")
    rms = max(float(np.sqrt(np.square(p["y"].astype(float)).mean())) for p in case.plain)
    assert tolerance.atol <= 0.5 * rms * 1.01
    assert "; 50% of its root mean square is allowed" in tolerance.why
    assert not any(case.passes("fp16"))


def test_a_note_names_a_wide_tolerance_and_the_choice_behind_it(tmp_path: Path) -> None:
    """The positions of the largest values of a product, and other values at these positions."""
    picks = (
        "a = MatMul(x, k) m = Constant<value_ints = [8]>() v, i = TopK(a, m) "
        "p = Neg(x) y = GatherElements<axis = 1>(p, i)"
    )
    zeros = f"{BODY.replace('y =', 'z =')} n = Neg(z) y = Add(z, n)"
    found = []
    for body, own in (
        (picks, TIGHT), (BODY, TIGHT), (BODY, Tolerance(1e-3, 9.0, "own")), (zeros, TIGHT)
    ):  # fmt: skip
        case = Case(tmp_path, body, own)
        measured = {"y": case.tolerance("fp16")}
        found += wide_tolerances(case.path, measured, {"y": own}, "fp16", case.plain)
    (note,) = found
    assert note.kind == "wide-tolerance" and note.facts["share"] == "50%"
    assert ": TopK node" in note.text and "choose in your program" in note.text


def test_where_rounding_is_coarse_a_right_engine_still_passes(tmp_path: Path) -> None:
    """A difference that bfloat16 computes with an error of a few percent."""
    body = "f = Constant<value = float {1.12}>() j = Mul(k, f) a = MatMul(x, k)"
    case = Case(tmp_path, f"{body} c = MatMul(a, k) d = MatMul(a, j) y = Sub(c, d)")
    tolerance = case.tolerance("bf16")
    rms = max(float(np.sqrt(np.square(p["y"].astype(float)).mean())) for p in case.plain)
    assert 0.2 * rms < tolerance.atol <= 0.5 * rms
    assert "of its root mean square is allowed" in tolerance.why
    assert all(case.passes("bf16"))
    assert not any(case.passes("bf16", 1.5)) and not any(case.passes("bf16", 0.0))


def test_it_is_never_narrower_than_the_one_for_fp32(tmp_path: Path) -> None:
    wide = Tolerance(0.5, 3.0, "stated")
    found = Case(tmp_path, own=wide).tolerance("fp16")
    assert (found.rtol, found.atol) == (0.5, 3.0) and "simulated" in found.why
    assert found.why.startswith("the atol for fp32 is wider, so it counts: stated; else: measured")
    # without products nothing is half, so the tolerance is that for fp32
    assert Case(tmp_path, "y = Exp(x)", own=TIGHT).tolerance("fp16") == TIGHT


def test_a_share_of_integers_may_differ(tmp_path: Path) -> None:
    body = "a = MatMul(x, k) b = MatMul(a, k) z = Constant<value = float {0}>() y = Greater(b, z)"
    case = Case(tmp_path, body, dtype="bool")
    fp16, bf16 = case.tolerance("fp16"), case.tolerance("bf16")
    assert fp16.differing < bf16.differing < 0.05
    assert "simulated bf16 rounding changes" in bf16.why
    stated = Tolerance(0, 0, "stated by the user", differing=0.1)
    assert Case(tmp_path, body, own=stated, dtype="bool").tolerance("bf16") == stated
    (half, _) = HalfRunner(case.path, "bf16", plain=True).run(case.feeds)
    changed = int((half["y"] != case.plain[0]["y"]).sum())
    assert changed <= bf16.differing * half["y"].size < half["y"].size / 20


def truncated(array: np.ndarray) -> np.ndarray:
    """The array as a kernel reads it that leaves out the last 13 bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def test_a_tf32_engine_passes_that_cuts_digits_off_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    case = Case(tmp_path)
    tolerance = case.tolerance("tf32")
    k = truncated(numpy_helper.to_array(onnx.load(case.path).graph.initializer[0]))
    off = 0.0
    for feed, plain in zip(case.feeds, case.plain, strict=True):
        y = truncated(np.maximum(truncated(feed["x"]) @ k, 0)) @ k
        assert Difference(plain["y"], y, wide=False).within(tolerance)
        off = max(off, float(np.abs(plain["y"] - y).max()))
        assert not Difference(plain["y"], y, wide=False).within(TIGHT)
        assert not Difference(plain["y"], plain["y"] * np.float32(1.01), wide=False).within(
            tolerance
        )
    assert "simulated tf32 rounding" in tolerance.why
    assert 2 * off < tolerance.atol < 8 * off


def test_an_output_beside_the_products_keeps_its_tolerance_in_tf32(tmp_path: Path) -> None:
    assert Case(tmp_path, "a = MatMul(x, k) z = Sub(a, a) y = Add(x, x)").tolerance("tf32") == TIGHT
