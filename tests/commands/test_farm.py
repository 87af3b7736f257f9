"""A farm: conversions as tasks of a real Ray cluster, whose nodes are on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import small_zoo
from helpers import HERE, Run, refused
from readme_commands import ROOT

from pipeline.artifact.artifact import Artifact
from pipeline.commands.farm.matrix import DEFAULT_MEMORY, Job, matrix, memory_of
from pipeline.commands.farm.work import Work
from pipeline.convert.report import Report
from pipeline.errors import InputError
from pipeline.spec.config import Config

ZOO = {  # aborting comes last: the node that is killed is to be in a longer conversion
    "tiny": "tiny:conv", "first": "small_zoo:first", "unsized": "small_zoo:unsized",
    "aborting": "small_zoo:aborting",
}  # fmt: skip


QUICK = {  # variables of Ray, which the processes of a new cluster read
    # a lost node is noticed after 5 failed checks; a check that is only slow has 10 s, as always
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    # or the other processes of the tests leave nothing to the conversions
    "RAY_worker_niceness": "0",
}


@pytest.fixture(scope="module")
def farm() -> Iterator[ModuleType]:
    """The benchmark: its clusters, and its comparison of manifests."""
    pytest.importorskip("ray")
    pytest.importorskip("fsspec")
    spec = importlib.util.spec_from_file_location(
        "farm_benchmark", ROOT / "benchmarks" / "conversion" / "farm.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["farm_benchmark"] = module
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK.items():
            patch.setenv(name, value)
        yield module


def start(place: Path, *words: object) -> subprocess.Popen[str]:
    """Starts ``convert --all`` in the zoo of PYTHONPATH."""
    line = [sys.executable, "-m", "pipeline", "convert", "--all", *map(str, words)]
    return subprocess.Popen(
        line, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def with_zoo(place: Path, zoo: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    house = small_zoo.mounted(place / "house", zoo)
    monkeypatch.chdir(place)  # the nodes work here
    monkeypatch.setenv("PYTHONPATH", f"{house}{os.pathsep}{HERE}")


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The results of a run with ``--json`` by their case, and the lines of its progress."""
    output, errors = process.communicate(timeout=1200)
    results = json.loads(output)  # and nothing else, whatever Ray prints
    steps = [json.loads(line)["step"] for line in errors.splitlines()]
    return {f"{one['model']} {one['gpu']}".strip(): one for one in results}, steps


@pytest.mark.slow
def test_a_killed_node_changes_no_byte(
    farm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_zoo(tmp_path, ZOO, monkeypatch)
    words = ("--json", "--store", "store", "--gpu", "sm86", "--gpu", "8.9", "--out", "report")
    with farm.cluster(3) as made:
        killer = farm.kill_one(made)
        process = start(tmp_path, "--ray", made.address, *words)
        results, steps = outcome(process)
        killer.join()
        left = [node["NodeName"] for node in _nodes(made) if node["Alive"]]
        assert process.returncode == 1
        (dead,) = {"node1", "node2", "node3"} - set(left)
        assert f"node {dead} is lost: what it did runs again on another" in steps
        # it was killed in its first conversion
        assert dead not in {one["node"] for one in results.values()}
        again, _ = outcome(start(tmp_path, "--ray", made.address, *words))
    good = [f"{model} {gpu}" for model in ("tiny", "first") for gpu in ("sm86", "sm89")]
    bad = [f"{model} {gpu}" for model in ("unsized", "aborting") for gpu in ("sm86", "sm89")]
    assert sorted(results) == sorted(good + bad)
    for case in bad:
        assert results[case]["state"] == again[case]["state"] == "FAILED"
    assert "output y axis 1 depends on the data" in results["unsized sm86"]["error"]
    assert "kept:" not in results["unsized sm86"]["error"]
    assert "Aborted (SIGABRT)" in results["aborting sm89"]["error"]
    for case in good:
        assert results[case]["state"] in ("ok", "unchanged") and results[case]["node"]
        assert again[case]["state"] == "unchanged" and len(again[case]["pulled"]) == 4
        assert again[case]["entry"] == results[case]["entry"]
    # the second kind of GPU does not export again
    assert results["tiny sm89"]["pulled"][:2] == ["export", "rewrite"]
    assert (tmp_path / "report" / "convert.xml").read_text().count("<failure") == 4
    assert not (tmp_path / "report" / "tiny").exists()

    process = start(tmp_path, "--json", "--gpu", "sm86", "--out", "alone")
    process.communicate(timeout=1200)
    for model in ("tiny", "first"):
        alone = Artifact.open(tmp_path / "alone" / model).manifest
        there = _from_store(farm, tmp_path / "store", results[f"{model} sm86"]["entry"])
        assert farm.lasting(there) == farm.lasting(alone)


def _nodes(made: Any) -> list[dict[str, Any]]:
    """The nodes of the cluster, asked in a process of its own: a kill is known after a moment."""
    script = (
        "import json, ray, sys, logging; "
        "ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR); "
        "print(json.dumps(ray.nodes()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, made.address], capture_output=True, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return [node for node in found if node["NodeName"].startswith("node")]


def _from_store(farm: ModuleType, store: Path, key: str) -> Any:
    opened = farm.Store.open(str(store))
    return opened.read(opened.named(key)).manifest


@pytest.mark.slow
def test_nothing_of_ray_is_printed(
    farm: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread of Ray prints while it connects, and until it is shut down."""
    import ray

    def loud(own: Any) -> Any:
        def printing(*words: Any, **how: Any) -> Any:
            print("(raylet) Raylet is terminated")
            found = own(*words, **how)
            print("(raylet) Raylet is terminated")
            return found

        return printing

    monkeypatch.setattr(ray, "init", loud(ray.init))
    monkeypatch.setattr(ray, "shutdown", loud(ray.shutdown))
    assert farm.run_on_ray("local", [], None, lambda _: None) == []
    assert capfd.readouterr().out == ""


@contextlib.contextmanager
def labelled(farm: ModuleType) -> Iterator[Any]:
    """A cluster with a plain node, and node2 that says that it has a GPU of compute capability 9.0.

    Ray believes what a node says.
    """
    with farm.cluster(1) as made:
        made.add_node(
            num_cpus=1, num_gpus=1, resources={"sm90": 1}, memory=DEFAULT_MEMORY,
            node_name="node2", object_store_memory=80 * 2**20, include_dashboard=False,
        )  # fmt: skip
        yield made


@pytest.mark.slow
def test_a_target_that_needs_a_gpu_runs_where_it_is(
    farm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_zoo(tmp_path, {"slow": "small_zoo:slow"}, monkeypatch)
    with labelled(farm) as made:
        words = ("--ray", made.address, "--store", "store")
        # TensorRT 10 is not installed on the node: that it says so shows where it ran
        process = start(tmp_path, *words, "--json", "--target", "tensorrt-10", "--gpu", "sm90")
        results, _ = outcome(process)
        assert results["slow sm90"]["node"] == "node2"
        assert "tensorrt is not installed here" in results["slow sm90"]["error"]
        process = start(tmp_path, *words, "--target", "tensorrt-10", "--gpu", "sm86")
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 2
        last = errors.splitlines()[-1]
        assert "slow tensorrt-10 sm86: no node of the cluster has 1 CPU, 1 GPU, 1 sm86" in last
        assert """ray start --address HOST:PORT --resources '{"sm86": 1}'""" in last

        process = start(tmp_path, *words)
        _until(lambda: any(map(farm.converts, farm.raylets(made))))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 130 and not output
        assert errors.splitlines()[-1].endswith("Run the same command again to go on")
        _until(lambda: not any(map(farm.converts, farm.raylets(made))))

        # the zoo of the nodes is not the zoo of this process
        work = Work(Job("linear", "rtx-1.7"), Config("linear", store=tmp_path / "store"), 2**30)
        (result,) = farm.run_on_ray(made.address, [work], None, lambda _: None)
        assert result.error.startswith("the node has another version of pipeline")


@pytest.mark.slow
def test_a_conversion_that_no_node_can_run_any_more_fails(
    farm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.commands.farm import tasks

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "_GONE", 3.0)
    # a job of a target that needs a GPU, but with a conversion that needs none, and takes an hour
    job = Job("small_zoo:slow", "tensorrt-10", ("sm90",))
    work = Work(job, Config(job.model, store=tmp_path / "store"), 2**30)
    steps: list[str] = []
    with labelled(farm) as made:
        killer = farm.kill_one(made)
        (result,) = tasks.run_on_ray(made.address, [work], None, steps.append)
        killer.join()
    assert result.state == "FAILED"
    assert result.error.startswith("no node is left that has 1 CPU, ")
    assert result.error.endswith(" memory, 1 GPU, 1 sm90")
    assert "node node2 is lost: what it did runs again on another" in steps


@pytest.mark.slow
def test_the_artifact_must_be_in_the_store_of_this_machine(
    farm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}")
    there, here, full = tmp_path / "there", tmp_path / "here", tmp_path / "full"
    for folder in (there, here, full):
        folder.mkdir()
    (full / "tmp").touch()  # a store writes new files in this folder
    monkeypatch.chdir(there)
    model = "small_zoo:quick"
    with farm.cluster(1) as made:
        monkeypatch.chdir(here)  # so a relative path is one folder here, and another on the node
        work = [
            Work(Job(model, "rtx-1.7", (gpu,)), Config(model, gpus=(gpu,), store=store), 2**30)
            for gpu, store in (("sm86", Path("store")), ("sm89", full))
        ]
        other, unwritten = farm.run_on_ray(made.address, work, None, lambda _: None)
    assert len(list(there.glob("store/entries/*/*.json"))) == 1
    assert other.state == unwritten.state == "FAILED" and not other.entry
    assert other.error.startswith("the node wrote to another place than this machine reads: store")
    assert unwritten.error.startswith(f"the artifact is not in the store: store {full}: ")


@pytest.mark.slow
def test_a_conversion_that_is_killed_for_memory_ends(
    farm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.commands.farm import tasks

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}")
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.0001")  # less than any machine uses
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "RETRIES", 1)
    job = Job("small_zoo:slow", "rtx-1.7")
    work = Work(job, Config(job.model, store=tmp_path / "store"), 2**30)
    steps: list[str] = []
    with farm.cluster(1) as made:
        (result,) = tasks.run_on_ray(made.address, [work], None, steps.append)
    assert result.state == "FAILED"
    assert result.error.startswith("lost by Ray in run 2 of 2: 1 worker(s) were killed")
    assert len([step for step in steps if step.endswith("It runs again")]) == 1


def _until(true: Any, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("farm")
def test_local_needs_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_zoo(tmp_path, {"first": "small_zoo:first"}, monkeypatch)
    process = start(tmp_path, "--ray", "local", "--store", "store")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    head, _, row, *rest = output.splitlines()
    assert head.split()[:6] == ["model", "target", "GPU", "node", "result", "seconds"]
    assert row.split()[:3] == ["first", "rtx-1.7", "-"] and " ok " in row
    assert rest[-1] == "store has the artifacts: pipeline store ls store"
    assert "first rtx-1.7 (1 of 1): ok on " in errors


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["linear", "--ray", "auto"], "--ray works only with --all and --store"),
        (["--all", "--ray", "auto"], "--ray works only with --all and --store"),
        (["--all", "--ray", "auto", "--store", "memory://a"], "other processes cannot open it"),
        (["--all", "--ray", "auto", "--store", "s", "--pass", "p.py"], "--pass names a file"),
        (["--all", "--ray", "auto", "--store", "s", "--dim", "h=1:2"], "--dim fits one model"),
        (["--all", "--ray", "auto", "--store", "s", "--gpu", "sm90"], "rtx-1.7 builds for 7.5"),
        (["--all", "--ray", "auto", "--store", "s", "--target", "x"], "unknown target 'x'"),
        (["--all", "--target", "rtx-1.7", "--target", "tensorrt-10"], "--target was given twice"),
    ],
)
def test_bad_words(cli: Run, words: list[str], part: str) -> None:
    refused(cli("convert", *words), part)


def test_without_ray_the_error_names_the_extra(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ("--all", "--ray", "auto", "--store", tmp_path / "s", "--out", tmp_path / "o")
    refused(cli("convert", *map(str, words)), "pip install 'trt-pipeline[ray,store]'")


def test_the_error_names_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("fsspec")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))  # without a token
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    process = start(tmp_path, "--ray", "127.0.0.1:6379", "--store", "store")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 2 and not output
    assert "cannot connect: Token authentication is enabled but no" in errors.splitlines()[-1]
    assert errors.endswith("needs RAY_AUTH_MODE=token here, and its token in ~/.ray/auth_token\n")


def test_matrix() -> None:
    found = matrix(["a", "b"], ["rtx-1.7", "rtx-1.7"], ["sm86,8.9", "12.0", "sm120"])
    both, one = ("sm86", "sm89"), ("sm120",)
    assert found == [Job(m, "rtx-1.7", gpus) for m in ("a", "b") for gpus in (both, one)]
    assert found[0].text == "a rtx-1.7 sm86,sm89"
    with pytest.raises(InputError, match="builds for one kind of GPU"):
        matrix(["a"], ["tensorrt-10"], ["sm86,sm89"])


def test_resources() -> None:
    needs = [
        Work(job, Config("linear"), 5).needs
        for job in matrix(["linear"], ["rtx-1.7", "tensorrt-10"], ["sm86"])
    ]
    assert needs == [
        {"CPU": 1, "memory": 5}, {"CPU": 1, "memory": 5, "GPU": 1, "sm86": 1},
    ]  # fmt: skip


def test_memory_is_what_the_last_conversion_needed(converted: Report, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    from pipeline.store.store import Store

    store = Store.open(str(tmp_path))
    store.push(Artifact.open(converted.path))
    peaks = {stage.name: stage.peak_bytes or 0 for stage in converted.manifest.stages}
    builder = peaks.pop("build")
    assert min(*peaks.values(), builder) > 2**20
    assert memory_of(store, ["tiny", "other"]) == {
        "tiny": max(peaks.values()) + builder, "other": DEFAULT_MEMORY,
    }  # fmt: skip
