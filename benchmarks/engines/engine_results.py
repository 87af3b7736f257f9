"""The results file of benchmarks/engines/engines.py, and joining several of them.

    {"runs": [{"date", "command", "machine"}], "rates": {GPU: rates},
     "results": [record], "floors": [record]}

A record belongs to one runner at one size. It has measurements, or ``why`` there are none. A later
record of the same model, options, sizes, runner, precision, GPU and artifact replaces it. ``run``
is the index of the record's run; rates have one, too.

``options`` are those of the model as its authors wrote it. All artifacts of the model share them.
``narrow`` is why the naive engine's file is not right at other sizes, empty if it is. ``unchecked``
is why that is not known.
A record of an artifact (an engine, the naive engine, ONNX Runtime, a floor) also has the
``artifact``'s folder and its ``own_options``. Records of torch have neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compact_json import compact
from gpu_rates import RATES, RATES_OF
from torch_baselines import VARIANTS

from pipeline.errors import InputError
from pipeline.spec.dims import sizes_text

KEY = ("model", "options", "sizes", "runner", "precision", "gpu")
# a part of the norm of torch's outputs; a larger difference means a fault or other weights
APART = 0.05
# torch.compile's modes with CUDA graphs; the default mode has none
WITH_GRAPHS = ("reduce-overhead", "max-autotune")
NAIVE = "naive "
# characters of a line; a record has one line, and a floor has a few
WIDTH = 1000
Record = dict[str, Any]
Whose = tuple[str, tuple[str, ...]] | None


class Results:
    """The file. Every change is written at once, so that an interrupted run loses nothing."""

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
    """The content of a results file.

    Raises:
        InputError: The file does not exist, or is not a results file.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Make it with `engines.py run`") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from None
    parts = {"runs": list, "rates": dict, "results": list, "floors": list}
    if not isinstance(content, dict) or any(
        not isinstance(content.get(name), kind) for name, kind in parts.items()
    ):
        raise InputError(f"{path}: not a results file of `engines.py run`")
    runs = content["runs"]
    numbers = [r.get("run") for r in [*content["results"], *content["floors"]]]
    numbers += [r["run"] for r in content["rates"].values() if "run" in r]  # older files lack it
    if any("date" not in run for run in runs) or not {*numbers} <= {*range(len(runs))}:
        raise InputError(f"{path}: records whose run is not in the file, or runs without a date")
    return content


def join(paths: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """The content of several files, as if one file had all the measurements.

    Returns:
        The content, with the runs in the order of their dates. Also a line for each record that two
        files have: the record of the later run is used (at the same date: of the later file).

    Raises:
        InputError: See `read`.
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
        if run not in runs:  # a file and an older copy share runs
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
            before = taken.pop(
                key, None
            )  # moves the record to the end, because later records are last
            if before is not None and before[0] != record:
                dates = [f"{p} ({runs[r['run']]['date']})" for r, p in ((record, path), before)]
                said.append(f"{_what(record, part)}: taken from {dates[0]}, not from {dates[1]}")
            taken[key] = record, path
        kept = [record for record, _ in taken.values()]
        content[part] = {r["gpu"]: r for r in kept} if part == "rates" else kept
    return content, said


def _what(record: Mapping[str, Any], part: str) -> str:
    """The subject of a record, as text."""
    if part == "rates":
        return f"rates of {record['gpu']}"
    sizes = "all sizes" if record.get("sizes") is None else sizes_text(record["sizes"]) or "fixed"
    runner = "floor" if part == "floors" else f"{record['precision']} {record['runner']}"
    of = f" of {label(record)}" if label(record) else ""
    return f"{title(record)}, {sizes}: {runner}{of}"


def rates_of(content: Mapping[str, Any], gpu: str) -> dict[str, Any] | None:
    """A GPU's rates: measured on this GPU, or known of its kind."""
    if gpu in content["rates"]:
        return {**content["rates"][gpu]}
    return {**RATES} if gpu == RATES_OF else None


def _key(record: Mapping[str, Any]) -> str:
    return json.dumps([*(record.get(name) for name in KEY), whose(record)], sort_keys=True)


def whose(record: Mapping[str, Any]) -> Whose:
    """The artifact of a record: its folder and options; None for torch."""
    if "artifact" not in record or str(record.get("runner")).startswith("torch"):
        return None
    return record["artifact"], tuple(record.get("own_options", ()))


def label(record: Mapping[str, Any]) -> str:
    """``raft-tf32 (update=split)``: the artifact, and the options that only the artifact has."""
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
    """The records by GPU and model with its options. The groups of one GPU follow each other."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in content["results"]:
        found.setdefault((record.get("gpu") or "no GPU", title(record)), []).append(record)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def title(record: Mapping[str, Any]) -> str:
    """``raft updates=12``."""
    return " ".join([record["model"], *record.get("options", ())])


def sizes_of(records: Iterable[Record]) -> list[dict[str, int]]:
    """The sizes in the records, from small to large."""
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
    """The measured record of an artifact (None: torch) with these values, if there is one."""
    for record in records:
        mine = "median_ms" in record and whose(record) == artifact
        if mine and all(record.get(k) == v for k, v in want.items()):
            return record
    return None


def floor_of(
    content: Mapping[str, Any], model: str, sizes: Mapping[str, int], artifact: Whose
) -> Record | None:
    """The floor of an artifact's model, or of another artifact with the same options.

    Without an artifact: the floor with the fewest operations of any form of the model.
    """
    of_model = [f for f in content["floors"] if title(f) == model and f["sizes"] == sizes]
    if artifact is None:
        return min(of_model, key=lambda f: float(f["work"]["operations"]), default=None)
    same = [f for f in of_model if (whose(f) or ("", ()))[1] == artifact[1]]
    return next((f for f in same if whose(f) == artifact), same[0] if same else None)


def apart(record: Mapping[str, Any]) -> bool:
    """True if the outputs are known to differ from those of torch in float32."""
    error = record.get("error")
    return bool(record.get("error_why")) or (error is not None and not error <= APART)


def fastest(records: Iterable[Record | None]) -> Record | None:
    """The fastest of these records, without those that compute something else, if any is left."""
    found = [record for record in records if record is not None]
    right = [record for record in found if not apart(record)]
    return min(right or found, key=lambda r: float(r["median_ms"]), default=None)


def fastest_torch(
    records: Sequence[Record], precision: str, sizes: Mapping[str, int]
) -> Record | None:
    """torch's fastest right way at this precision: any mode, and in half both ways to be half."""
    return fastest(
        find(records, runner=f"torch {name}", sizes=sizes)
        for name, variant in VARIANTS.items()
        if variant.precision == precision
    )


def fastest_naive(
    records: Sequence[Record], precision: str, sizes: Mapping[str, int], artifact: Whose
) -> Record | None:
    """The artifact's fastest right naive engine of any exporter; first those right at all sizes."""
    found = (r for r in records if r["runner"].startswith(NAIVE) and r["precision"] == precision)
    here = [r for r in found if find([r], artifact, sizes=sizes)]
    wide = [r for r in here if not (r.get("narrow") or r.get("unchecked") or apart(r))]
    return fastest(wide or here)
