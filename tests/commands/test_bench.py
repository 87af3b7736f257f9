"""Measuring engines, and computing with the numbers. Real numbers need a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from helpers import Run, refused

from pipeline.commands.bench.measure import Method, WallClock, input_sets, timed
from pipeline.errors import InputError
from pipeline.machine.gpu import find_gpu
from pipeline.source.zoo import find_spec
from pipeline.spec.dims import Dim
from pipeline.spec.profiles import Profile, sizes_to_time
from pipeline.spec.tensors import Input

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "engines"
sys.path.append(str(BENCHMARKS))

import children  # noqa: E402
import engine_results  # noqa: E402
import floors  # noqa: E402
import references  # noqa: E402

H, W = Dim("h", 8, 16, 32), Dim("w", 8, 24, 64)
WHOLE = Profile("whole").resolve({"h": H, "w": W})


class Ticks:
    """A clock on which call number n takes n milliseconds."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.alone = 0

    def one(self, call: Any) -> float:
        call()
        self.alone += 1
        return float(self.alone)

    def many(self, call: Any, count: int) -> float:
        for n in range(count):
            call(n)
        return 2.0 * count


def test_calls_are_warmed_up_repeated_and_rotated() -> None:
    clock = Ticks()
    timing = timed(clock.calls.append, clock, Method(repeat=40, seconds=0, warm_up=0))
    assert clock.calls == [0, 1, 2, *range(40), *range(20)]
    assert timing.runs == 40
    taken = np.arange(4, 44)  # the first three calls do not count
    assert timing.median_ms == np.median(taken)
    assert timing.p99_ms == np.percentile(taken, 99)
    assert timing.least_ms == 4
    assert timing.calls_per_second == 500


def test_short_calls_are_repeated_for_their_seconds() -> None:
    timing = timed(lambda _: None, WallClock(), Method(repeat=3, seconds=0.05, warm_up=0))
    assert 3 < timing.runs <= Method.count


def test_slow_calls_end_after_five() -> None:
    clock = Ticks()
    assert timed(clock.calls.append, clock, Method(repeat=1000, warm_up=0, most=0)).runs == 5


def test_inputs_are_several_random_sets_in_their_range() -> None:
    inputs = (Input("ids", (1, H), "int64", 3, 9), Input("x", (4, H, W), low=2, high=4))
    sets = input_sets(inputs, {"h": 9, "w": 11})
    assert len(sets) == 8
    for one in sets:
        assert one["ids"].dtype == np.int64 and one["ids"].shape == (1, 9)
        assert one["ids"].min() >= 3 and one["ids"].max() <= 8
        assert one["x"].min() >= 2 and np.unique(one["x"]).size > 300
    assert not np.array_equal(sets[0]["x"], sets[1]["x"])
    np.testing.assert_array_equal(sets[1]["x"], input_sets(inputs, {"h": 9, "w": 11})[1]["x"])
    large = Input("large", (64, 1024, 1024))
    assert len(input_sets((large,), {})) == 2


def test_sizes_are_the_corners_of_every_profile() -> None:
    seq, past = Dim("seq", 1, 32, 128), Dim("past", 0, 64, 127)
    dims = {"seq": seq, "past": past}
    profiles = [Profile("all").resolve(dims), Profile("one", {"seq": (1, 1, 1)}).resolve(dims)]
    found = sizes_to_time(dims, profiles, ["past + seq <= 128"])
    assert [(p.label, tuple(p.sizes.values())) for p in found] == [
        ("all: min", (1, 0)), ("all: opt", (32, 64)), ("all: max, seq kept", (128, 0)),
        ("all: max, past kept", (1, 127)), ("one: opt", (1, 64)),
    ]  # fmt: skip


def test_sizes_that_are_asked_for() -> None:
    dims = {"h": H, "w": W}
    (found,) = sizes_to_time(dims, [WHOLE], [], ["h=9", "h=9,w=24"])
    assert found.sizes == {"h": 9, "w": 24}
    with pytest.raises(InputError, match="h=33"):
        sizes_to_time(dims, [WHOLE], [], ["h=33"])
    with pytest.raises(InputError, match="h == w"):
        sizes_to_time(dims, [WHOLE], ["h == w"], ["h=9"])
    small = Profile("small", {"h": (8, 8, 10)}).resolve(dims)
    with pytest.raises(InputError, match=r"no profile allows it \(small: h=8..10,w=8..64\)"):
        sizes_to_time(dims, [small], [], ["h=11"])


def test_bench_refuses(cli: Run, artifact: Path, tmp_path: Path) -> None:
    refused(cli("bench", tmp_path / "none"), "none")
    refused(cli("bench", artifact, "--shape", "h=4"), "h=4")
    refused(cli("bench", artifact, "--shape", "q=4"), "no dim 'q'")
    refused(cli("bench", artifact, "--repeat", "0"), "--repeat 0")
    refused(cli("bench", artifact, "--out", tmp_path / "no" / "x.json"), "Create it first")


@pytest.mark.skipif(not isinstance(find_gpu(), str), reason="there is a GPU")
def test_bench_without_a_gpu_says_so(cli: Run, artifact: Path) -> None:
    code, output, errors = cli("bench", artifact)
    assert code in (1, 2)
    assert output == ""
    (line,) = (line for line in errors.splitlines() if not line.startswith("["))
    assert line.startswith("error: ")
    assert "no NVIDIA driver" in line


def work(text: str, tmp_path: Path, **shapes: tuple[int, ...]) -> floors.Work:
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return floors.count(path, shapes)


HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def test_operations_and_bytes_of_a_convolution(tmp_path: Path) -> None:
    found = work(
        HEAD
        + """g (float[1, 4, h, w] x, float[6, 2, 3, 3] k) => (float[1, 6, h, w] y) {
            a = Conv <group = 2, pads = [1, 1, 1, 1]> (x, k)
            b = Relu (a)
            s = Shape (x)
            y = Mul (b, b)
        }""",
        tmp_path,
        x=(1, 4, 10, 20),
        k=(6, 2, 3, 3),
    )
    assert found.operations == 2 * (6 * 10 * 20) * (2 * 3 * 3)
    read, weights, result = 4 * 200, 6 * 2 * 9, 6 * 200
    assert vars(found.least) == {"floats": read + weights + result, "others": 0}
    # a and b are written and read, y is written
    assert vars(found.every) == {"floats": read + weights + 5 * result, "others": 0}
    assert dict(found.layers) == {(found.operations, read + weights + result): 1}
    assert not found.unknown


def test_a_loop_counts_as_often_as_it_runs(tmp_path: Path) -> None:
    found = work(
        HEAD
        + """g (float[8, 16] x, float[16, 16] w) => (float[8, 16] y)
        <int64 n = {5}, bool go = {1}> {
            y = Loop (n, go, x) <body =
                b (int64 i, bool c, float[8, 16] s) => (bool d, float[8, 16] t) {
                d = Identity (c)
                m = MatMul (s, w)
                t = Relu (m)
            }>
        }""",
        tmp_path,
        x=(8, 16),
        w=(16, 16),
    )
    assert found.operations == 5 * 2 * 8 * 16 * 16
    assert found.least.floats == 8 * 16 + 16 * 16 + 8 * 16
    assert found.every.floats == 8 * 16 + 16 * 16 + 5 * 4 * 8 * 16 - 8 * 16
    assert dict(found.layers) == {(2.0 * 8 * 16 * 16, 2.0 * 8 * 16 + 16 * 16): 5}


def test_weights_are_read_once_and_what_is_fixed_costs_nothing(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model = onnx.parser.parse_model(
        HEAD
        + """g (float[b, 64] x) => (float[b, 64] y) {
            t = Transpose <perm = [1, 0]> (w)
            a = MatMul (x, t)
            y = Gemm <transA = 0> (a, t)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    found = floors.count(tmp_path / "m.onnx", {"x": (3, 64)})
    assert found.operations == 2 * 2 * 3 * 64 * 64
    assert found.least.floats == 2 * 3 * 64 + 64 * 64


def test_times_are_over_the_rates() -> None:
    found = floors.Work(operations=8e9)
    found.least.floats, found.least.others, found.every.floats = 1e9, 10, 3e9
    found.layers[(4e9, 1e6)] += 2
    rates = {"fp16": 8e12, "tf32": 4e12, "fp32": 1e12, "bandwidth": 2e12}
    half, full = (floors.times(found.record(), p, rates) for p in ("fp16", "fp32"))
    assert half["operations"] == pytest.approx(1.0) and full["operations"] == pytest.approx(8.0)
    assert half["least bytes"] == pytest.approx(1.0) and full["least bytes"] == pytest.approx(2.0)
    assert half["all bytes"] == pytest.approx(3.0)
    assert half["layer by layer"] == pytest.approx(1.0)
    assert full["floor"] == full["operations"]


def test_options_of_what_torch_runs() -> None:
    made = {"updates": 12, "correlation": "on_demand", "update": "split"}
    written = {"updates": 12, "correlation": "volume", "update": "torchvision"}
    for name in ("raft", "raft_small"):
        assert references.as_written(name, made) == written
        assert references.as_written(name, {**written, "updates": 3}) == {**written, "updates": 3}
        # the names and values come from the model
        assert dict(find_spec(name, written, None).options) == written
    assert references.as_written("somebody's", made) == made


def script(name: str, *words: object) -> tuple[int, str, str]:
    line = [sys.executable, str(BENCHMARKS / name), *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path) -> None:
    none, other, empty = (tmp_path / name for name in ("none.json", "other.json", "empty.json"))
    other.write_text("{}")
    engine_results.Results(empty).begin({"date": "today", "command": "c", "machine": {}})
    refused(script("engines.py", "table", "--json", none), str(none), "no such file")
    refused(script("engines.py", "table", "--json", other), str(other))
    refused(script("plot.py", none), str(none), "no such file")
    refused(script("plot.py", other), str(other))
    refused(script("floors.py", "count", "a", "--rates", none), str(none), "no such file")
    refused(script("floors.py", "count", "a", "--rates", other), str(other), "fp16")
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra bench)")
    refused(script("plot.py", empty, "--out", tmp_path), str(empty), "no measurements")


@pytest.mark.skipif(not isinstance(find_gpu(), str), reason="there is a GPU")
def test_a_run_that_measured_nothing_ends_with_1(artifact: Path, tmp_path: Path) -> None:
    kept = tmp_path / "engines.json"
    how = ("--json", kept, "--torch-python", tmp_path / "no-python", "--time-limit", 60)
    code, output, errors = script("engines.py", "run", artifact, "--part", "engine,ort", *how)
    assert code == 1
    assert f"error: {artifact}: nothing could be measured (engine, ort)" in errors
    assert "Traceback" not in output + errors
    runners = [record["runner"] for record in engine_results.read(kept)["results"]]
    assert runners == ["engine", "onnxruntime CUDA"]
    code, _, errors = script("engines.py", "run", artifact, "--part", "rates", *how)
    assert (code, errors) == (1, "rates: there is no GPU here\n")
    code, _, errors = script("engines.py", "run", artifact, "--part", "floors", *how)
    assert (code, errors) == (0, "")
    assert {f["artifact"] for f in engine_results.read(kept)["floors"]} == {artifact.name}
    words = [f"{sys.executable}x", "-c", "print()"]
    assert children.lines(words, print) == f"{words[0]} can't be started: No such file or directory"


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "print('{\"n\": 1}', flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    got: list[Any] = []
    assert children.lines([sys.executable, str(script)], got.append, limit=6) == "not done in 6 s"
    assert got == [{"n": 1}]
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    end = time.monotonic() + 20
    while _alive(status) and time.monotonic() < end:  # a killed process may need time to end
        time.sleep(0.05)
    assert not _alive(status)


def _alive(status: Path) -> bool:
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def test_why_a_command_failed_is_its_error_line() -> None:
    code = (
        "import sys; print('error: no GPU', file=sys.stderr); print('x', file=sys.stderr); exit(2)"
    )
    assert children.lines([sys.executable, "-c", code], print) == "no GPU"
    assert children.lines([sys.executable, "-c", "exit(3)"], print) == "exit code 3"
    assert children.lines([sys.executable, "-c", "print('{}')"], print) == ""


def test_another_python_gets_nothing_of_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.base_prefix).resolve() / "lib"
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{own}:/usr/local/nvidia/lib64")
    found = children.other_python(["/more"])
    assert "PYTHONHOME" not in found
    assert found["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert found["PYTHONPATH"] == f"{BENCHMARKS.parents[1]}:/more"


def test_distance_of_outputs(tmp_path: Path) -> None:
    one, two = np.array([3.0, 0.0], np.float32), np.array([[4.0]], np.float32)
    place = references.reference_file(tmp_path, "m", ["b=1", "a=2"], {"h": 3})
    assert place.name == "m-a=2-b=1-h=3.npz"
    assert references.held_against([one, two], place) == {"error": None}
    references.keep([one, two], place)
    assert references.held_against([one, two], place) == {"error": 0}
    assert references.held_against([one + 1, two], place)["error"] == pytest.approx(2**0.5 / 3)
    # a small output beside a large one counts as much
    references.keep([one * 1e6, two], place)
    assert references.held_against([one * 1e6, -two], place)["error"] == 2.0
    references.keep([one, two * 0], place)
    assert references.held_against([one, two * 0], place) == {"error": 0.0}
    assert references.held_against([one, two], place)["error_why"] == "torch gives zeros"
    references.keep([one, two * np.nan], place)
    assert references.held_against([one, two], place)["error_why"] == "torch's are not finite"
    references.keep([one, two], place)
    assert references.held_against([one, two[0]], place)["error_why"] == (
        "shapes [[2], [1]], torch gives [[2], [1, 1]]"
    )
    assert references.held_against([one * np.nan, two], place)["error_why"] == "not finite"
    assert references.option_texts({"n": 3, "how": "x", "on": True}) == ["how=x", "n=3", "on=true"]
