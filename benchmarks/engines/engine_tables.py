"""The measurements of benchmarks/engines/engines.py as Markdown tables.

Times are milliseconds, and memory is MiB (2**20 bytes), as in `pipeline bench`. A column without
measurements is left out. The tables name the parts of the machine, but no folders.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import floors
from engine_results import (
    APART,
    NAIVE,
    WITH_GRAPHS,
    Record,
    apart,
    artifacts_of,
    fastest,
    fastest_naive,
    fastest_torch,
    find,
    floor_of,
    groups,
    label,
    rates_of,
    sizes_of,
    whose,
)
from torch_baselines import KINDS, VARIANTS

from pipeline.spec.dims import sizes_text

# the torch results that an engine of each precision is compared with
SAME_PRECISION = {
    "fp32": "torch in float32, tf32 off",
    "tf32": "torch with tf32 on",
    "fp16": "torch in float16, by autocast or `.half()` (the engine: `--precision fp16`)",
}
OURS = ("engine graph", "engine")
RUNNERS = (
    *OURS, NAIVE, "onnxruntime CUDA",
    *(f"torch {half}{kind}" for half in ("", "half-") for kind in KINDS),
)  # fmt: skip
ORT_CLOCK = (
    "onnxruntime's times are by a wall clock around calls that wait for their results; the "
    "engine's and torch's are by CUDA events, without that wait."
)
NO_GRAPHS_NOTE = (
    "Here torch.compile ran in its default mode, without CUDA graphs. Its modes with CUDA graphs "
    "were not measured, so the ratio is not to torch's fastest mode."
)
APART_NOTE = (
    f"no ratio: outputs are off torch's in float32 by more than {APART:.0%} of their norm, or of "
    "another shape, or not finite. They are wrong, or of other weights (another torch draws other "
    "random ones)."
)
NARROW = {
    "narrow": "the naive engine's file is not right at all sizes, so its engine may do less",
    "unchecked": "the naive engine's file was not run at other sizes",
}
# options that name places on a machine; each has a value
_PLACES = ("--torch-python", "--torch-path", "--reference", "--json")
# top folders of machines; other paths have a meaning, such as those in TensorRT's layer names
_ROOTS = r"home|root|tmp|usr|opt|var|mnt|srv|data|work|workspace|media|private|Users|Volumes"
_FOLDERS = re.compile(rf"(?<![\w./-])/(?:{_ROOTS})/(?:[^\s/'\":,;()]+/)*(?=[^\s/'\":,;()])")


def tables(content: Mapping[str, Any]) -> str:
    """All measurements, with a part for each GPU and model."""
    parts: list[str] = []
    used: set[str] = set()
    for (gpu, model), records in groups(content).items():
        rates = rates_of(content, gpu)
        parts += [f"### {model}, {gpu}", ""]
        for precision, torch in SAME_PRECISION.items():
            of_precision = [r for r in records if r["precision"] == precision]
            if not any("median_ms" in r for r in of_precision):
                continue
            speed, floor = _speed(content, of_precision, model, precision, rates)
            used |= {gpu} if floor else set()
            parts += [f"{precision}, against {torch}; median milliseconds:", "", speed, ""]
            off = {label(r) or r["runner"] for r in of_precision if "median_ms" in r and apart(r)}
            parts += [line for name in sorted(off) for line in (f"{name}: {APART_NOTE}", "")]
            narrow = {
                f"{r['runner'].removesuffix(' graph')} of {label(r)}: {what} "
                f"({_without_folders(r[key])})."
                for r in of_precision
                for key, what in NARROW.items()
                if r.get(key)
            }
            parts += [line for said in sorted(narrow) for line in (said, "")]
            parts += [_rest(of_precision), ""]
        unmeasured = _unmeasured(records)
        parts += [*unmeasured, ""] if unmeasured else []
    parts += [line for gpu in sorted(used) for line in (_rates(content, gpu), "")]
    return "\n".join([*parts, _runs(content)])


def _speed(
    content: Mapping[str, Any],
    records: Sequence[Record],
    model: str,
    precision: str,
    rates: Mapping[str, Any] | None,
) -> tuple[str, bool]:
    """The table of times, with the ratios to torch's fastest way and to the naive engine.

    A column of torch has the faster of autocast and `.half()`.

    Returns:
        The table, and whether it has a floor.
    """
    header = (
        "sizes", "artifact", "floor", "engine, CUDA graph", "engine", "naive engine",
        "onnxruntime", "torch eager", "torch.compile, no CUDA graphs",
        "torch.compile, CUDA graphs", "max-autotune", "torch's fastest",
        "torch's fastest / engine", "naive / engine", "engine / floor",
    )  # fmt: skip
    rows, floored, slow = [], False, False
    for sizes in sizes_of(records):
        here = artifacts_of(r for r in records if r["sizes"] == sizes)
        for artifact, text in (here or {None: "-"}).items():
            work = floor_of(content, model, sizes, artifact) if rates else None
            of = {"artifact": artifact, "sizes": sizes}
            floor = (
                floors.times(work["work"], precision, rates)["floor"] if work and rates else None
            )
            floored |= floor is not None
            made = [find(records, runner=r, **of) for r in OURS]
            mine, best = next(filter(None, made), None), fastest_torch(records, precision, sizes)
            naive = fastest_naive(records, precision, sizes, artifact)
            torch = {kind: _of_kind(records, kind, precision, sizes) for kind in KINDS}
            ort = find(records, runner="onnxruntime CUDA", **of)
            ratio = _ratio(best, mine)
            graphs = [torch[kind] for kind, (_, mode) in KINDS.items() if mode in WITH_GRAPHS]
            slow |= ratio != "-" and not any(graphs)
            others = [naive, ort, *torch.values()]
            rows.append(
                (
                    sizes_text(sizes) or "fixed", text, _number(floor),
                    *map(_median, [*made, *others]),
                    best["runner"].removeprefix("torch ") if best else "-",
                    ratio, _ratio(naive, mine),
                    f"{mine['median_ms'] / floor:.1f}"
                    if mine and floor and not apart(mine) else "-",
                )
            )  # fmt: skip
    return _markdown(header, rows) + (f"\n\n{NO_GRAPHS_NOTE}" if slow else ""), floored


def _of_kind(
    records: Sequence[Record], kind: str, precision: str, sizes: Mapping[str, int]
) -> Record | None:
    """torch's record of this kind, in half precision the faster of the two ways."""
    names = [f"{half}{kind}-{precision}" for half in ("", "half-")]
    return fastest(find(records, runner=f"torch {n}", sizes=sizes) for n in names if n in VARIANTS)


def _ratio(best: Record | None, mine: Record | None) -> str:
    """The other's time divided by the engine's, if both compute the same."""
    if best is None or mine is None:
        return "-"
    for record, name in ((mine, ""), (best, f"{best['runner'].split()[0]} ")):
        if apart(record):
            error = record.get("error")
            return f"{name}{record.get('error_why') or f'off by {error:.1e}'}"
    ratio = _number(best["median_ms"] / mine["median_ms"])
    known = all(r.get("error") is not None for r in (mine, best))
    if best.get("narrow"):
        return f"{ratio} (not at all sizes)"
    if best.get("unchecked"):
        return f"{ratio} (other sizes not checked)"
    return f"**{ratio}**" if known else f"{ratio} (outputs not compared)"


def _rest(records: Sequence[Record]) -> str:
    """The table of all other numbers.

    These are the 99th percentile, calls a second, memory, the distance to torch in float32, and the
    time before the first result.
    """
    header = (
        "sizes", "artifact", "runner", "p99 ms", "calls/s in flight", "GPU memory", "error",
        "before the first result",
    )  # fmt: skip
    measured = [r for r in records if "median_ms" in r]
    rows = []
    for sizes in sizes_of(measured):
        at = [r for r in measured if r["sizes"] == sizes]
        for record in sorted(at, key=lambda r: (label(r) == "", label(r), _rank(r))):
            error = record.get("error")
            rows.append(
                (
                    sizes_text(sizes) or "fixed", label(record) or "-", record["runner"],
                    _number(record["p99_ms"]), f"{record['calls_per_second']:.4g}",
                    _memory(record.get("memory_bytes")),
                    record.get("error_why") or ("-" if error is None else f"{error:.1e}"),
                    _before(record),
                )
            )  # fmt: skip
    clock = any(record["runner"].startswith("onnxruntime") for record in measured)
    return _markdown(header, rows) + (f"\n\n{ORT_CLOCK}" if clock else "")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without its empty columns."""
    kept = [n for n in range(len(header)) if any(row[n] != "-" for row in rows)]
    table = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row[n] for n in kept) + " |" for row in table)


def _rank(record: Record) -> int:
    kinds = [n for n, kind in enumerate(RUNNERS) if record["runner"].startswith(kind)]
    return kinds[0] if kinds else len(RUNNERS)


def _memory(nbytes: int | None) -> str:
    """A value below zero is no measurement: another process freed memory meanwhile."""
    return "-" if nbytes is None or nbytes < 0 else f"{nbytes / 2**20:.0f} MiB"


def _before(record: Record) -> str:
    stages = (("build", "build_s"), ("load", "load_s"), ("first call", "first_call_s"))
    words = [f"{what} {record[n]:.1f} s" for what, n in stages if record.get(n) is not None]
    return ", ".join(words) or "-"


def _unmeasured(records: Sequence[Record]) -> list[str]:
    """A line for each runner without a measurement, with the reason, unless a later run has one."""
    lines = []
    for record in records:
        if not record.get("why") or any(_mends(later, record) for later in records):
            continue
        at = f" at {sizes_text(record['sizes'])}" if record["sizes"] else ""
        of = f" of {label(record)}" if label(record) else ""
        what = f"{record['runner']}{of} ({record['precision']}){at}"
        lines.append(f"- {what}: {_without_folders(record['why'])}")
    return list(dict.fromkeys(lines))


def _mends(later: Record, failed: Record) -> bool:
    """True if a later run measured a part that had failed."""
    return (
        failed["sizes"] is None
        and "median_ms" in later
        and later["run"] > failed["run"]
        and later["precision"] == failed["precision"]
        and whose(later) == whose(failed)
        and str(later["runner"]).startswith(failed["runner"])
    )


def _rates(content: Mapping[str, Any], gpu: str) -> str:
    rates = rates_of(content, gpu)
    assert rates is not None
    products = ", ".join(f"{p} {_number(rates[p] / 1e12)} TFLOP/s" for p in SAME_PRECISION)
    how = "measured" if gpu in content["rates"] else "not measured in these runs"
    memory = f"{_number(rates['bandwidth'] / 1e12)} TB/s"
    return f"Floors are by these rates of {gpu} ({how}): {products}, memory {memory}."


def _runs(content: Mapping[str, Any]) -> str:
    """The commands, by the machine of each."""
    measured = {n for part in ("results", "floors") for n in (r["run"] for r in content[part])}
    measured |= {rates["run"] for rates in content["rates"].values() if "run" in rates}
    lines: dict[str, list[str]] = {}
    for n in sorted(measured):
        run = content["runs"][n]
        machine = {k: v for k, v in run["machine"].items() if v is not None}
        python = f", Python {machine.pop('python')}" if "python" in machine else ""
        where = ", ".join(f"{k} {v}" for k, v in machine.items())
        line = f"- {_date(run['date'])}{python}: `{short(run['command'])}`"
        lines.setdefault(where, []).append(line)
    parts = [[f"Measured with {where}:", "", *told, ""] for where, told in lines.items()]
    return "\n".join(line for part in parts for line in part).rstrip()


def _date(text: str) -> str:
    """``2026-11-22 00:39 UTC``; another text stays the same."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").rstrip()
    return text


def short(command: str) -> str:
    """A command without the options that only name places on a machine.

    Other paths are shortened to their last part.
    """
    words = shlex.split(command)
    kept: list[str] = []
    skip = False
    for word in words:
        name = word.partition("=")[0]
        if skip or name in _PLACES:
            skip = not skip and name == word  # the value is the next word
            continue
        own = word.startswith("benchmarks/")
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        kept.append(word if own or "/" not in value else flag + equals + _last(value))
    return shlex.join(kept)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _without_folders(text: str) -> str:
    """A reason in which a machine's paths are shortened to their last part."""
    return _FOLDERS.sub("", text)


def _median(record: Record | None) -> str:
    return _number(record["median_ms"] if record else None)


def _number(value: float | None) -> str:
    """Three digits, including zeros; a whole number from 100 on."""
    return (
        "-" if value is None else f"{value:#.3g}".rstrip(".") if value < 99.95 else f"{value:.0f}"
    )
