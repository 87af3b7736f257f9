"""Runs conversions as tasks of a Ray cluster.

A conversion runs again if its node or its worker is lost. Ray's own retries are off: it repeats a
task that it killed for memory without limit, and one task cannot set another limit:
https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html. The first conversion of a
model runs before the others, which pull its first stages from the store.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.commands.convert_all import ModelResult, convert_one
from pipeline.commands.farm.matrix import Job
from pipeline.commands.farm.nodes import Nodes, connected, text_of
from pipeline.commands.farm.work import JobResult, Work
from pipeline.convert.keys import pipeline_hash
from pipeline.errors import StoreError, first_line
from pipeline.machine import interrupts
from pipeline.machine.progress import Announce, silent
from pipeline.spec.config import Config
from pipeline.store.store import Store

RETRIES = 3  # of a conversion that Ray lost
_LOOK = 2.0  # seconds between two looks at the nodes
_GONE = 60.0  # seconds without a node that could run a conversion, until it fails


def run_on_ray(
    address: str,
    work: Sequence[Work],
    time_limit: float | None,
    announce: Announce,
    keep: Callable[[Iterable[JobResult]], None] = lambda _: None,
) -> list[JobResult]:
    """Runs conversions on the nodes of a Ray cluster. A failure does not stop the others.

    Args:
        address: What ``ray.init`` takes. ``local`` starts a cluster of this machine.
        work: The conversions. Each has a store.
        time_limit: The limit for one conversion in seconds; None for no limit.
        announce: Called when a conversion ends or runs again, and when a node joins or is lost.
        keep: Called with all results, at the beginning and after each conversion.

    Returns:
        The results, in the order of `work`.

    Raises:
        InputError: Ray is not installed, the cluster cannot be reached, or no node has a resource.
        KeyboardInterrupt: The run was interrupted. What was pushed stays in the store.
    """
    # until ray.shutdown ends, a thread of Ray prints the logs of lost nodes to sys.stdout, which is
    # for the results
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        ray = connected(address)
        interrupts.settle(
            "finished artifacts are in the store. Run the same command again to go on"
        )
        with interrupts.cleaned(ray.shutdown):
            nodes = Nodes(ray, announce)
            work = [nodes.fitted(one) for one in work]
            return _Run(ray, nodes, work, time_limit).results(announce, keep)


class _Run:
    """The tasks of one run."""

    def __init__(
        self, ray: Any, nodes: Nodes, work: Sequence[Work], time_limit: float | None
    ) -> None:
        self._ray, self._nodes, self._time_limit = ray, nodes, time_limit
        self._results = {one.job: one.result() for one in work}
        self._after: dict[str, list[Work]] = {}  # those of a model that wait for its first one
        self._running: dict[Any, Work] = {}
        self._runs: Counter[Job] = Counter()
        self._work = work

    def results(
        self, announce: Announce, keep: Callable[[Iterable[JobResult]], None]
    ) -> list[JobResult]:
        keep(self._results.values())
        for one in self._work:
            if one.job.model in self._after:
                self._after[one.job.model].append(one)
            else:
                self._after[one.job.model] = []
                self._submit(one)
        count = 0
        while self._running:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK)
            self._nodes.look()
            for task, error in [*((task, "") for task in ready), *self._hopeless(ready)]:
                one = self._running.pop(task)
                result = one.result("FAILED", error) if error else self._result(task, one)
                if result.state == "not reached":
                    announce(f"{one.job.text}: {result.error}. It runs again")
                    self._submit(one)
                    continue
                self._results[one.job] = result
                count += 1
                where = f" on {result.node}" if result.node else ""
                announce(f"{one.job.text} ({count} of {len(self._work)}): {result.state}{where}")
                keep(self._results.values())
                for other in self._after.pop(one.job.model, ()):
                    self._submit(other)
        return list(self._results.values())

    def _submit(self, one: Work) -> None:
        rest = dict(one.needs)
        task = self._ray.remote(convert_here).options(
            num_cpus=rest.pop("CPU"),
            memory=rest.pop("memory"),
            num_gpus=rest.pop("GPU", 0),
            resources=rest,
            max_retries=0,
            name=one.job.text,
        )
        place = (one.job.model, one.config, self._time_limit, pipeline_hash())
        self._running[task.remote(*place)] = one
        self._runs[one.job] += 1

    def _result(self, task: Any, one: Work) -> JobResult:
        """The result; "not reached" if the conversion was lost and may run again."""
        errors = self._ray.exceptions
        lost = (
            errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError,
            errors.ObjectLostError,
        )  # fmt: skip
        try:
            found, node = self._ray.get(task)
        except errors.RayError as error:
            again = isinstance(error, lost) and self._runs[one.job] <= RETRIES
            run = f"run {self._runs[one.job]} of {RETRIES + 1}"
            line = f"lost by Ray in {run}: {first_line(error)}"
            result = one.result("not reached" if again else "FAILED", line)
            return replace(result, detail=str(error))
        empty = one.result()
        kept = {**vars(found), "target": empty.target, "gpu": empty.gpu}
        result = JobResult(**kept, node=self._nodes.names.get(node, node))
        return _checked(result, str(one.config.store)) if result.entry else result

    def _hopeless(self, ready: Sequence[Any]) -> list[tuple[Any, str]]:
        """The tasks that no node can run any more."""
        found = []
        for task, one in self._running.items():
            if task not in ready and self._nodes.without(one.needs) > _GONE:
                self._ray.cancel(task)
                found.append((task, f"no node is left that has {text_of(one.needs)}"))
        return found


def _checked(result: JobResult, store: str) -> JobResult:
    """The result, as a failure if this machine does not find in the store what the node wrote."""
    try:
        # by the file's name: a listing of an NFS folder may be a minute old
        if Store.open(store).place.bytes_of(result.entry_file) is not None:
            return result
        error = (
            f"the node wrote to another place than this machine reads: {store} has no entry "
            f"{result.entry[:12]} here. Every node must reach the same store"
        )
    except StoreError as found:
        error = f"cannot look for the artifact in the store: {found.message}"
    return replace(
        result, state="FAILED", error=error, detail=error, entry="", entry_file="", not_pushed=error
    )


def convert_here(
    model: str, config: Config, time_limit: float | None, code: str
) -> tuple[ModelResult, str]:
    """Runs on a node: converts in a temporary folder, so that only the store has the artifact.

    Args:
        model: The model's name.
        config: The conversion, with its store.
        time_limit: The limit in seconds; None for no limit.
        code: The hash of the code of the machine that asks.

    Returns:
        The result, and the id of the node.
    """
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    if pipeline_hash() != code:
        error = "the node has another version of pipeline. Install the same one on every node"
        return ModelResult(model, "FAILED", error=error, detail=error), node
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = convert_one(
            model, replace(config, out=Path(folder, model)), time_limit, silent, kept=False
        )
    if result.state != "FAILED" and not result.entry:
        error = f"the artifact is not in the store: {result.not_pushed}"
        result = replace(result, state="FAILED", error=error, detail=error)
    return result, node
