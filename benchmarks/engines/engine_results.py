"""The file that benchmarks/engines/engines.py fills, stage by stage, and several of them joined.

    {"runs": [{"date", "command", "machine"}], "rates": {GPU: rates},
     "results": [record], "floors": [record]}

A record is of one runner at one size: what was measured, or ``why`` it was not. A later one of the
same model, options, sizes, runner, precision, GPU and artifact takes its place. ``run`` is the
index of the run that it was measured in; rates have one, too. ``options`` are those of the model
as its authors wrote it, which all artifacts of it share; what is made of an artifact (an engine,
the naive engine, ONNX Runtime, a floor) also has the ``artifact``'s folder and its
``own_options``; torch's have neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compact_json import compact
from gpu_rates import RATES, RATES_OF

from pipeline.errors import InputError
from pipeline.spec.dims import sizes_text

KEY = ("model", "options", "sizes", "runner", "precision", "gpu")
# Of the norm of torch's outputs: what is further off computes something else, or other weights
APART = 0.05
# torch.compile's modes with CUDA graphs; `compile`, its default mode, has none
WITH_GRAPHS = ("graphs", "autotune")
# Of a line of the file: a record has one line, a count of a model's operations a few
WIDTH = 1000
Record = dict[str, Any]
Whose = tuple[str, tuple[str, ...]] | None


class Results:
    """The file; every change is written at once, so that an interrupted run loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"runs": [], "rates": {}, "results": [], "floors": []}
        if path.is_file():
            self.content.update(read(path))

    def begin(self, run: Mapping[str, Any]) -> None:
        self.content["runs"].append(dict(run))
        self._write()

    def add(self, record: Mapping[str, Any], where: str = "results") -> None:
        new = {**record, "run": len(self.content["runs"]) - 1}
        kept = [old for old in self.content[where] if _key(old) != _key(new)]
        self.content[where] = [*kept, new]
        self._write()

    def add_rates(self, rates: Mapping[str, Any]) -> None:
        self.content["rates"][rates["gpu"]] = {**rates, "run": len(self.content["runs"]) - 1}
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(compact(self.content, WIDTH))
        beside.replace(self.path)


def read(path: Path) -> dict[str, Any]:
    """What such a file holds.

    Raises:
        InputError: it is not there, or holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: not there; make it with `engines.py run`") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from None
    parts = {"runs": list, "rates": dict, "results": list, "floors": list}
    if not isinstance(content, dict) or any(
        not isinstance(content.get(name), kind) for name, kind in parts.items()
    ):
        raise InputError(f"{path}: not a file that `engines.py run` wrote")
    runs = content["runs"]
    numbers = [r.get("run") for r in [*content["results"], *content["floors"]]]
    numbers += [r["run"] for r in content["rates"].values() if "run" in r]  # older files have none
    if any("date" not in run for run in runs) or not {*numbers} <= {*range(len(runs))}:
        raise InputError(f"{path}: records whose run is not in the file, or runs without a date")
    return content


def join(paths: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """What several files hold, as if all had been measured into one.

    Returns:
        The content, its runs in the order of their dates; and a line for each record that two
        files have: the one of the later run is taken (at the same moment: of the later file).

    Raises:
        InputError: as for `read`.
    """
    files = [(path, read(path)) for path in paths]
    every = [(run["date"], path, n) for path, file in files for n, run in enumerate(file["runs"])]
    order = sorted(range(len(every)), key=lambda n: str(every[n][0]))
    runs: list[dict[str, Any]] = []
    place: dict[tuple[Path, int], int] = {}
    held = dict(files)
    for n in order:
        _, path, index = every[n]
        run = held[path]["runs"][index]
        if run not in runs:  # a file and an older copy of it share theirs
            runs.append(run)
        place[path, index] = runs.index(run)
    content: dict[str, Any] = {"runs": runs, "rates": {}, "results": [], "floors": []}
    said: list[str] = []
    for part in ("results", "floors", "rates"):
        found = []
        for path, file in files:
            records = file[part]
            if part == "rates":
                records = [{**rates, "gpu": gpu} for gpu, rates in records.items()]
            last = len(file["runs"]) - 1
            found += [({**r, "run": place[path, r.get("run", last)]}, path) for r in records]
        taken: dict[str, tuple[Record, Path]] = {}
        for record, path in sorted(found, key=lambda pair: int(pair[0]["run"])):
            key = record["gpu"] if part == "rates" else _key(record)
            before = taken.pop(key, None)  # back to the end: later ones stand behind
            if before is not None and before[0] != record:
                dates = [f"{p} ({runs[r['run']]['date']})" for r, p in ((record, path), before)]
                said.append(f"{_what(record, part)}: taken from {dates[0]}, not from {dates[1]}")
            taken[key] = record, path
        kept = [record for record, _ in taken.values()]
        content[part] = {r["gpu"]: r for r in kept} if part == "rates" else kept
    return content, said


def _what(record: Mapping[str, Any], part: str) -> str:
    """What a record is of, for a reader."""
    if part == "rates":
        return f"rates of {record['gpu']}"
    sizes = "all sizes" if record.get("sizes") is None else sizes_text(record["sizes"]) or "fixed"
    runner = "floor" if part == "floors" else f"{record['precision']} {record['runner']}"
    of = f" of {label(record)}" if label(record) else ""
    return f"{title(record)}, {sizes}: {runner}{of}"


def rates_of(content: Mapping[str, Any], gpu: str) -> dict[str, Any] | None:
    """A GPU's rates: those measured on it, or those that are known of its kind."""
    if gpu in content["rates"]:
        return {**content["rates"][gpu]}
    return {**RATES} if gpu == RATES_OF else None


def _key(record: Mapping[str, Any]) -> str:
    return json.dumps([*(record.get(name) for name in KEY), whose(record)], sort_keys=True)


def whose(record: Mapping[str, Any]) -> Whose:
    """The artifact that a record is of: its folder and options; None of torch's."""
    if "artifact" not in record or str(record.get("runner")).startswith("torch"):
        return None
    return record["artifact"], tuple(record.get("own_options", ()))


def label(record: Mapping[str, Any]) -> str:
    """``raft-tf32 (update=split)``: the artifact, and its options that are not the model's."""
    artifact = whose(record)
    if artifact is None:
        return ""
    name, own = artifact
    more = " ".join(text for text in own if text not in record.get("options", ()))
    return f"{name} ({more})" if more else name


def artifacts_of(records: Iterable[Record]) -> dict[Whose, str]:
    """The artifacts that were measured, with their labels."""
    found = {whose(r): label(r) for r in records if "median_ms" in r}
    return {artifact: text for artifact, text in found.items() if artifact is not None}


def groups(content: Mapping[str, Any]) -> dict[tuple[str, str], list[Record]]:
    """The records by GPU and model with its options; one GPU's stand together."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in content["results"]:
        found.setdefault((record.get("gpu") or "no GPU", title(record)), []).append(record)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def title(record: Mapping[str, Any]) -> str:
    """``raft updates=12``."""
    return " ".join([record["model"], *record.get("options", ())])


def sizes_of(records: Iterable[Record]) -> list[dict[str, int]]:
    """The sizes in them, from small to large."""
    every = {
        json.dumps(r["sizes"], sort_keys=True): r["sizes"]
        for r in records
        if r["sizes"] is not None
    }
    return sorted(every.values(), key=lambda sizes: (extent(sizes), list(sizes.values())))


def extent(sizes: Mapping[str, int]) -> int:
    """The product of the sizes (an empty cache counts as 1)."""
    product = 1
    for size in sizes.values():
        product *= max(size, 1)
    return product


def find(records: Iterable[Record], artifact: Whose = None, **want: Any) -> Record | None:
    """The measured record of an artifact (None: torch's) that has these values, if there is one."""
    for record in records:
        mine = "median_ms" in record and whose(record) == artifact
        if mine and all(record.get(k) == v for k, v in want.items()):
            return record
    return None


def floor_of(
    content: Mapping[str, Any], model: str, sizes: Mapping[str, int], artifact: Whose
) -> Record | None:
    """What was counted of an artifact's model, or of another of the same options; without an
    artifact, the fewest operations that any form of the model has."""
    of_model = [f for f in content["floors"] if title(f) == model and f["sizes"] == sizes]
    if artifact is None:
        return min(of_model, key=lambda f: float(f["work"]["operations"]), default=None)
    same = [f for f in of_model if (whose(f) or ("", ()))[1] == artifact[1]]
    return next((f for f in same if whose(f) == artifact), same[0] if same else None)


def apart(record: Mapping[str, Any]) -> bool:
    """True where it is known to compute something else than torch in float32."""
    error = record.get("error")
    return bool(record.get("error_why")) or (error is not None and not error <= APART)


def best_compiled(
    records: Sequence[Record], precision: str, sizes: Mapping[str, int]
) -> Record | None:
    """torch.compile's fastest at this precision, whatever its mode."""
    found = [
        find(records, runner=f"torch {kind}-{precision}", sizes=sizes)
        for kind in ("compile", *WITH_GRAPHS)
    ]
    return min(filter(None, found), key=lambda r: float(r["median_ms"]), default=None)
