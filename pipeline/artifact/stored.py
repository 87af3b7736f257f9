"""Inputs and outputs of comparisons, stored in an artifact in Polygraphy's own format."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import ArtifactError, first_line
from pipeline.machine.files import fresh
from pipeline.machine.polygraphy import collected, without_torch
from pipeline.spec.file_names import COMPARISON
from pipeline.spec.tensors import Feed

_FIRST = threading.Lock()


def _register() -> None:
    """Makes Polygraphy register its encoders of arrays.

    Polygraphy registers them at their first use, which fails in two threads at once.
    """
    from polygraphy.json import from_json, to_json

    without_torch()
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
    """Reads what `save_feeds` wrote.

    Raises:
        ArtifactError: The file holds something else.
    """
    from polygraphy.json import load_json

    _register()
    with _explained(path), collected():
        return [_arrays(feed) for feed in load_json(str(path))]


def load_run(path: Path) -> list[dict[str, np.ndarray]]:
    """Reads what `save_run` wrote.

    Raises:
        ArtifactError: The file holds something else.
    """
    from polygraphy.comparator import RunResults

    _register()
    with _explained(path), collected():
        ((_, iterations),) = RunResults.load(str(path)).items()
        return [_arrays(iteration) for iteration in iterations]


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = {name: np.asarray(array) for name, array in values.items()}
    if not all(isinstance(name, str) and a.dtype.kind in "biuf" for name, a in found.items()):
        raise ValueError("expected arrays of numbers by name")
    return found


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns the errors of Polygraphy and numpy into one: the file may be somebody else's."""
    try:
        yield
    except OSError as error:
        what = error.strerror or error
        raise ArtifactError(f"{_short(path)}: can't be read: {what}. Convert again") from error
    except Exception as error:  # a file's content can raise anything
        raise ArtifactError(
            f"{_short(path)}: is not in Polygraphy's form ({first_line(error)}). Convert again"
        ) from error


def _short(path: Path) -> str:
    """The path inside of the artifact: the files are read in a copy of its folder."""
    return "/".join(("the artifact's", *path.parts[-3:])).replace("/", " ", 1)


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


def _check_count(path: Path, outputs: int, feeds: int) -> None:
    """Raises `ArtifactError` unless there are outputs for every input."""
    if outputs != feeds:
        raise ArtifactError(
            f"{_short(path)}: has outputs of {outputs} runs for {feeds} inputs. Convert again"
        )


def stored_runs(folder: Path) -> list[StoredRuns]:
    """All stored points of an artifact. A point that two profiles store occurs twice."""
    found = []
    for path in sorted((folder / COMPARISON).glob("*/inputs.json")):
        others = [p for p in sorted(path.parent.glob("*.json")) if p != path]
        runs = {other.stem: load_run(other) for other in others}
        feeds = load_feeds(path)
        for name, run in runs.items():
            _check_count(path.with_name(f"{name}.json"), len(run), len(feeds))
        for n, feed in enumerate(feeds):
            found.append(StoredRuns(feed, {name: run[n] for name, run in runs.items()}))
    return found


def stored_feeds(folder: Path) -> list[dict[str, np.ndarray]]:
    """All stored inputs of an artifact."""
    return [f for p in sorted((folder / COMPARISON).glob("*/inputs.json")) for f in load_feeds(p)]


def has_stored(folder: Path, runner: str) -> bool:
    """True if outputs of this run are stored in the artifact."""
    return any((folder / COMPARISON).glob(f"*/{runner}.json"))


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
        _check_count(path, len(outputs), len(feeds))
        found += [StoredPoint(f, o) for f, o in zip(feeds, outputs, strict=True)]
    if not found:
        missing = f"no outputs of {runner} are stored to compare with; pass --torch to run it"
        raise ArtifactError(f"{place or folder}: {missing}")
    return found
