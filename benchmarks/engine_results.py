"""The file that benchmarks/engines.py fills, stage by stage, and the tables made of it.

    {"runs": [{"date", "command", "machine"}], "rates": {GPU: rates},
     "results": [record], "floors": [record]}

A record is of one runner at one size: what was measured, or ``why`` it was not. A later one of the
same model, options, sizes, runner, precision, GPU and artifact takes its place. ``run`` is the
index of the run that it was measured in. ``options`` are those of the model as its authors wrote
it, which all artifacts of it share; what is made of an artifact (an engine, the naive engine, ONNX
Runtime, a floor) also has the ``artifact``'s folder and its ``own_options``; torch's have neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import floors

from pipeline.errors import InputError

KEY = ("model", "options", "sizes", "runner", "precision", "gpu")
# Which of torch's numbers an engine of a precision is held against
SAME_PRECISION = {
    "fp32": "torch in float32, tf32 off",
    "tf32": "torch with tf32 on",
    "fp16": "torch under autocast to float16 (the engine: TensorRT's fp16 flag)",
}
OURS = ("engine graph", "engine")
COLUMNS = ("eager", "compile", "autotune")
ORT_CLOCK = (
    "onnxruntime's times are by a wall clock around calls that wait for their results; the "
    "engine's and torch's are by CUDA events, without that wait."
)

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
        self.content["rates"][rates["gpu"]] = dict(rates)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
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
    return content


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
    """The records by GPU and model with its options."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in content["results"]:
        found.setdefault((record.get("gpu") or "no GPU", title(record)), []).append(record)
    return found


def title(record: Mapping[str, Any]) -> str:
    """``raft updates=12``."""
    return " ".join([record["model"], *record.get("options", ())])


def sizes_of(records: Iterable[Record]) -> list[dict[str, int]]:
    """The sizes in them, from small to large."""
    every = {json.dumps(r["sizes"]): r["sizes"] for r in records if r["sizes"] is not None}
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


def best_compiled(
    records: Sequence[Record], precision: str, sizes: Mapping[str, int]
) -> Record | None:
    """torch.compile's fastest at this precision, whatever its mode."""
    found = [
        find(records, runner=f"torch {kind}-{precision}", sizes=sizes)
        for kind in ("compile", "autotune")
    ]
    return min(filter(None, found), key=lambda r: float(r["median_ms"]), default=None)


def tables(content: Mapping[str, Any]) -> str:
    """All that was measured, as Markdown."""
    parts = []
    for (gpu, model), records in groups(content).items():
        rates = {**floors.RATES, **content["rates"].get(gpu, {})}
        precisions = [p for p in SAME_PRECISION if any(r["precision"] == p for r in records)]
        parts += [f"### {model}, {gpu}", ""]
        for precision in precisions:
            if not any(r["precision"] == precision and "median_ms" in r for r in records):
                continue
            parts += [f"{precision}, against {SAME_PRECISION[precision]}:", ""]
            parts += [_speed(content, records, model, precision, rates), ""]
            parts += [_rest(records, precision), ""]
        parts += [*_unmeasured(records), ""]
    return "\n".join([*parts, _runs(content)])


def _speed(
    content: Mapping[str, Any],
    records: Sequence[Record],
    model: str,
    precision: str,
    rates: Mapping[str, float],
) -> str:
    """Milliseconds (median, and p99 of the engine's), and the ratio to torch.compile's best."""
    lines = [
        "| sizes | artifact | floor | engine, CUDA graph | p99 | engine | naive ONNX | torch eager "
        "| torch.compile | max-autotune | best torch.compile / engine | engine / floor |",
        "|---|" + "---|" * 11,
    ]
    of_precision = [r for r in records if r["precision"] == precision]
    rows = [
        (sizes, artifact, text)
        for sizes in sizes_of(of_precision)
        for artifact, text in (
            artifacts_of(r for r in of_precision if r["sizes"] == sizes) or {None: "-"}
        ).items()
    ]
    for sizes, artifact, text in rows:
        work = floor_of(content, model, sizes, artifact)
        of = {"artifact": artifact, "precision": precision, "sizes": sizes}
        floor = floors.times(work["work"], precision, rates)["floor"] if work else None
        made = [find(records, runner=r, **of) for r in OURS]
        mine, best = next(filter(None, made), None), best_compiled(records, precision, sizes)
        naive = [find(records, runner=f"naive ONNX{more}", **of) for more in (" graph", "")]
        cells = [
            text,
            _number(floor),
            *map(_median, made),
            _median(next(filter(None, naive), None)),
            *(
                _median(find(records, runner=f"torch {k}-{precision}", sizes=sizes))
                for k in COLUMNS
            ),
            f"**{best['median_ms'] / mine['median_ms']:.2f}**" if mine and best else "-",
            f"{mine['median_ms'] / floor:.1f}" if mine and floor else "-",
        ]
        cells.insert(3, _number(mine["p99_ms"]) if mine else "-")
        lines.append(f"| {_words(sizes)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rest(records: Sequence[Record], precision: str) -> str:
    """Calls a second, memory, the distance to torch in float32, and what comes before."""
    lines = [
        "| sizes | artifact | runner | calls/s in flight | device memory | error "
        "| before the first result |",
        "|---|---|---|---|---|---|---|",
    ]
    of_precision = [r for r in records if r["precision"] == precision and "median_ms" in r]
    for sizes in sizes_of(of_precision):
        for record in (r for r in of_precision if r["sizes"] == sizes):
            memory = record.get("memory_bytes")
            error = record.get("error")
            apart = record.get("error_why") or ("-" if error is None else f"{error:.1e}")
            lines.append(
                f"| {_words(sizes)} | {label(record) or '-'} | {record['runner']} "
                f"| {record['calls_per_second']:.4g} "
                f"| {'-' if memory is None else f'{memory / 2**20:.0f} MiB'} "
                f"| {apart} | {_before(record)} |"
            )
    if any(record["runner"].startswith("onnxruntime") for record in of_precision):
        lines += ["", ORT_CLOCK]
    return "\n".join(lines)


def _before(record: Record) -> str:
    words = [
        f"{label} {record[name]:.1f} s"
        for label, name in (
            ("build", "build_s"),
            ("load", "load_s"),
            ("first call", "first_call_s"),
        )
        if record.get(name) is not None
    ]
    return ", ".join(words) or "-"


def _unmeasured(records: Sequence[Record]) -> list[str]:
    """One line for each runner that gave no number, and why."""
    lines = []
    for record in records:
        if record.get("why"):
            at = f" at {_words(record['sizes'])}" if record["sizes"] else ""
            of = f" of {label(record)}" if label(record) else ""
            what = f"{record['runner']}{of} ({record['precision']}){at}"
            lines.append(f"- {what}: {record['why']}")
    return list(dict.fromkeys(lines))


def _runs(content: Mapping[str, Any]) -> str:
    used = sorted({r["run"] for r in content["results"]})
    lines = []
    for n in used:
        run = content["runs"][n]
        machine = ", ".join(f"{k} {v}" for k, v in run["machine"].items() if v is not None)
        lines.append(f"- {run['date']}: `{run['command']}` ({machine})")
    return "\n".join(["Measured by:", "", *lines])


def _words(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{k}={v}" for k, v in sizes.items()) or "fixed"


def _median(record: Record | None) -> str:
    return _number(record["median_ms"] if record else None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
