"""Measures conversions on a Ray cluster of one, two and three nodes, and kills a node.

    python benchmarks/conversion/farm.py [MODEL ...] [--gpu SM,...] [--nodes 1 2 3] [--out DIR]

The nodes are on this machine, and each has one core. With more nodes than cores, nodes share one.
For each number of nodes, all models are converted for each `--gpu` into a new store. Then they are
converted on the most nodes again, and a node is killed while it converts. Last, all is taken from
that store, and all is converted without Ray on one core, one after the other.

MODEL is a name or a source, such as ``linear`` or ``file.py:factory``. Prints the seconds, the
table of the run with the kill, and whether its artifacts are equal to those without Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifact.manifest import Manifest
from pipeline.commands.convert_all import convert_one
from pipeline.commands.farm.command import farm_table
from pipeline.commands.farm.matrix import DEFAULT_MEMORY, matrix
from pipeline.commands.farm.tasks import run_on_ray
from pipeline.commands.farm.work import JobResult, Work
from pipeline.machine.progress import silent
from pipeline.spec.config import Config
from pipeline.store.store import Store

_STORE = 80 * 2**20  # bytes of Ray's object store on each node: the smallest is 75 MiB


@contextlib.contextmanager
def cluster(nodes: int, **more: Any) -> Iterator[Any]:
    """Starts a cluster of nodes with one core each, ``node1`` and so on, on this machine.

    The head has no CPU. `more` are fields of the nodes, such as ``resources``.
    """
    cores = sorted(os.sched_getaffinity(0))
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": _STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for number in range(1, nodes + 1):
            # Ray counts CPUs but limits nobody to them; processes inherit the core
            os.sched_setaffinity(0, {cores[(number - 1) % len(cores)]})
            made.add_node(
                num_cpus=1, memory=DEFAULT_MEMORY, node_name=f"node{number}", **small, **more
            )
        os.sched_setaffinity(0, cores)
        yield made
    finally:
        os.sched_setaffinity(0, cores)
        made.shutdown()


def raylets(made: Any) -> list[int]:
    """Returns the process ids of the nodes, without the head's."""
    return [node.all_processes["raylet"][0].process.pid for node in made.list_all_nodes()[1:]]


def converts(pid: int) -> bool:
    """True if a process below this one converts, and is past its start."""
    return any(_is_past_start(each) for each in _tree(pid))


def _is_past_start(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        mapped = Path(f"/proc/{pid}/maps").read_text() if b"pipeline.machine.child" in words else ""
    except OSError:
        return False
    return "onnx" in mapped


def _tree(pid: int) -> list[int]:
    """Returns a process and all those below it."""
    children: list[str] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += file.read_text().split()
    return [pid, *(each for child in children for each in _tree(int(child)))]


def kill_one(made: Any, limit: float = 120.0) -> threading.Thread:
    """Starts a thread that kills the first node that converts, with all its processes."""

    def watch() -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for pid in raylets(made):
                if converts(pid):
                    for each in _tree(pid):  # a worker goes on for seconds without its raylet
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(each, signal.SIGKILL)
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def lasting(manifest: Manifest) -> dict[str, Any]:
    """Returns what two conversions share: all but times, and files that hold times."""
    facts = dataclasses.asdict(manifest)
    for name in ("created", "stages"):
        del facts[name]
    for name in ("export", "build"):
        del facts[name]["seconds"]
    for name in ("plan_bytes", "peak_bytes"):
        del facts["build"][name]
    del facts["comparison"]["memory_limit_bytes"]
    # the time of a conversion decides how many random sizes are compared
    notes = facts["comparison"]["notes"]
    facts["comparison"]["notes"] = [note for note in notes if note["kind"] != "random-sizes"]
    # Polygraphy stores the time of a run; of TensorRT's plans, some builds differ: see plans.py
    facts["files"] = {
        name: info
        for name, info in facts["files"].items()
        if not name.startswith("comparison/") and name != "engine.plan"
    }
    return facts


def works(models: Sequence[str], gpus: Sequence[str], store: Path) -> list[Work]:
    """Returns the conversions of the matrix."""
    return [
        Work(job, Config(job.model, gpus=job.gpus, store=store), DEFAULT_MEMORY // 4)
        for job in matrix(models, ["rtx-1.7"], gpus)
    ]


def manifests(results: Sequence[JobResult], store: Path) -> dict[str, Manifest]:
    """Returns the manifests in a store. Their files are there, with the right hash."""
    found = {}
    opened = Store.open(str(store))
    for result in results:
        entry = opened.read(opened.named(result.entry))
        with tempfile.TemporaryDirectory() as folder:
            opened.pull(entry, Path(folder, "pulled"))
        found[result.case] = entry.manifest
    return found


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["linear"], metavar="MODEL")
    parser.add_argument("--gpu", action="append", default=[], metavar="SM,...")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--out", type=Path, help="An empty folder (default: a temporary one)")
    given = parser.parse_args()
    if max(given.nodes) < 2:
        parser.error("--nodes: a node is killed, so one number must be 2 or more")
    out: Path = given.out or Path(tempfile.mkdtemp(prefix="farm-"))
    seconds: dict[str, float] = {}

    def timed(name: str, made: Any, store: Path) -> list[JobResult]:
        print(name, flush=True)
        start = time.perf_counter()
        results = run_on_ray(made.address, works(given.models, given.gpu, store), None, _say)
        seconds[name] = time.perf_counter() - start
        return results

    for count in given.nodes:
        with cluster(count) as made:
            timed(f"{count} nodes", made, out / f"store{count}")
    most, store = max(given.nodes), out / "killed"
    with cluster(most) as made:
        thread = kill_one(made)
        results = timed(f"{most} nodes, one killed", made, store)
        thread.join()
        again = timed("everything from the store", made, store)
    print("without Ray", flush=True)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    start, alone = time.perf_counter(), {}
    for work in works(given.models, given.gpu, out / "alone"):
        config = dataclasses.replace(work.config, out=out / work.job.text.replace(" ", "_"))
        one = convert_one(work.job.model, config, None, silent)
        alone[work.job.text] = dataclasses.replace(work.result(), entry=one.entry)
    os.sched_setaffinity(0, cores)
    seconds["without Ray"] = time.perf_counter() - start
    print(f"\n{farm_table(results)}\n")
    print("\n".join(f"{name}: {value:.1f} s" for name, value in seconds.items()))
    one, other = manifests(results, store), manifests(list(alone.values()), out / "alone")
    equal = {name: lasting(one[name]) == lasting(other[name]) for name in one}
    print(f"equal to those without Ray: {sum(equal.values())} of {len(equal)} artifacts")
    plans = [one[name].files["engine.plan"] == other[name].files["engine.plan"] for name in one]
    print(f"engine.plan equal to the byte: {sum(plans)} of {len(plans)}")
    hits = sum(len(result.pulled) == 4 for result in again)
    print(f"second run: {hits} of {len(again)} from the store")


if __name__ == "__main__":
    main()
