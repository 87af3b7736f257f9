"""The nodes of a Ray cluster, and what they have."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.commands.farm.work import Work
from pipeline.errors import InputError, first_line
from pipeline.machine.progress import Announce


def connected(address: str) -> Any:
    """Connects to the cluster, and returns the module."""
    try:
        import ray
    except ImportError as error:
        raise InputError("--ray needs Ray: pip install 'trt-pipeline[ray,store]'") from error
    dashboard = False if address == "local" else None
    try:
        ray.init(
            address=address, include_dashboard=dashboard, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError, TypeError) as error:
        why = getattr(error, "message", "") or first_line(error)  # str() adds Ray's help
        raise InputError(
            f"--ray {address}: cannot connect: {why}. Start a cluster with `ray start --head`, or "
            "pass local. A cluster with token authentication needs RAY_AUTH_MODE=token here, and "
            "its token in ~/.ray/auth_token"
        ) from error
    return ray


class Nodes:
    """The nodes of the cluster."""

    def __init__(self, ray: Any, announce: Announce) -> None:
        self._ray, self._announce = ray, announce
        self._alive: dict[str, Mapping[str, float]] = {}
        self._since: dict[tuple[tuple[str, float], ...], float] = {}
        self.names: dict[str, str] = {}
        self.look()

    def look(self) -> None:
        """Looks which nodes are alive, and announces what changed."""
        before, self._alive = self._alive, {}
        for node in self._ray.nodes():
            self.names[node["NodeID"]] = node.get("NodeName") or node["NodeManagerAddress"]
            if node["Alive"]:
                self._alive[node["NodeID"]] = node["Resources"]
        for key in self._alive.keys() - before.keys():
            count = self._alive[key].get("CPU", 0)
            if count:
                self._announce(f"node {self.names[key]} has {text_of({'CPU': count})}")
        for key in before.keys() - self._alive.keys():
            self._announce(f"node {self.names[key]} is lost: what it did runs again on another")

    def fitted(self, one: Work) -> Work:
        """A conversion that asks for no more memory than a node has.

        Raises:
            InputError: No node has one of the other resources.
        """
        rest = {name: count for name, count in one.needs.items() if name != "memory"}
        able = [has["memory"] for has in self._alive.values() if _enough(has, rest)]
        if not able:
            labels = [f'"{name}": 1' for name in one.job.gpus if name in rest]
            start = f" --resources '{{{labels[0]}}}'" if labels else ""
            raise InputError(
                f"{one.job.text}: no node of the cluster has {text_of(rest)}. Start one with "
                f"`ray start --address HOST:PORT{start}`"
            )
        return replace(one, memory=min(one.memory, int(max(able))))

    def without(self, needs: Mapping[str, float]) -> float:
        """For how many seconds no node has had these resources."""
        key = tuple(sorted(needs.items()))
        if any(_enough(has, needs) for has in self._alive.values()):
            self._since.pop(key, None)
            return 0.0
        return time.monotonic() - self._since.setdefault(key, time.monotonic())


def _enough(has: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return all(has.get(name, 0) >= count for name, count in needs.items())


def text_of(needs: Mapping[str, float]) -> str:
    """Returns resources as text: ``1 CPU, 1 sm90``."""
    return ", ".join(f"{count:g} {name}" for name, count in needs.items())
