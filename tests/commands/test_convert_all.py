"""The whole zoo in one command: table, JUnit file, failures, resumed and interrupted runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest
import small_zoo
from helpers import HERE, Run, files_under, refused
from readme_commands import ROOT

from pipeline.artifact.artifact import Artifact
from pipeline.commands.convert_all import ModelResult, results_table, write_junit


def start(
    place: Path, *words: object, zoo: Mapping[str, str] = small_zoo.ZOO
) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "pipeline", "convert", "--all", *map(str, words)]
    house = place / "house"
    if not house.exists():
        small_zoo.mounted(house, zoo)
    environment = {**os.environ, "PYTHONPATH": f"{house}{os.pathsep}{HERE}"}
    return subprocess.Popen(
        line, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def cases(path: Path) -> dict[str, ET.Element]:
    """The test cases of a JUnit file. Checks its totals."""
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None
    found = {case.attrib["name"]: case for case in suite.findall("testcase")}
    assert int(suite.attrib["tests"]) == len(found)
    for word, tag in (("failures", "failure"), ("skipped", "skipped")):
        count = sum(case.find(tag) is not None for case in found.values())
        assert int(suite.attrib[word]) == count
    return found


@pytest.mark.slow
def test_a_failing_model_stops_no_other_and_a_second_run_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "--seed", 3)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    rows = {line.split()[0]: line for line in output.splitlines()[2:6]}
    assert list(rows) == ["first", "skewed", "crashing", "last"]
    assert " ok " in rows["first"] and " ok " in rows["last"]
    assert "rtol 0.0001 or atol 1e-05" in rows["last"] and "MiB" in rows["last"]
    assert "FAILED" in rows["skewed"] and "FAILED" in rows["crashing"]
    assert "FAILED skewed: model skewed: y of exported against torch at min" in output
    kept = "; kept: artifacts/skewed.failed: exported.onnx, model.onnx"
    assert next(line for line in output.splitlines() if "FAILED skewed: " in line).endswith(kept)
    assert "FAILED crashing: the process of this model ended with Aborted (SIGABRT)" in output
    for part in ("] first (1 of 4)", "] first: export", "] skewed: FAILED", "] last: ok"):
        assert part in errors
    found = cases(tmp_path / "artifacts" / "convert.xml")
    failure = found["skewed"].find("failure")
    assert failure is not None and "y of exported" in failure.attrib["message"]
    assert "at max (h=40,w=40)" in str(failure.text)  # the whole text, not its first line
    assert float(found["last"].attrib["time"]) > 1
    assert "compared at" in str(found["last"].findtext("system-out"))
    for name in ("first", "last"):
        assert Artifact.open(tmp_path / "artifacts" / name).plan.is_file()
    assert sorted(p.name for p in (tmp_path / "artifacts").iterdir() if p.name[0] != ".") == [
        "convert.xml", "first", "last", "skewed.failed",
    ]  # fmt: skip
    before = (tmp_path / "artifacts" / "last" / "manifest.json").stat().st_mtime_ns

    process = start(tmp_path, "--seed", 3, "--json")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    told = {one["model"]: one for one in json.loads(output)}
    assert [one["state"] for one in told.values()] == ["unchanged", "FAILED", "FAILED", "unchanged"]
    assert told["last"]["points"] >= 5
    assert told["last"]["max_abs"] < 1e-5
    assert (tmp_path / "artifacts" / "last" / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_model_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "--out", "there", "--time-limit", 40, zoo=small_zoo.SLOW)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "FAILED slow: took longer than the time limit of 40 s" in output
    found = cases(tmp_path / "there" / "convert.xml")
    assert [name for name, case in found.items() if case.find("failure") is not None] == ["slow"]
    assert Artifact.open(tmp_path / "there" / "last").plan.is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_what_is_known(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, zoo=small_zoo.SLOW)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith("slow: export"):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    end = time.monotonic() + 10
    while Path(f"/proc/{children[0]}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{children[0]}").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130
        true = "each artifact in artifacts is the old one or the new one, and complete"
        *progress, last = errors.splitlines()
        assert last == f"error: interrupted; {true}"
        assert all(re.match(r"\[ *[\d.]+ s\] slow: ", line) for line in progress)
        left = [name for name in files_under(tmp_path / "artifacts") if "/" in name]
        assert left == []
    found = cases(tmp_path / "artifacts" / "convert.xml")
    assert all(case.find("skipped") is not None for case in found.values())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["raft"], "remove raft, or remove --all"),
        (["--option", "updates=2"], "--option fits one model only"),
        (["--dim", "h=1:2:3"], "--dim fits one model only"),
        (["--range", "x=0..1"], "--range fits one model only"),
        (["--exact-dims"], "--exact-dims fits one model only"),
        (["--time-limit", "0"], "'0' is not a positive number of seconds"),
        (["--time-limit", "nan"], "'nan' is not a positive number of seconds"),
        (["--target", "tensorrt-8.6"], "is not installed here"),
        (["--target", "none"], "unknown target"),
        (["--out", "/dev/null/x"], "cannot make this folder"),
    ],
)
def test_bad_words(cli: Run, words: list[str], part: str) -> None:
    refused(cli("convert", "--all", *words), part)


def test_time_limit_is_for_all(cli: Run) -> None:
    refused(cli("convert", "tiny", "--time-limit", "5"), "--time-limit works only with --all")


def test_make_takes_all() -> None:
    for model, words in (("all", "convert --all"), ("raft", "convert raft")):
        done = subprocess.run(
            ["make", "-n", "convert", f"MODEL={model}"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert words in done.stdout  # inside of another make, its last line is make's own


def test_junit_file_is_xml_whatever_an_error_says(tmp_path: Path) -> None:
    words = "a < b & \x1b[31mred\x00 \ud800 \"quoted\" 'too'"
    results = [ModelResult("one", "FAILED", 1.5, words, words), ModelResult("two")]
    write_junit(tmp_path / "a.xml", results, "2026-01-01T00:00:00+00:00")
    failure = cases(tmp_path / "a.xml")["one"].find("failure")
    assert failure is not None
    assert failure.attrib["message"] == "a < b & ?[31mred? ? \"quoted\" 'too'"
    assert failure.text == failure.attrib["message"]
    assert files_under(tmp_path) == ["a.xml"]


def test_table_names_sizes_that_were_left_out() -> None:
    done = ModelResult("one", "ok", 2.0, points=5, left_out=2, plan_bytes=1 << 20)
    assert "5 of 7 sizes" in results_table([done, ModelResult("two")])
