"""Conversions in half precision: their files, and their findings without a GPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny
from helpers import refinish
from on_gpu import save_net

from pipeline.artifact.artifact import Artifact
from pipeline.commands.report import report_text
from pipeline.convert.driver import run, run_build, run_export, run_rewrite, verify
from pipeline.convert.options import Verify
from pipeline.convert.report import Report
from pipeline.errors import CompareError
from pipeline.spec.config import Config
from pipeline.spec.model import Tolerance
from pipeline.spec.tensors import Precision

WIDE = Tolerance(1e-2, 1e-2, "fp16 rounding")


def converted(
    folder: Path,
    tolerance: Tolerance | None = None,
    precision: Precision = "fp16",
    recipe: Path | None = None,
) -> Report:
    """`save_net`'s net, converted for the installed TensorRT."""
    dims = ("b=1:2:3", "h=8:12:16", "w=8:12:16")
    return run(
        Config(
            str(folder / "net.onnx"), out=folder / "net", dims=dims, precision=precision,
            engine_tolerance=tolerance, recipe=recipe,
        )
    )  # fmt: skip


@pytest.fixture
def net(tmp_path: Path) -> Path:
    save_net(tmp_path / "net.onnx")
    return tmp_path


def test_what_was_built_is_kept_and_compared(net: Path) -> None:
    report = converted(net, WIDE)
    assert report.ok
    assert "half.onnx" in report.manifest.files
    assert report.manifest.comparison is not None
    for point in report.manifest.comparison.points:
        held = {result.pair: result for result in point.results}
        assert ("exported", "half") in held
        assert held["exported", "half"].max_abs > 0  # type: ignore[operator]


def broken(artifact: Path, factor: float) -> None:
    """Multiplies the weights of the second convolution in half.onnx."""
    half = onnx.load(artifact / "half.onnx")
    for tensor in half.graph.initializer:
        if tensor.name == "second/half":
            weights = onnx.numpy_helper.to_array(tensor) * np.float16(factor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights, tensor.name))
    onnx.save(half, artifact / "half.onnx")
    refinish(artifact)


def test_without_a_tolerance_it_is_measured(net: Path) -> None:
    report = converted(net)
    info = report.manifest.comparison
    assert report.ok and info is not None
    assert not any(note.kind == "no-engine-tolerance" for note in info.notes)
    assert report.manifest.engine_tolerances() == info.engine_tolerances
    for name, tolerance in info.engine_tolerances.items():
        off = [
            r.max_abs for p in info.points for r in p.results
            if r.pair == ("exported", "half") and r.output == name and r.max_abs is not None
        ]  # fmt: skip
        assert max(off) < tolerance.atol < 10 * max(off)
        assert tolerance.is_wider_than(report.manifest.tolerances()[name])
        assert "measured: simulated fp16 rounding moves it by" in tolerance.why
    assert "tolerance of the engine of y: rtol 0.00195" in report_text(report)
    # the next comparison measures the same
    assert verify(report.path).manifest.engine_tolerances() == info.engine_tolerances


def test_tf32_has_a_measured_tolerance_too(net: Path) -> None:
    report = converted(net, precision="tf32")
    info = report.manifest.comparison
    assert report.ok and info is not None
    plain, found = report.manifest.tolerances(), info.engine_tolerances
    assert report.manifest.engine_tolerances() == found and found.keys() == plain.keys()
    assert all("simulated tf32 rounding moves it by" in t.why for t in found.values())
    assert all(found[name].is_wider_than(plain[name]) for name in found)
    assert "tolerance of the engine of y: rtol 0.00195" in report_text(report)


def test_a_fault_is_beyond_the_measured_tolerance(net: Path) -> None:
    place = converted(net).path
    broken(place, 1.02)
    report = verify(place)
    assert not report.ok
    text = report_text(report)
    assert "fp16 is too coarse for this output, or its conversion is wrong: build the" in text
    assert re.search(r"y of half against exported at .*--precision auto.*--engine-tol.*by up", text)


def broken_at(artifact: Path, height: int) -> None:
    """Adds 1 to the output y of half.onnx at one height."""
    half = onnx.load(artifact / "half.onnx")
    for node in half.graph.node:
        node.output[:] = ["y_before" if name == "y" else name for name in node.output]
        node.input[:] = ["y_before" if name == "y" else name for name in node.input]
    body = onnx.parser.parse_graph(
        f"""g (float[b,3,h,w] x, float[b,8,h,w] y_before) => (float[b,8,h,w] y)
        <int64 two = {{2}}, int64 at = {{{height}}}>
        {{ s = Shape(x) n = Gather(s, two) e = Equal(n, at) f = Cast<to = 1>(e)
        y = Add(y_before, f) }}"""
    )
    half.graph.initializer.extend(body.initializer)
    half.graph.node.extend(body.node)
    onnx.save(half, artifact / "half.onnx")
    refinish(artifact)


def test_a_fault_at_a_size_that_is_not_planned_is_found(net: Path) -> None:
    report = converted(net)
    info = report.manifest.comparison
    assert info is not None and all(point.sizes["h"] != 14 for point in info.points)
    broken_at(report.path, 14)
    again = verify(report.path)
    assert not again.ok and again.manifest.comparison is not None
    points = again.manifest.comparison.points
    failed = [p for p in points if not all(result.passed for result in p.results)]
    assert {(point.label, point.sizes["h"]) for point in failed} == {("random", 14)}


def test_the_tolerance_is_measured_again_with_the_random_sizes_that_exceed_it(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding alone may be larger there."""
    counts: list[int] = []

    def wide(*args: Any) -> dict[str, Tolerance]:
        counts.append(len(args[3].points))
        assert len(args[3].feeds) == counts[-1]
        return {"y": WIDE, "mean": WIDE}

    monkeypatch.setattr("pipeline.compare.model_runs.rounding_tolerances", wide)
    monkeypatch.setattr("pipeline.compare.random_sizes.agree", lambda *_: False)
    report = converted(net)
    assert report.ok and report.manifest.comparison is not None
    assert counts == [counts[0], counts[0] + 2]
    labels = [point.label for point in report.manifest.comparison.points]
    assert labels.count("random") == 2


def test_what_exceeds_the_measured_tolerance_is_kept_and_marked(
    net: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    def too_narrow(*_: object) -> dict[str, Tolerance]:
        return {"y": Tolerance(1e-6, 1e-6, "narrow"), "mean": WIDE}

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.compare.model_runs.rounding_tolerances", too_narrow)
        kept = r"(?s)net is kept, marked as failed\n! y of half .*    do: fp16 is too coarse "
        with pytest.raises(CompareError, match=kept) as caught:
            converted(net)
    assert caught.value.exit_code == 1
    manifest = Artifact.open(net / "net").manifest
    assert manifest.comparison is not None and not manifest.comparison.passed
    assert (net / "net" / "engine.plan").is_file()
    code, out, _ = cli("inspect", net / "net")
    assert code == 1 and "the comparison FAILED" in out
    # only the comparison runs again, and a result that passed is not replaced
    again = converted(net)
    assert again.ok and again.manifest.created != ""
    assert again.manifest.build == manifest.build and again.ran == ("compare",)
    # the verdict counts no other seconds
    compared = next(one for one in again.manifest.stages if one.name == "compare")
    assert f", {compared.seconds:.0f} s)" in str(again).splitlines()[0]
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.compare.model_runs.rounding_tolerances", too_narrow)
        passed = r"has a result that passed, and is unchanged: pass another folder with --out"
        with pytest.raises(CompareError, match=passed):
            converted(net, precision="bf16")
    assert Artifact.open(net / "net").manifest == again.manifest


def doubled(x: Any) -> Any:
    import torch

    return x * 2 if torch.compiler.is_exporting() else x * 2 + 0.01


def test_a_difference_in_float32_is_not_kept(tmp_path: Path) -> None:
    why = r"(?s) was not written\n! y of exported differs from torch at .*differs by up to 0\.01"
    with pytest.raises(CompareError, match=why):
        run(Config(tiny.of(doubled), out=tmp_path / "a", precision="fp16"))
    assert not (tmp_path / "a").exists()


def test_bfloat16_is_compared_too(net: Path) -> None:
    report = converted(net, precision="bf16")
    info = report.manifest.comparison
    assert report.ok and info is not None and report.manifest.precision == "bf16"
    assert "half.onnx" in report.manifest.files
    assert 0.01 < info.engine_tolerances["y"].rtol < 0.02
    types = {t.data_type for t in onnx.load(report.path / "half.onnx").graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in types and onnx.TensorProto.FLOAT16 not in types


def test_a_target_without_bfloat16_refuses_it(net: Path, cli: Any) -> None:
    code, _, err = cli(
        "export", net / "net.onnx", "--out", net / "net", "--precision", "bf16",
        "--target", "tensorrt-8.6", "--dim", "b=1:3", "--dim", "h=8:16", "--dim", "w=8:16",
    )  # fmt: skip
    assert code == 2
    assert "target tensorrt-8.6: this TensorRT has no bf16. Use --precision fp16, or " in err


def test_an_overflow_shows_without_a_gpu(net: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[b,3,h,w] x) => (float[b,1,h,w] y)
        <float[1,3,1,1] k = {6e4, 6e4, 6e4}, float[1] tenth = {0.1}>
        { a = Conv(x, k) b = Relu(a) y = Mul(b, tenth) }"""
    onnx.save(onnx.parser.parse_model(text), net / "net.onnx")
    assert converted(net, precision="fp32").ok
    shutil.rmtree(net / "net")  # a result that passed is not replaced
    overflow = (
        r"(?s)is kept, marked as failed.*half has NaN .*first overflow in half precision: the "
    )
    overflow += r"Conv node .*: a reaches 1\.\d+e\+05\n    do: fp16 overflows beyond 65504"
    with pytest.raises(CompareError, match=overflow):
        converted(net)
    # a recipe is changed, because no other precision keeps it
    (net / "mine").write_text("* = fp16\n")
    own = overflow.replace(
        "do: fp16 overflows beyond 65504", r"do: fp16 overflows.*build the engine "
    )
    own += "with --precision bf16 or tf32, or keep more nodes in float32: add them to half.recipe"
    with pytest.raises(CompareError, match=own):
        converted(net, recipe=net / "mine")
    # bfloat16 has the range of float32
    assert converted(net, precision="bf16").ok


def test_it_is_compared_before_it_is_built(net: Path) -> None:
    dims = ("b=1:2:3", "h=8:12:16", "w=8:12:16")
    config = Config(
        str(net / "net.onnx"), out=net / "net", dims=dims, precision="fp16",
        target="tensorrt-8.6", engine_tolerance=WIDE,
    )  # fmt: skip
    run_export(config)
    run_rewrite(net / "net")
    report = verify(net / "net")
    assert report.ok
    assert report.manifest.comparison is not None
    (point, *_) = report.manifest.comparison.points
    assert ("exported", "half") in {result.pair for result in point.results}
    assert not verify(net / "net", Verify(engine_tolerance=Tolerance(1e-6, 1e-6, "narrow"))).ok


def test_what_got_worse_is_told_without_a_gpu(net: Path) -> None:
    old = converted(net, WIDE).path
    new = Path(shutil.copytree(old, net / "new"))
    assert verify(new, Verify(against=old)).ok
    broken(new, 1.02)
    found = verify(new, Verify(against=old)).regressions
    assert found
    assert all(one.facts["run"] == "half" for one in found)
    assert {one.kind for one in found} <= {"error-too-large", "error-grew"}
    assert all(" of half at stored" in one.text for one in found)


def test_another_precision_takes_it_away(net: Path) -> None:
    report = converted(net, WIDE)
    built = run_build(report.path, precision="tf32")
    note = "the engine in fp16: this one replaces it. --gpu adds one beside it"
    assert built.removed == (note,)
    assert run_build(report.path, precision="tf32").removed == ()
    assert "half.onnx" not in Artifact.open(report.path).manifest.files
    assert not (report.path / "half.onnx").exists()
    run_build(report.path, precision="fp16")
    assert "half.onnx" in Artifact.open(report.path).manifest.files
