"""Result files of engines: joining them, and the tables and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "engines"
sys.path.append(str(BENCHMARKS))

import engine_results  # noqa: E402
import engine_tables  # noqa: E402

SMALL, LARGE = {"h": 8, "w": 9}, {"h": 16, "w": 9}
RATES = {"fp16": 790e12, "tf32": 395e12, "fp32": 67e12, "bandwidth": 4.3e12}


def result(runner: str, ms: float, precision: str = "tf32", **more: Any) -> dict[str, Any]:
    base = {"model": "m", "options": [], "sizes": {"h": 8, "w": 9}, "gpu": "G", "artifact": "a"}
    rest = {"runs": 30, "p99_ms": 2 * ms, "least_ms": ms, "calls_per_second": 1e3 / ms}
    rest |= {"error": 1e-5}
    return {**base, "runner": runner, "precision": precision, "median_ms": ms, **rest, **more}


@pytest.fixture
def results(tmp_path: Path) -> engine_results.Results:
    found = engine_results.Results(tmp_path / "r" / "engines.json")
    found.begin({"date": "today", "command": "make", "machine": {"gpu": "G", "driver": None}})
    found.add(result("torch compile-tf32", 7.0))
    found.add(result("torch compile-tf32", 6.0))  # measured again
    found.add(result("torch autotune-tf32", 5.0))
    found.add(result("torch autotune-fp16", 1.0, "fp16"))
    found.add(result("engine", 2.5, memory_bytes=3 << 20, error=1e-4))
    found.add(result("engine graph", 2.0))
    found.add({**result("engine", 9.0), "sizes": {"h": 16, "w": 9}})
    found.add(
        {"model": "m", "options": [], "runner": "naive dynamo", "precision": "tf32", "gpu": "G",
         "artifact": "a", "sizes": None, "why": "the parser refuses node 7"}
    )  # fmt: skip
    return found


def test_results_are_kept_and_the_later_ones_count(results: engine_results.Results) -> None:
    again = engine_results.Results(results.path).content
    assert again == results.content
    assert [r["median_ms"] for r in again["results"] if r["runner"] == "torch compile-tf32"] == [6]


def test_what_computes_something_else_has_no_ratio(results: engine_results.Results) -> None:
    results.add(result("engine graph", 2.0, error=0.04))
    text = engine_tables.tables(results.content)
    assert "| **2.50** |" in text and engine_tables.APART_NOTE not in text
    results.add(result("engine graph", 2.0, error=0.35))
    text = engine_tables.tables(results.content)
    assert "| off by 3.5e-01 |" in text and "**" not in text
    assert f"a: {engine_tables.APART_NOTE}" in text


@pytest.mark.parametrize(
    ("runner", "more", "told"),
    [
        ("engine graph", {"error": None, "error_why": "not finite"}, "not finite"),
        ("engine graph", {"error": float("nan")}, "off by nan"),
        ("engine graph", {"error": None}, "2.50 (outputs not compared)"),
        ("torch autotune-tf32", {"error": None}, "2.50 (outputs not compared)"),
    ],
)
def test_what_is_not_known_to_compute_the_same_has_no_ratio(
    results: engine_results.Results, runner: str, more: dict[str, object], told: str
) -> None:
    ms = 2.0 if runner == "engine graph" else 5.0
    results.add({**result(runner, ms), **more})
    text = engine_tables.tables(results.content)
    assert f"| {told} |" in text and "**" not in text


def test_the_table_holds_equal_precisions_together(results: engine_results.Results) -> None:
    text = engine_tables.tables(results.content)
    # there is no floor, no naive engine and no eager torch, so these columns are missing
    assert head_of(text, "torch.compile, no CUDA graphs") == [
        "sizes", "artifact", "engine, CUDA graph", "engine", "torch.compile, no CUDA graphs",
        "max-autotune", "torch's fastest", "torch's fastest / engine",
    ]  # fmt: skip
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |") == [
        "h=8,w=9", "a", "2.00", "2.50", "6.00", "5.00", "autotune-tf32", "**2.50**",
    ]  # fmt: skip
    assert cells_of(text, "| h=16,w=9 | a | - |") == ["h=16,w=9", "a", "-", "9.00", *"----"]
    assert "- naive dynamo of a (tf32): the parser refuses node 7" in text
    assert "| h=8,w=9 | a | engine | 5.00 | 400 | 3 MiB | 1.0e-04 |" in text
    assert "tf32, against torch with tf32 on; median milliseconds:" in text
    assert "Measured with gpu G:\n\n- today: `make`" in text
    assert engine_tables.ORT_CLOCK not in text
    results.add(result("onnxruntime CUDA", 3.0))
    assert engine_tables.ORT_CLOCK in engine_tables.tables(results.content)


def test_a_ratio_to_torch_without_cuda_graphs_says_so(tmp_path: Path) -> None:
    file = measured(
        tmp_path / "a.json", "2026-01-02", result("engine graph", 2.0),
        result("torch compile-tf32", 6.0),
    )  # fmt: skip
    text = engine_tables.tables(file.content)
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |")[-1] == "**3.00**"
    assert engine_tables.NO_GRAPHS_NOTE in text
    file.add(result("torch graphs-tf32", 3.0))
    text = engine_tables.tables(file.content)
    assert head_of(text, "torch.compile, CUDA graphs")[3:] == [
        "torch.compile, no CUDA graphs", "torch.compile, CUDA graphs", "torch's fastest",
        "torch's fastest / engine",
    ]  # fmt: skip
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |")[3:] == [
        "6.00", "3.00", "graphs-tf32", "**1.50**",
    ]  # fmt: skip
    assert engine_tables.NO_GRAPHS_NOTE not in text


def test_the_ratio_is_to_the_fastest_way_that_is_right(results: engine_results.Results) -> None:
    results.add(result("torch autotune-tf32", 5.0, error=1.0))  # faster, but wrong
    assert "| compile-tf32 | **3.00** |" in engine_tables.tables(results.content)
    results.add(result("torch eager-tf32", 1.0))  # eager may be fastest
    assert "| eager-tf32 | **0.500** |" in engine_tables.tables(results.content)
    results.add(result("engine graph", 1.0, "fp16", artifact="half"))
    results.add(result("torch graphs-fp16", 0.9, "fp16"))
    results.add(result("torch half-graphs-fp16", 0.75, "fp16"))
    results.add(result("torch half-autotune-fp16", 0.5, "fp16", error=None, error_why="not finite"))
    text = engine_tables.tables(results.content)
    row = cells_of(text, "| h=8,w=9 | half | 1.00 |")
    assert row[-2:] == ["half-graphs-fp16", "**0.750**"]
    assert row[3] == "0.750"  # the faster one stands in the column of its mode


def test_the_naive_engine_has_a_ratio_too(results: engine_results.Results) -> None:
    results.add(result("naive dynamo graph", 1.9))
    results.add(result("naive torchscript", 1.5))
    results.add(result("naive torchscript graph", 1.0, error=0.5))  # wrong
    results.add(result("naive dynamo graph", 0.5, artifact="b"))
    text = engine_tables.tables(results.content)
    assert head_of(text, "naive engine")[-1] == "naive / engine"
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |")[-2:] == ["**2.50**", "**0.750**"]


def test_a_naive_engine_that_is_right_at_its_own_sizes_only(
    results: engine_results.Results,
) -> None:
    results.add(result("naive dynamo graph", 1.0, narrow="at h=4,w=4 it is off by 1.0e+00"))
    text = engine_tables.tables(results.content)
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |")[-1] == "0.500 (not at all sizes)"
    assert "naive dynamo of a: the naive engine's file is not right at all sizes" in text
    assert "engine may do less (at h=4,w=4 it is off by 1.0e+00)." in text
    results.add(result("naive torchscript graph", 0.5, unchecked="no onnxruntime"))
    text = engine_tables.tables(results.content)
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |")[-1] == "0.250 (other sizes not checked)"
    assert "torchscript of a: the naive engine's file was not run at other sizes (no onnx" in text
    results.add(result("naive torchscript graph", 1.5))  # the one to compare with
    text = engine_tables.tables(results.content)
    assert cells_of(text, "| h=8,w=9 | a | 2.00 |")[-1] == "**0.750**"


def head_of(text: str, column: str) -> list[str]:
    """The columns of the first table with this column."""
    head = next(line for line in text.splitlines() if f"| {column} |" in line)
    return [cell.strip() for cell in head.strip("|").split("|")]


def cells_of(text: str, start: str) -> list[str]:
    """The cells of the only row that starts with this."""
    (row,) = (line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_artifacts_of_one_model_stand_side_by_side(results: engine_results.Results) -> None:
    results.add_rates({"gpu": "G", **RATES})
    split = {"artifact": "b", "own_options": ["update=split"]}
    results.add(result("engine graph", 1.0, **split))
    results.add(result("engine graph", 1.25, **split))  # measured again
    for operations, more in ((3.95e11, {}), (1.975e11, split)):
        floats = {"floats": 0, "others": 0}
        work = {"operations": operations, "least": floats, "every": floats, "layers": []}
        results.add({**result("", 1), "work": work, "runner": None, "gpu": None, **more}, "floors")
    text = engine_tables.tables(results.content)
    beside = ["6.00", "5.00", "autotune-tf32"]  # torch's records are shared
    assert cells_of(text, "| h=8,w=9 | a | 1.00 |") == [
        "h=8,w=9", "a", "1.00", "2.00", "2.50", *beside, "**2.50**", "2.0",
    ]  # fmt: skip
    assert cells_of(text, "| h=8,w=9 | b (update=split) | 0.500 |") == [
        "h=8,w=9", "b (update=split)", "0.500", "1.25", "-", *beside, "**4.00**", "2.5",
    ]  # fmt: skip
    assert "by these rates of G (measured): fp32 67.0 TFLOP/s, tf32 395 TFLOP/s" in text
    # a floor with the same options counts; other options are another model
    results.content["floors"].pop()
    results.add(result("engine", 2.0, artifact="c"))
    text = engine_tables.tables(results.content)
    assert cells_of(text, "| h=8,w=9 | c | 1.00 |")
    assert cells_of(text, "| h=8,w=9 | b (update=split) | - |")
    # the rates of another GPU give no floor
    results.content["rates"] = {"another": results.content["rates"]["G"]}
    assert "floor" not in engine_tables.tables(results.content)


def test_torch_is_shared_by_artifacts(results: engine_results.Results) -> None:
    before = len(results.content["results"])
    results.add(result("torch compile-tf32", 4.0, artifact="b", own_options=["update=split"]))
    assert len(results.content["results"]) == before
    assert "| **2.00** |" in engine_tables.tables(results.content)


def measured(
    place: Path, date: str, *records: dict[str, Any], command: str = "make"
) -> engine_results.Results:
    """A file with one run."""
    found = engine_results.Results(place)
    found.begin({"date": date, "command": command, "machine": {"gpu": "G"}})
    for record in records:
        found.add(record)
    return found


def table(*files: Path) -> tuple[str, str]:
    """The output of `engines.py table` for files, and its messages."""
    words = [word for file in files for word in ("--json", str(file))]
    line = [sys.executable, str(BENCHMARKS / "engines.py"), "table", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_files_are_joined(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    measured(a, "2026-01-02T10:00:00+00:00", result("engine graph", 2.0))
    other = {"sizes": {"w": 9, "h": 8}}  # the same sizes in another order
    file = measured(b, "2026-01-02T09:00:00+00:00", result("torch compile-tf32", 6.0, **other))
    file.add_rates({"gpu": "G", **RATES})
    floats = {"floats": 0, "others": 0}
    work = {"operations": 3.95e11, "least": floats, "every": floats, "layers": []}
    file.add({**result("", 1), "work": work, "runner": None, "gpu": None}, "floors")
    text, said = table(a, b)
    assert said == ""
    assert cells_of(text, "| h=8,w=9 | a | 1.00 |") == [
        "h=8,w=9", "a", "1.00", "2.00", "6.00", "compile-tf32", "**3.00**", "2.0",
    ]  # fmt: skip
    assert table(b, a) == (text, "")
    assert table(a, b, a) == (text, "")  # a second copy of a file, or an older copy, adds nothing
    content, _ = engine_results.join([a, b])
    assert [run["date"][11:13] for run in content["runs"]] == ["09", "10"]
    runs = {r["runner"]: r["run"] for r in content["results"]}
    assert runs == {"engine graph": 1, "torch compile-tf32": 0}
    assert content["floors"][0]["run"] == content["rates"]["G"]["run"] == 0


@pytest.mark.parametrize("later", ["a", "b"])
def test_of_two_records_the_later_counts_and_it_is_said(tmp_path: Path, later: str) -> None:
    places = {name: tmp_path / f"{name}.json" for name in "ab"}
    dates = {name: f"2026-01-0{2 if name == later else 1}T10:00:00+00:00" for name in "ab"}
    for name, ms in (("a", 2.0), ("b", 3.0)):
        measured(places[name], dates[name], result("engine", ms)).add_rates(
            {"gpu": "G", **RATES, "fp16": ms}
        )
    earlier = "b" if later == "a" else "a"
    content, said = engine_results.join([places["a"], places["b"]])
    assert [r["median_ms"] for r in content["results"]] == [{"a": 2.0, "b": 3.0}[later]]
    assert content["rates"]["G"]["fp16"] == {"a": 2.0, "b": 3.0}[later]
    whence = (
        f"taken from {places[later]} ({dates[later]}), not from {places[earlier]} "
        f"({dates[earlier]})"
    )
    assert said == [f"m, h=8,w=9: tf32 engine of a: {whence}", f"rates of G: {whence}"]
    text, errors = table(*places.values())
    assert errors.splitlines() == said
    assert "taken from" not in text


def test_gpus_are_never_mixed(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    measured(a, "2026-01-01", result("engine", 2.0), result("torch compile-tf32", 8.0, gpu="H"))
    measured(b, "2026-01-02", result("engine", 3.0, gpu="H"))
    content, said = engine_results.join([a, b])
    text = engine_tables.tables(content)
    assert said == []
    of_g, of_h = text.partition("### m, H")[::2]
    assert of_g.startswith("### m, G") and "8.00" not in of_g
    assert cells_of(of_g, "| h=8,w=9 | a | 2.00 |") == ["h=8,w=9", "a", "2.00"]
    assert cells_of(of_h, "| h=8,w=9 | a | 3.00 |")[-1] == "**2.67**"


def test_an_fp16_artifact_stands_beside_torch_in_fp16(results: engine_results.Results) -> None:
    results.add(result("engine graph", 0.5, "fp16", artifact="m_fp16"))
    text = engine_tables.tables(results.content)
    fp16 = text.partition("fp16, against torch in float16")[2]
    assert cells_of(fp16, "| h=8,w=9 | m_fp16 | 0.500 |")[2:] == [
        "0.500", "1.00", "autotune-fp16", "**2.00**",
    ]  # fmt: skip
    assert "m_fp16" not in text.partition("fp16, against")[0]


def test_memory_below_zero_is_no_measurement(results: engine_results.Results) -> None:
    results.add(result("torch eager-tf32", 8.0, memory_bytes=-375390208))
    text = engine_tables.tables(results.content)
    assert cells_of(text, "| h=8,w=9 | - | torch eager-tf32 |")[5] == "-"


def test_a_failure_that_a_later_run_mended_is_not_told(results: engine_results.Results) -> None:
    failed = {"model": "m", "options": [], "sizes": None, "precision": "tf32", "gpu": "G"}
    results.add({**failed, "runner": "torch", "why": "no torch in /home/me/env/bin/python3"})
    text = engine_tables.tables(results.content)
    assert "- torch (tf32): no torch in python3" in text  # measured before, but not later
    results.begin({"date": "tomorrow", "command": "make", "machine": {"gpu": "G"}})
    results.add(result("torch eager-tf32", 8.0))
    text = engine_tables.tables(results.content)
    assert "- torch (tf32)" not in text
    assert "- naive dynamo of a (tf32): the parser refuses node 7" in text


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "python benchmarks/engines/engines.py run /root/o/art/raft art/vit/ --torch-python "
            "'/opt/py/bin/python3 -s' --torch-path /root/b/app --torch-path=/root/b/extra "
            "--reference /root/o/ref --json /root/o/g0.json --part engine --shape h=440,w=1024",
            "python benchmarks/engines/engines.py run raft vit --part engine --shape h=440,w=1024",
        ),
        (
            "python benchmarks/engines/engines.py run raft --weights=/data/w.pt",
            "python benchmarks/engines/engines.py run raft --weights=w.pt",
        ),
    ],
)
def test_commands_have_no_folders_of_a_machine(tmp_path: Path, command: str, told: str) -> None:
    file = tmp_path / "a.json"
    measured(file, "2026-01-02T10:03:04+00:00", result("engine", 2.0), command=command)
    text, _ = table(file)
    assert text.splitlines()[-1] == f"- 2026-01-02 10:03 UTC: `{told}`"


@pytest.mark.parametrize(
    "change",
    [{"runs": []}, {"runs": [{"command": "make"}]}, {"rates": []}, {"rates": {"G": {"run": 7}}}],
)
def test_a_file_that_is_not_whole_is_refused(
    results: engine_results.Results, change: dict[str, Any]
) -> None:
    results.path.write_text(json.dumps({**results.content, **change}))
    with pytest.raises(engine_results.InputError, match=r"engines\.json: "):
        engine_results.join([results.path])


def test_the_picture_has_a_line_for_each_runner(
    results: engine_results.Results, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra bench)")
    import plot

    lines = plot.series([r for r in results.content["results"] if r["gpu"] == "G"])
    assert lines["engine", "tf32"] == [(SMALL, 2.5), (LARGE, 9.0)]
    assert lines["torch compile", "tf32"] == [(SMALL, 6.0)]
    (picture,) = plot.draw(results.content, tmp_path / "docs")
    assert picture.name == "engines-m.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size < 150_000
    results.add(result("engine", 4.0, artifact="b", own_options=["update=split"]))
    lines = plot.series(results.content["results"])
    assert lines["engine: a", "tf32"] == [(SMALL, 2.5), (LARGE, 9.0)]
    assert lines["engine: b (update=split)", "tf32"] == [(SMALL, 4.0)]
    assert lines["torch compile", "tf32"] == [(SMALL, 6.0)]
    assert plot.draw(results.content, tmp_path / "docs") == [picture]


def test_a_picture_of_one_size_has_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra bench)")
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    measured(a, "2026-01-01", result("engine", 2.0), result("torch compile-tf32", 5.0))
    measured(b, "2026-01-02", result("engine", 3.0, gpu="H 2/x"), result("engine", 4.0, model="n"))
    line = [sys.executable, str(BENCHMARKS / "plot.py"), str(a), str(b), "--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    names = ["engines-m-G.png", "engines-n-G.png", "engines-m-H-2-x.png"]
    assert done.stdout.splitlines() == [str(tmp_path / name) for name in names]
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names)


def test_names_of_pictures() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra bench)")
    import plot

    assert plot.file_names([("G", "m updates=12"), ("G", "n a=1"), ("G", "n a=2")]) == {
        ("G", "m updates=12"): "engines-m.png",
        ("G", "n a=1"): "engines-n-a1.png",
        ("G", "n a=2"): "engines-n-a2.png",
    }


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([(1, 8, 9), (1, 16, 9), (1, 16, 18)], ([72, 144, 288], "h x w  (batch=1)", True)),
        ([(1, 8, 9), (32, 8, 9)], ([1, 32], "batch  (h=8, w=9)", True)),
        ([(1, 8, 16), (1, 16, 8)], ([0, 1], "sizes", False)),  # as many pixels
    ],
)
def test_where_sizes_stand(sizes: Sequence[tuple[int, ...]], told: tuple[Any, ...]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra bench)")
    import plot

    found, *rest = plot.places([dict(zip(("batch", "h", "w"), one, strict=True)) for one in sizes])
    assert (list(found.values()), *rest) == told


def test_panels_without_an_engine_are_left_out(results: engine_results.Results) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra bench)")
    import plot

    lines = plot.series(results.content["results"])
    assert ("torch autotune", "fp16") in lines
    assert list(plot.panels(lines)) == ["tf32"]
    torch = {key: line for key, line in lines.items() if key[0].startswith("torch")}
    assert list(plot.panels(torch)) == ["tf32", "fp16"]
