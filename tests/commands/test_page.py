"""The report as an HTML page: every section, nothing from elsewhere, readable in a browser."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers import Run, refinish, refused

from pipeline.artifact.artifact import Artifact
from pipeline.commands.page.charts import Point, bars, size_map
from pipeline.commands.page.page import page
from pipeline.spec.verdicts import Verdict

SECTIONS = ["verdict", "errors", "checks", "graph", "engine", "times", "reproduce"]
VOID = {"meta", "link", "br", "line", "circle"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
AXE = importlib.util.find_spec("axe_core_python")
MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.instance_norm(x) * (x.shape[-1] % 3 + 1)

def net():
    return Net().eval()
"""
BENCH = {
    "gpu": "some GPU",
    "points": [
        {"sizes": {"h": 8}, "plain": {"median_ms": 0.5}, "graph": {"median_ms": 0.25}},
        {"sizes": {"h": 16}, "plain": {"median_ms": 1.5}, "graph": None},
    ],
}
TUNING = {
    "gpu": "another GPU",
    "kept": "all half",
    "trials": [
        {"name": "as it is", "why": "", "times": [{"sizes": {"h": 8}, "ms": 2.0}]},
        {"name": "all half", "why": "", "times": [{"sizes": {"h": 8}, "ms": 1.0}]},
        {"name": "naive", "why": "TensorRT refuses it", "times": []},
    ],
}


class Tags(HTMLParser):
    """Checks that every tag is closed, and collects attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def artifact(cli: Run, tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    words = ("net.py:net", "--input", "x:{b}x3x{h}x{w}", "--dim", "b=1:4", "--dim", "h=8:64")
    code, _, errors = cli("convert", *words, "--dim", "w=8:64", "--out", "a", "--quick")
    assert code == 0, errors
    return tmp_path / "a"


def test_the_page_has_every_section_and_loads_nothing(cli: Run, artifact: Path) -> None:
    code, output, errors = cli("report", "a")
    assert (code, output.strip()) == (0, "report: a-report.html"), errors
    read = Tags((artifact.parent / "a-report.html").read_text())
    ids = [value for tag, name, value in read.attributes if name == "id"]
    assert ids == SECTIONS
    links = [value for _, name, value in read.attributes if name in ("href", "src")]
    assert [link for link in links if link and not link.startswith(("#", "data:"))] == []
    assert {link[1:] for link in links if link and link.startswith("#")} == set(SECTIONS)
    manifest = Artifact.open(artifact).manifest
    assert "net ONNX right, engine not compared Verdict" in read.text  # the badge
    assert "net: ONNX right, engine not compared" in read.text  # the title
    assert "h in 8..64" in read.text
    assert manifest.comparison is not None and manifest.rewrite is not None
    for point in manifest.comparison.points:
        assert f"b={point.sizes['b']},h={point.sizes['h']},w={point.sizes['w']}" in read.text
    dots = [value for tag, name, value in read.attributes if tag == "circle" and name == "cx"]
    assert len(dots) > len(manifest.comparison.points)  # and the legend
    for done in manifest.rewrite.passes:
        assert (done.name in read.text) == bool(done.rewritten), done.name
    for name in manifest.files:
        assert name in read.text
    commands = (artifact / "reproduce.sh").read_text().splitlines()
    assert commands[-1] in "".join(read.texts) and "No latency was measured" in read.text


def test_a_failed_comparison_is_said_first(cli: Run, artifact: Path) -> None:
    model = artifact / "model.onnx"
    perturb_first(artifact)
    assert cli("verify", "a")[0] == 1
    read = Tags(page(Artifact.open(artifact)))
    assert "net failed" in read.text and "What failed" in read.text
    assert read.text.index("What failed") < read.text.index("Inputs and outputs")
    assert (
        "of rewritten differs from torch at" in read.text
        and "Do: " in read.text
        and model.is_file()
    )
    assert [v for t, n, v in read.attributes if t == "circle" and v == "dot failed"]


def test_the_error_of_what_failed_is_shown(cli: Run, artifact: Path) -> None:
    found = Artifact.open(artifact)
    info = found.manifest.comparison
    assert info is not None
    pair = ("torch", "exported")
    results = (
        Verdict("agrees", pair, "scores", 1e-3, 4.66e-4),
        Verdict(
            "values-differ", pair, "labels", 1.0, facts={"count": 2, "of": 20, "dtype": "int64"}
        ),
    )
    left, failed, also = info.points[:3]
    agrees = Verdict("agrees", pair, "labels", 1.0)  # a share may differ
    points = (
        dataclasses.replace(left, results=(results[0], agrees)),
        dataclasses.replace(failed, results=results),
        dataclasses.replace(
            also,
            results=(
                Verdict("agrees", pair, "scores", 0.5, 0.5),
                Verdict("differs", pair, "y", 2.5e-3, 2e-3, {"largest": 1.25, "index": (0,)}),
            ),
        ),
    )
    changed = dataclasses.replace(info, points=points, notes=(), checks=())
    refinish(artifact, comparison=changed)
    read = Tags(page(Artifact.open(artifact)))
    said = " ".join(cli("inspect", "a")[1].split())
    for place, row in (
        (left, "1.00e-03 4.66e-04"),
        (failed, "1.00e+00 - 1"),
        (also, "2.50e-03 2.00e-03 1"),
    ):
        at = f"{place.label} {','.join(f'{k}={v}' for k, v in place.sizes.items())} {row}"
        assert at in read.text and at in said, (at, said)
    assert "1 failed: labels: 2 of 20 int64 values differ" in read.text  # the tip of a dot
    assert "1 failed, largest error 2.0e-03" in read.text
    assert "failed, error up to 2e-03" in read.text and "error up to 5e-04" in read.text
    # the verdict
    assert "The largest error is 2.0e-03 of y's largest value" in read.text
    refinish(artifact, comparison=dataclasses.replace(changed, points=points[:2]))
    assert "labels differs, by up to 1" in Tags(page(Artifact.open(artifact))).text


def perturb_first(folder: Path) -> None:
    """Changes the numbers of an artifact's model.onnx, which has no 4-D weight."""
    import onnx

    model = onnx.load(folder / "model.onnx")
    (output,) = model.graph.output
    last = next(node for node in model.graph.node if output.name in node.output)
    last.output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Sqrt", ["before"], [output.name]))
    model.graph.node[-1].op_type = "Neg"
    onnx.save(model, folder / "model.onnx")
    refinish(folder)


def test_times_of_bench_and_tune(cli: Run, artifact: Path) -> None:
    (artifact.parent / "bench.json").write_text(json.dumps(BENCH))
    assert cli("report", "a", "--bench", "bench.json", "--out", "r.html")[0] == 0
    text = Tags((artifact.parent / "r.html").read_text()).text
    assert "bench, on some GPU" in text and "h=16: milliseconds" in text
    assert "with a CUDA graph 0.250" in text and "without a CUDA graph 1.500" in text
    (artifact / "tuning.json").write_text(json.dumps(TUNING))
    text = Tags(page(Artifact.open(artifact, check=False))).text
    assert "Candidates of tune, on another GPU Kept: all half." in text
    assert "as it is 2.000 all half 1.000" in text and "naive: TensorRT refuses it" in text


def test_bad_files_are_refused(cli: Run, artifact: Path) -> None:
    (artifact.parent / "other.json").write_text('{"points": [{}], "gpu": "x"}')
    (artifact.parent / "no.json").write_text("{")
    refused(cli("report", "a", "--bench", "other.json"), "is not one of `pipeline bench --out`")
    refused(cli("report", "a", "--bench", "no.json"), "cannot be read as JSON")
    refused(
        cli("report", "a", "--bench", "missing.json"),
        "missing.json: cannot be read: No such file or directory",
    )
    refused(cli("report", "a", "--out", "missing/r.html"), "--out missing/r.html")


def test_names_are_text_and_not_html(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    object.__setattr__(opened.manifest, "name", "<script>alert(1)</script>")
    assert "<script>" not in page(opened)


def test_one_dim_and_none() -> None:
    points = [Point({"t": n}, 1e-7 * n * n, n == 9, f"t={n}") for n in (1, 3, 9)]
    points.append(Point({"t": 27}, None, False, "t=27", left_out=True))
    shown = size_map(points, {"t": (1, 27)})
    assert shown is not None and shown.up == "" and not shown.rows
    kinds = {dot.text: dot.kind for dot in shown.dots}
    assert kinds == {"t=27": "left-out", "t=1": "level-3", "t=3": "level-4", "t=9": "failed"}
    places = sorted((dot.x, dot.text) for dot in shown.dots)
    assert [text for _, text in places] == ["t=1", "t=3", "t=9", "t=27"]
    steps = {round(b[0] - a[0], 0) for a, b in itertools.pairwise(places)}
    assert len(steps) == 1  # a logarithmic axis
    assert size_map(points, {"t": (5, 5)}) is None
    assert bars({"a": 2.0, "b": 0.5}) == (("a", 2.0, 100.0), ("b", 0.5, 25.0))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1440])
def test_in_a_browser(artifact: Path, width: int, scheme: str) -> None:
    file = artifact.parent / "r.html"
    (artifact / "tuning.json").write_text(json.dumps(TUNING))
    file.write_text(page(Artifact.open(artifact, check=False)))
    errors, found = browse(file, width, scheme, MEASURE)
    assert errors == []
    assert found["wide"] <= width and found["sections"] == SECTIONS
    dark = "rgb(13, 17, 23)"
    assert (found["back"] == dark) == (scheme == "dark") and found["text"] != found["back"]
    if AXE is None or AXE.origin is None:
        pytest.skip("axe-core-python is not installed")
    (axe,) = Path(AXE.origin).parent.rglob("axe.min.js")
    run = "axe.run().then(r => say(r.violations.map(v => [v.id, v.nodes.map(n => n.html)])))"
    errors, found = browse(file, width, scheme, axe.read_text() + ";" + run)
    assert (errors, found) == ([], [])


MEASURE = """say({
    wide: document.documentElement.scrollWidth,
    sections: [...document.querySelectorAll('section')]
        .filter(section => section.offsetHeight > 40).map(section => section.id),
    text: getComputedStyle(document.body).color,
    back: getComputedStyle(document.body).backgroundColor,
})"""


def browse(file: Path, width: int, scheme: str, script: str) -> tuple[list[str], Any]:
    """Opens a page with a script added, which calls ``say``. Gives the console and what it said."""
    say = "const say = value => parent.postMessage(JSON.stringify(value), '*');"
    text = file.read_text().replace("default-src 'none'", "script-src 'unsafe-inline'")
    inner, outer = file.with_name("inner.html"), file.with_name("outer.html")
    inner.write_text(text.replace("</body>", f"<script>{say}{script}</script></body>"))
    # a window is never as narrow as a phone
    outer.write_text(
        f'<body><iframe src="inner.html" style="width: {width}px; height: 900px; border: 0">'
        "</iframe><script>onmessage = said => document.body.setAttribute('data-said', said.data)"
        "</script></body>"
    )
    words = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--window-size=1600,1000", "--virtual-time-budget=5000", "--dump-dom", f"file://{outer}",
    ]  # fmt: skip
    if scheme == "dark":
        words.insert(1, "--blink-settings=preferredColorScheme=0")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    match = re.search(r'data-said="([^"]*)"', done.stdout)
    assert match, done.stderr[-500:]
    return console, json.loads(match[1].replace("&quot;", '"').replace("&amp;", "&"))


def test_nothing_compared_is_not_right(artifact: Path) -> None:
    found = Artifact.open(artifact, check=False)
    assert "net ONNX right, engine not compared" in Tags(page(found)).text
    ran = dataclasses.replace(found.manifest, engine_compared=True, engine_gpu="a GPU")
    text = Tags(page(dataclasses.replace(found, manifest=ran))).text
    assert "net: right net right Verdict" in text and "on a GPU" in text
    manifest, info = found.manifest, found.manifest.comparison
    assert info is not None
    points = tuple(dataclasses.replace(point, results=()) for point in info.points)
    alone = dataclasses.replace(manifest, comparison=dataclasses.replace(info, points=points))
    assert "net not compared" in Tags(page(dataclasses.replace(found, manifest=alone))).text
