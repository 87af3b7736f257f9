"""The report at the end, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import tiny

from pipeline.artifact.manifest import ComparisonInfo, PointInfo
from pipeline.commands import report as summary
from pipeline.commands.report import models_table, report_json, report_text
from pipeline.commands.table import table
from pipeline.convert.driver import run_export
from pipeline.convert.report import Report
from pipeline.spec.config import Config
from pipeline.spec.findings import Facts, note
from pipeline.spec.verdicts import Verdict


def test_table_is_aligned() -> None:
    text = table([("a", "longer"), ("value", "x"), ("v", "")])
    assert text.splitlines() == ["a      longer", "-----  ------", "value  x", "v"]


def test_finished_report(converted: Report) -> None:
    text = report_text(converted)
    for part in (
        "export", "rewrite", "build", "compare", "torch.export", "tensorrt build",
        "profile default: h 5..18..40, w 5..22..40", "y: float32 [1, 4, h, w]",
        "are not needed by rtx-1.7", "engine: NOT compared: ", "compared at", "min", "h=5,w=5",
        "tolerance: rtol 0.0001 or atol 1e-05 (float32 rounding of one convolution)",
    ):  # fmt: skip
        assert part in text
    assert "FAILED" not in text
    assert "REGRESSION" not in text


def test_json_is_the_manifest_and_more(converted: Report) -> None:
    worse = [note("dim-removed", name="h")]
    content = json.loads(report_json(dataclasses.replace(converted, regressions=worse)))
    assert content["manifest"] == json.loads((converted.path / "manifest.json").read_text())
    assert content["ok"] is False
    assert content["regressions"] == [
        {"kind": "dim-removed", "facts": {"name": "h"}, "text": "dim h no longer exists"}
    ]
    assert content["unchanged"] is False


def test_what_failed_and_what_was_left_out(converted: Report) -> None:
    off: Facts = {"index": (0, 1), "largest": 0.5}
    large = note("too-large", need_bytes=67 * 2**30, limit_bytes=6 * 2**30)
    points = (
        PointInfo(
            "min", {"h": 5}, 1,
            (
                Verdict("differs", ("torch", "exported"), "y", 0.25, 0.5, off),
                Verdict("not-finite", ("torch", "rewritten"), "y", facts={"whose": "rewritten"}),
            ),
        ),
        PointInfo("opt", {"h": 9}, 1),
        PointInfo("max", {"h": 40}, 1, (), large),
    )  # fmt: skip
    comparison = ComparisonInfo(1, points, (note("source-is-onnx"),))
    manifest = dataclasses.replace(converted.manifest, comparison=comparison)
    report = Report(Path("a"), manifest, regressions=[note("dim-removed", name="y")])
    assert not report.ok
    lines = report_text(report).splitlines()
    (low,) = [line for line in lines if line.startswith("min ")]
    assert low.split() == ["min", "h=5", "2.50e-01", "5.00e-01", "2", "FAILED"]
    assert any("not compared: needs about 67.0 GiB" in line for line in lines)
    assert (
        "FAILED y of exported against torch at min (h=5): differs by up to 0.25 at index [0, 1]; "
        "the largest value is 0.5"
    ) in lines
    assert "REGRESSION dim y no longer exists" in lines
    assert "exported.onnx is the source itself, so it is the reference" in lines
    # a point without a result was not checked, and must not look like a passed point
    (opt,) = [line for line in lines if line.startswith("opt ")]
    assert not opt.endswith("ok")


def test_metrics_are_the_worst_of_all_sizes(converted: Report) -> None:
    def point(w: int, value: float, pair: tuple[str, str] = ("torch", "half")) -> PointInfo:
        facts: Facts = {"metric": "psnr", "measured": value}
        return PointInfo("odd", {"w": w}, 1, (Verdict("agrees", pair, "y", 0.1, 0.1, facts),))

    points = (point(1, 40.0), point(2, 31.5), point(3, 20.0, ("exported", "half")))
    shown = dataclasses.replace(converted.manifest, comparison=ComparisonInfo(1 << 30, points))
    text = report_text(dataclasses.replace(converted, manifest=shown))
    assert "y of half against torch: peak signal-to-noise ratio 31.5 dB at worst" in text
    assert "20.0 dB" not in text


def test_how_the_engine_was_built(converted: Report) -> None:
    manifest = converted.manifest
    assert manifest.build is not None
    build = dataclasses.replace(
        manifest.build, gpu="NVIDIA H200", optimization_level=2, timing_cache="a.cache, 7 bytes"
    )
    target = dataclasses.replace(manifest.target, compute_capabilities=("9.0",))
    text = report_text(Report(Path("a"), dataclasses.replace(manifest, build=build, target=target)))
    assert (
        "built on NVIDIA H200 (9.0), at optimisation level 2, timing cache a.cache, 7 bytes\n"
        in text
    )
    plain = dataclasses.replace(manifest.build, optimization_level=None, timing_cache="none")
    text = report_text(Report(Path("a"), dataclasses.replace(manifest, build=plain)))
    assert "\nbuilt " not in text


def test_unfinished_and_unchanged(tmp_path: Path, converted: Report) -> None:
    report = run_export(Config(tiny.conv(), out=tmp_path / "a"))
    text = report_text(report)
    assert "nothing compared yet" in text
    assert "engine:" not in text
    assert "target rtx-1.7, fp32" in text and "next:" not in text
    built = dataclasses.replace(converted.manifest, comparison=None)
    text = report_text(Report(Path("my a"), built))
    assert text.endswith("nothing compared yet\n\nnext: `pipeline verify 'my a'`")
    assert built.rewrite is not None
    passes = tuple(dataclasses.replace(one, rewritten=()) for one in built.rewrite.passes)
    idle = dataclasses.replace(built.rewrite, passes=passes)
    text = report_text(Report(Path("a"), dataclasses.replace(built, rewrite=idle)))
    assert (
        "\n" + str(sum(one.needed for one in passes)) + " passes found nothing to rewrite" in text
    )
    text = report_text(dataclasses.replace(converted, unchanged=True))
    first, *rest = text.splitlines()
    assert first == "Nothing changed, so nothing was done. Use --force to convert again."
    assert rest[0].startswith("up to date: tiny (rtx-1.7, fp32, ")
    assert any(line.startswith("not done: the engine was not compared") for line in rest)
    assert "stage" not in text


def test_models() -> None:
    text = models_table({"tiny": tiny.conv()})
    assert text.splitlines()[2].split() == [
        "tiny", "h", "in", "5..40,", "w", "in", "5..40", "channels=4",
    ]  # fmt: skip
    facts = summary.spec_facts(tiny.conv())
    assert json.loads(json.dumps(facts)) == facts
    assert [str(size) for size in facts["inputs"]["x"]] == ["1", "3", "h", "w"]
