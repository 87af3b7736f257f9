"""Runs conversions as tasks of a Ray cluster.

Ray runs a task again on another node if its node or its worker is lost:
https://docs.ray.io/en/latest/ray-core/fault_tolerance/tasks.html. The first conversion of a model
runs before the others, which pull its first stages from the store.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.commands.convert_all import ModelResult, convert_one
from pipeline.commands.farm.nodes import Nodes, connected, text_of
from pipeline.commands.farm.work import JobResult, Work
from pipeline.convert.keys import pipeline_hash
from pipeline.machine import interrupts
from pipeline.machine.progress import Announce, silent
from pipeline.spec.config import Config

RETRIES = 3  # of a conversion whose node or worker was lost
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
        announce: Called when a conversion ends, and when a node joins or is lost.
        keep: Called with all results, at the beginning and after each conversion.

    Returns:
        The results, in the order of `work`.

    Raises:
        InputError: Ray is not installed, the cluster cannot be reached, or no node has a resource.
        KeyboardInterrupt: The run was interrupted. What was pushed stays in the store.
    """
    ray = connected(address)
    interrupts.settle("finished artifacts are in the store. Run the same command again to go on")
    # a thread of Ray prints the logs of lost nodes to sys.stdout, which is for the results
    with (
        interrupts.cleaned(ray.shutdown),
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
    ):
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
            max_retries=RETRIES,
            name=one.job.text,
        )
        place = (one.job.model, one.config, self._time_limit, pipeline_hash())
        self._running[task.remote(*place)] = one

    def _result(self, task: Any, one: Work) -> JobResult:
        try:
            found, node = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return one.result("FAILED", f"lost by Ray: {' '.join(str(error).split())}")
        empty = one.result()
        kept = {**vars(found), "target": empty.target, "gpu": empty.gpu}
        return JobResult(**kept, node=self._nodes.names.get(node, node))

    def _hopeless(self, ready: Sequence[Any]) -> list[tuple[Any, str]]:
        """The tasks that no node can run any more."""
        found = []
        for task, one in self._running.items():
            if task not in ready and self._nodes.without(one.needs) > _GONE:
                self._ray.cancel(task)
                found.append((task, f"no node is left that has {text_of(one.needs)}"))
        return found


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
