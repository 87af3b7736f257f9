"""``convert --all --ray``: converts the models for all targets and GPUs on a cluster's nodes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.artifact.manifest import now
from pipeline.commands.convert_all import (
    HEAD,
    REPORT,
    cells,
    check_options,
    failures,
    make_parent,
    write_junit,
)
from pipeline.commands.farm.matrix import matrix, memory_of, shared_store, targets_of
from pipeline.commands.farm.tasks import run_on_ray
from pipeline.commands.farm.work import JobResult, Work
from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.errors import InputError
from pipeline.machine.progress import Announce
from pipeline.models import MODELS
from pipeline.spec.config import Config
from pipeline.store.entry import STAGES
from pipeline.store.store import Store


def command(
    arguments: argparse.Namespace,
    config: Callable[[argparse.Namespace], Config],
    announce: Announce,
) -> int:
    """Runs ``convert --all --ray``. Returns 0 if every conversion passed, 1 if one failed.

    Args:
        arguments: The parsed command line.
        config: Makes a `Config` from the parsed command line of one conversion.
        announce: Called when a conversion ends, and when a node joins or is lost.

    Raises:
        InputError: Options that do not fit, or there is no such cluster, or no node has a resource.
        StoreError: The store cannot be read.
    """
    if not arguments.whole_zoo or not arguments.store:
        raise InputError("--ray works only with --all and --store. Add both")
    check_options(arguments)
    for name, given in (("pass", arguments.own), ("timing-cache", arguments.timing_cache)):
        if given:
            raise InputError(f"--{name} names a file of this machine: remove it, or remove --ray")
    jobs = matrix(list(MODELS), targets_of(arguments), arguments.gpu)
    store = shared_store(arguments.store)
    memory = memory_of(Store.open(store), list(MODELS))
    work = []
    for job in jobs:
        own = {"model": job.model, "target": job.target, "gpu": list(job.gpus), "store": store}
        one = config(argparse.Namespace(**{**vars(arguments), **own, "out": None}))
        work.append(Work(job, one, memory[job.model]))
    parent: Path = arguments.out or Path("artifacts")
    make_parent(parent)
    started = now()

    def keep(results: Iterable[JobResult]) -> None:
        write_junit(parent / REPORT, list(results), started)

    results = run_on_ray(arguments.ray, work, arguments.time_limit, announce, keep)
    if arguments.json:
        show(json.dumps([asdict(result) for result in results], indent=2))
    else:
        show(farm_table(results))
        show(f"{parent / REPORT} has the same results for JUnit readers")
        show(f"{arguments.store} has the artifacts: pipeline store ls {arguments.store}")
    return 1 if any(result.state == "FAILED" for result in results) else 0


def farm_table(results: Sequence[JobResult]) -> str:
    """Returns a row for each conversion, and a line for each failure."""
    rows: list[Sequence[str]] = [("model", "target", "GPU", "node", *HEAD, "from the store")]
    for r in results:
        stages = "everything" if r.pulled == STAGES else ", ".join(r.pulled)
        rows.append((r.model, r.target, r.gpu or "-", r.node or "-", *cells(r), stages or "-"))
    return "\n".join([table(rows), *failures(results)])
