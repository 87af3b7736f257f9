"""Inputs and outputs of comparisons, stored in an artifact in Polygraphy's own format."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import ArtifactError
from pipeline.machine.files import fresh
from pipeline.machine.polygraphy import collected
from pipeline.spec.file_names import COMPARISON
from pipeline.spec.tensors import Feed

_FIRST = threading.Lock()


def _register() -> None:
    """Makes Polygraphy register its encoders of arrays.

    Polygraphy registers them at their first use, which fails in two threads at once.
    """
    from polygraphy.json import from_json, to_json

    with _FIRST:
        from_json(to_json(np.zeros(0)))


def save_feeds(feeds: Sequence[Feed], path: Path) -> None:
    """Writes inputs as ``polygraphy run --load-inputs`` reads them."""
    from polygraphy.json import save_json

    _register()
    with collected():
        save_json([dict(feed) for feed in feeds], str(path))


def save_run(name: str, outputs: Sequence[Mapping[str, np.ndarray]], path: Path) -> None:
    """Writes one run's outputs as ``polygraphy run --load-outputs`` reads them."""
    from polygraphy.comparator import RunResults
    from polygraphy.comparator.struct import IterationResult

    _register()
    runs = RunResults()
    runs.append((name, [IterationResult(dict(o), runner_name=name) for o in outputs]))
    with collected():
        runs.save(str(path))


def load_feeds(path: Path) -> list[dict[str, np.ndarray]]:
    """Reads what `save_feeds` wrote."""
    from polygraphy.json import load_json

    _register()
    with collected():
        return [dict(feed) for feed in load_json(str(path))]


def load_run(path: Path) -> list[dict[str, np.ndarray]]:
    """Reads what `save_run` wrote."""
    from polygraphy.comparator import RunResults

    _register()
    with collected():
        runs = RunResults.load(str(path))
    ((_, iterations),) = runs.items()
    return [{name: np.asarray(array) for name, array in it.items()} for it in iterations]


def copy_run(source: Path, destination: Path) -> None:
    """Gives a file a second name: as a link if possible, otherwise as a copy."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def store_run(place: Path, feeds: Sequence[Feed], runner: str, outputs: Sequence[Feed]) -> None:
    """Stores inputs and the outputs of one run for them."""
    place.mkdir(parents=True, exist_ok=True)
    save_feeds(feeds, fresh(place / "inputs.json"))
    save_run(runner, outputs, fresh(place / f"{runner}.json"))


@dataclass(frozen=True)
class StoredPoint:
    """One stored point: its inputs and one run's outputs."""

    feed: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class StoredRuns:
    """One stored point: its inputs and the outputs of every stored run."""

    feed: dict[str, np.ndarray]
    outputs: dict[str, dict[str, np.ndarray]]


def stored_runs(folder: Path) -> list[StoredRuns]:
    """All stored points of an artifact. A point that two profiles store occurs twice."""
    found = []
    for path in sorted((folder / COMPARISON).glob("*/inputs.json")):
        others = [p for p in sorted(path.parent.glob("*.json")) if p != path]
        runs = {other.stem: load_run(other) for other in others}
        for n, feed in enumerate(load_feeds(path)):
            found.append(StoredRuns(feed, {name: run[n] for name, run in runs.items()}))
    return found


def stored_feeds(folder: Path) -> list[dict[str, np.ndarray]]:
    """All stored inputs of an artifact."""
    return [f for p in sorted((folder / COMPARISON).glob("*/inputs.json")) for f in load_feeds(p)]


def stored_points(folder: Path, runner: str, place: Path | None = None) -> list[StoredPoint]:
    """All stored points of one run.

    Args:
        folder: The artifact's folder, or a copy of it.
        runner: The run's name.
        place: The folder's path for an error, if `folder` is a copy.

    Raises:
        ArtifactError: No outputs of the run are stored.
    """
    found = []
    for path in sorted((folder / COMPARISON).glob(f"*/{runner}.json")):
        feeds = load_feeds(path.with_name("inputs.json"))
        outputs = load_run(path)
        found += [StoredPoint(f, o) for f, o in zip(feeds, outputs, strict=True)]
    if not found:
        missing = f"no outputs of {runner} are stored to compare with; pass --torch to run it"
        raise ArtifactError(f"{place or folder}: {missing}")
    return found
