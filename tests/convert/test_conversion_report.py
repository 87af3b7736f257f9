"""A report, and the verdict of `convert`: few short lines, the result first."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Run

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run_export, run_rewrite
from pipeline.convert.report import Report, compared_text, notes_of, verdict
from pipeline.spec.config import Config
from pipeline.spec.findings import note
from pipeline.spec.verdicts import Verdict

MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.pixel_unshuffle(x, 4)

def net():
    return Net().eval()
"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.commands.actions.on_terminal", lambda: True)


def short(text: str) -> list[str]:
    lines = text.splitlines()
    assert len(lines) <= 8
    assert all(len(line) <= 80 for line in lines), lines
    return lines


@pytest.mark.usefixtures("terminal")
def test_convert_ends_with_a_verdict(cli: Run) -> None:
    code, output, errors = cli("convert", "tiny", "--out", "a")
    assert code == 0, errors
    lines = short(output)
    assert lines[0].startswith("converted: tiny (rtx-1.7, fp32, ") and lines[0].endswith("-> a")
    assert lines[1].startswith("sizes:    h in ")
    assert lines[2].startswith("compared: torch and model.onnx (as exported) at ")
    text = " ".join(output.split())
    assert (
        "random ones. The largest error is" in text or "random ones. All outputs are equal" in text
    )
    assert "not done: the engine was not compared: no NVIDIA driver" in output
    assert lines[-1] == "next:     `pipeline verify a` on the GPU. --details shows more"


def test_the_next_command_can_be_copied(cli: Run, tmp_path: Path) -> None:
    """Also if a shell would split the path of the artifact, or replace a part of it."""
    code, output, errors = cli("convert", "tiny", "--quick", "--out", "my $a")
    assert code == 0, errors
    command = shlex.split(output.split("`")[1])
    assert command == ["pipeline", "verify", "my $a"]
    (tmp_path / "my $a" / "engine.plan").write_bytes(b"")
    _, _, errors = cli(*command[1:])
    assert "`pipeline build 'my $a'`" in errors


@pytest.mark.usefixtures("terminal")
def test_details_follow_the_verdict(cli: Run) -> None:
    code, output, errors = cli("convert", "tiny", "--out", "a", "--details")
    assert code == 0, errors
    first, _, rest = output.partition("\n\n")
    short(first)
    assert rest == cli("inspect", "a")[1]


@pytest.mark.usefixtures("terminal")
def test_a_line_names_what_was_narrowed_and_where(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    words = ("net.py:net", "--input", "x:1x3x{h}x{w}", "--dim", "h=64:256", "--dim", "w=64:256")
    code, output, errors = cli("convert", *words, "--quick")
    assert code == 0, errors
    lines = short(output)
    assert lines[-2] == (
        "narrowed: h must be a multiple of 4; w must be a multiple of 4 (net.py:6)"
    )
    assert lines[-1].startswith("next:     `pipeline verify ")
    assert "sizes:    h in 64..256 in steps of 4, w in 64..256 in steps of 4" in lines
    assert any(line.startswith("note:     compared only at min, opt, max") for line in lines)


def test_in_a_file_nothing_is_cut(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    words = ("net.py:net", "--input", "x:1x3x{h}x{w}", "--dim", "h=64:256", "--dim", "w=64:256")
    code, output, errors = cli("convert", *words, "--quick")
    assert code == 0, errors
    notes = notes_of(Artifact.open(tmp_path / "artifacts" / "net").manifest)
    assert notes and len(notes[0]) > 80
    printed = " ".join(output.split())
    assert all(" ".join(text.split()) in printed for text in notes)
    assert " ..." not in output and "more)" not in output


@pytest.mark.parametrize("whole", [False, True])
def test_whole_texts_and_names_in_a_file(converted: Report, whole: bool) -> None:
    name = "a_long/folder-of-the-user/" * 5
    manifest = replace(converted.manifest, engine_compared_why=f"first, {name} last")
    worse = [note("output-changed", name="y", was="one", now=name)] * 12
    text = verdict(Report(converted.path, manifest, regressions=worse), whole=whole)
    assert (name in text and "last" in text) == whole
    assert ("- and 2 more" in text) != whole


@pytest.mark.parametrize("count", [1, 12])
def test_what_got_worse_is_listed_whole(converted: Report, count: int) -> None:
    facts = {"name": "y", "was": "float32 [b, 3]", "now": "float32 [b, 4], " + "long " * 40}
    worse = [note("output-changed", **facts)] * count
    text = verdict(Report(converted.path, converted.manifest, regressions=worse))
    assert text.startswith("FAILED: tiny (")
    assert " ".join(worse[0].text.split()) in " ".join(text.split())
    assert text.count("\n- ") == min(count, 10) + (count > 10)
    assert ("- and 2 more" in text) == (count > 10)
    assert "`pipeline inspect" in text


def test_a_printed_report_is_its_verdict(converted: Report) -> None:
    text = str(converted)
    assert text == verdict(converted, whole=True)
    assert text.startswith("converted: tiny (rtx-1.7, fp32, ")
    assert f"`pipeline inspect {converted.path}`" in text and "--details" not in text
    assert str(replace(converted, unchanged=True)).startswith("up to date: tiny (")
    assert "Manifest(" not in repr(converted)


@pytest.mark.usefixtures("zoo")
def test_a_stage_alone_says_what_it_did(tmp_path: Path) -> None:
    """It says the seconds of that stage, too."""
    place = tmp_path / "a"
    reports = {
        "exported": run_export(Config("tiny", out=place)),
        "rewritten": run_rewrite(place),
        "built": pipeline.build(place),
        "verified": pipeline.verify(place, torch_model=True, trust=True),
    }
    for word, report in reports.items():
        (seconds,) = (s.seconds for s in report.manifest.stages if s.name == report.stage)
        first, *_ = str(report).splitlines()
        assert first == f"{word}: tiny (rtx-1.7, fp32, {seconds:.0f} s) -> {place}"
    again = pipeline.verify(place, against=place)
    assert str(again).startswith("verified: ")
    worse = replace(again, regressions=[note("output-changed", name="y", was="one", now="two")])
    assert str(worse).startswith("FAILED: ")


def test_a_notebook_shows_the_verdict(converted: Report) -> None:
    failed = replace(
        converted, regressions=[note("output-changed", name="<b>", was="one", now="two")]
    )
    html = failed._repr_html_()
    assert "FAILED: tiny" in html and "&lt;b&gt;" in html
    assert html.startswith("<pre") and html.endswith("</pre>")


def test_a_file_that_no_pass_changed_is_named(converted: Report) -> None:
    comparison = converted.manifest.comparison
    assert comparison is not None
    same = replace(comparison, notes=(*comparison.notes, note("model-unchanged")))
    told = " ".join(
        verdict(replace(converted, manifest=replace(converted.manifest, comparison=same))).split()
    )
    assert "model.onnx (as exported) at" in told


def test_the_integers_that_a_tolerance_lets_differ_are_counted(converted: Report) -> None:
    comparison = converted.manifest.comparison
    assert comparison is not None
    facts = {"count": 3, "of": 40, "dtype": "int64", "differing": 0.1}
    more = Verdict("agrees", ("torch", "half"), "label", 2.0, facts=facts)
    assert more.passed and not more.text
    points = [replace(p, results=(*p.results, more)) for p in comparison.points]
    text = compared_text(
        replace(converted.manifest, comparison=replace(comparison, points=tuple(points)))
    )
    assert text.endswith(". Up to 7.5% of label's values differ")
    assert "values differ" not in compared_text(converted.manifest)
