"""Plots latency against size, one picture a model, from results of benchmarks/engines/engines.py.

    python benchmarks/engines/plot.py RESULTS.json... --out docs/results

Several files are joined, as in `engines.py table`. Needs matplotlib (the extra `bench`).

A panel is a precision. A precision without an engine has no panel if another precision has an
engine. A line is a runner, or a runner of one artifact if there are several. A runner with one size
is a point. The black line is the lowest floor, if it was counted.

The size is the product of the dims that change (pixels, or the batch). Both axes are logarithmic. A
model with one size has bars.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import floors
from engine_results import (
    Record,
    apart,
    extent,
    find,
    groups,
    join,
    label,
    rates_of,
    sizes_of,
    title,
    whose,
)
from engine_tables import RUNNERS, SAME_PRECISION

from pipeline.errors import InputError, PipelineError
from pipeline.spec.dims import sizes_text

COLOURS = {
    "engine graph": "C0", "engine": "C9", "naive dynamo graph": "C4",
    "naive torchscript graph": "C6", "naive torchscript-17 graph": "C6",
    "onnxruntime CUDA": "C5", "torch eager": "C7",
    "torch compile": "C1", "torch graphs": "C2", "torch autotune": "C3", "torch half-graphs": "C8",
}  # fmt: skip
WORDS = {
    "engine graph": "engine, CUDA graph", "torch compile": "torch.compile, no CUDA graphs",
    "torch graphs": "torch.compile, CUDA graphs",
    "torch autotune": "torch.compile, max-autotune",
    "torch half-graphs": "torch.compile, CUDA graphs, .half()",
    "naive dynamo graph": "naive engine, CUDA graph",
    "naive torchscript graph": "naive engine (older exporter), CUDA graph",
    "naive torchscript-17 graph": "naive engine (older exporter, opset 17), CUDA graph",
}  # fmt: skip
MARKERS = "os^Dv*"

Sizes = Mapping[str, int]
Series = dict[tuple[str, str], list[tuple[Sizes, float]]]


def series(records: Sequence[Record]) -> Series:
    """The (sizes, median in ms) of each (runner, precision), from small to large.

    ``: artifact`` follows the runner if several artifacts have measurements in that precision.
    """
    found: Series = {}
    records = [r for r in records if not apart(r)]
    sizes = sizes_of(records)
    measured = {
        (r["runner"], r["precision"], whose(r)): label(r) for r in records if "median_ms" in r
    }
    several = Counter((runner, precision) for runner, precision, _ in measured)
    for (runner, precision, artifact), text in measured.items():
        line = []
        for at in sizes:
            record = find(records, artifact, runner=runner, precision=precision, sizes=at)
            if record is not None:
                line.append((at, float(record["median_ms"])))
        name = runner.removesuffix(f"-{precision}")
        more = f": {text}" if several[runner, precision] > 1 else ""
        found[name + more, precision] = line
    return found


def floor_series(
    content: Mapping[str, Any], gpu: str, model: str, precision: str, sizes: Sequence[Sizes]
) -> list[tuple[Sizes, float]]:
    """The floors at the counted sizes of these. If artifacts differ, the lowest floor."""
    rates = rates_of(content, gpu)
    if rates is None:
        return []
    found = []
    for at in sizes:
        counted = [f for f in content["floors"] if title(f) == model and f["sizes"] == at]
        ms = [floors.times(f["work"], precision, rates)["floor"] for f in counted]
        if ms:
            found.append((at, min(ms)))
    return found


def panels(lines: Series) -> dict[str, Series]:
    """The precisions to draw: those with a measured artifact, or all if there is none."""
    of = {p: {key: line for key, line in lines.items() if key[1] == p} for p in SAME_PRECISION}
    ours = {p for (runner, p) in lines if not runner.startswith("torch")}
    return {p: found for p, found in of.items() if found and (p in ours or not ours)}


def changing(sizes: Sequence[Sizes]) -> list[str]:
    """The dims that differ between the sizes."""
    return [name for name in sizes[0] if len({at.get(name) for at in sizes}) > 1]


def places(sizes: Sequence[Sizes]) -> tuple[dict[str, float], str, bool]:
    """The position of each size on the axis, the axis label, and whether it is logarithmic.

    The position is the product of the dims that change. If two sizes have the same product, the
    sizes follow each other at equal distances.
    """
    names = changing(sizes)
    products = [extent({n: at[n] for n in names}) for at in sizes]
    if names and len(set(products)) == len(products):
        fixed = ", ".join(f"{k}={v}" for k, v in sizes[0].items() if k not in names)
        name = " x ".join(names) + (f"  ({fixed})" if fixed else "")
        return {sizes_text(at): float(n) for at, n in zip(sizes, products, strict=True)}, name, True
    return {sizes_text(at): float(n) for n, at in enumerate(sizes)}, "sizes", False


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes one PNG for each model and GPU. Returns the paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {key: panels(series(records)) for key, records in groups(content).items()}
    drawn = {key: found for key, found in drawn.items() if found}
    names = file_names(list(drawn))
    written = []
    for (gpu, model), found in drawn.items():
        every = [at for lines in found.values() for line in lines.values() for at, _ in line]
        sizes = sizes_of([{"sizes": at} for at in every])
        bars = max(map(len, found.values())) + 1
        figure, all_axes = plt.subplots(
            1, len(found), squeeze=False, layout="constrained",
            figsize=(1.2 + 4.4 * len(found), 4.4 if len(sizes) > 1 else 1.3 + 0.35 * bars),
            sharey=len(sizes) > 1, sharex=len(sizes) == 1,
        )  # fmt: skip
        for axes, (precision, lines) in zip(all_axes[0], found.items(), strict=True):
            floor = floor_series(content, gpu, model, precision, sizes)
            if len(sizes) > 1:
                _lines(axes, lines, floor, sizes)
            else:
                _bars(axes, lines, floor)
            axes.set_title(precision, fontsize=10)
        if len(sizes) > 1:
            all_axes[0][0].set_ylabel("median latency, ms")
            kinds = {
                text: handle
                for axes in all_axes[0]
                for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            figure.legend(
                kinds.values(), kinds, loc="outside lower center", fontsize=8,
                ncols=min(len(kinds), 2 * len(found)), frameon=False,
            )  # fmt: skip
        at = f", {sizes_text(sizes[0]) or 'fixed sizes'}" if len(sizes) == 1 else ""
        figure.suptitle(f"{model.partition(' ')[0]}{at} on {gpu}", fontsize=11)
        place = folder / names[gpu, model]
        figure.savefig(place, dpi=110)
        plt.close(figure)
        written.append(place)
    return written


def _ordered(lines: Series) -> list[tuple[str, str, list[tuple[Sizes, float]]]]:
    """(kind of runner, artifact if there are several, line), in the order of the tables."""
    found = [(*runner.partition(": ")[::2], line) for (runner, _), line in lines.items()]
    known = {kind: n for n, kind in enumerate(RUNNERS)}
    return sorted(found, key=lambda one: (known.get(one[0], len(known)), one[1]))


def _called(kind: str, artifact: str) -> str:
    return WORDS.get(kind, kind) + (f": {artifact}" if artifact else "")


def _lines(
    axes: Any, lines: Series, floor: Sequence[tuple[Sizes, float]], sizes: Sequence[Sizes]
) -> None:
    place, name, logarithmic = places(sizes)
    artifacts = sorted({artifact for _, artifact, _ in _ordered(lines)})

    def plot(line: Sequence[tuple[Sizes, float]], **how: Any) -> None:
        axes.plot([place[sizes_text(at)] for at, _ in line], [ms for _, ms in line], **how)

    for kind, artifact, line in _ordered(lines):
        plot(
            line, markersize=5, linewidth=1.6, color=COLOURS.get(kind, "C8"),
            marker=MARKERS[artifacts.index(artifact) % len(MARKERS)], label=_called(kind, artifact),
        )  # fmt: skip
    if floor:
        plot(floor, color="black", linewidth=1, linestyle=":", marker=".", label="floor")
    axes.set(yscale="log", xlabel=name)
    if logarithmic:
        axes.set_xscale("log")
    names = changing(sizes)
    texts = ["x".join(str(at[n]) for n in names or at) for at in sizes]
    axes.set_xticks([place[sizes_text(at)] for at in sizes], texts, rotation=30, ha="right")
    axes.set_xticks([], minor=True)
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(_few)
    axes.grid(True, which="both", linewidth=0.3)


def _few(value: float, _: int) -> str:
    """Labels between the powers of ten: at 2, 3 and 5 only."""
    return f"{value:g}" if f"{value:e}"[0] in "235" else ""


def _bars(axes: Any, lines: Series, floor: Sequence[tuple[Sizes, float]]) -> None:
    rows = [(_called(k, a), line[0][1], COLOURS.get(k, "C8")) for k, a, line in _ordered(lines)]
    rows += [("floor", ms, "black") for _, ms in floor]
    texts, values, colours = zip(*rows, strict=True)
    bars = axes.barh(range(len(rows)), values, color=colours, height=0.6)
    axes.bar_label(bars, [f"{v:#.3g}".rstrip(".") for v in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), texts, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("median latency, ms")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def file_names(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """``engines-raft.png``. Options or the GPU are added only if the names would be equal."""
    models = Counter(model.partition(" ")[0] for model in {model for _, model in keys})
    found = {}
    for gpu, model in keys:
        name = model.partition(" ")[0]
        words = [model if models[name] > 1 else name]
        words += [gpu] if len({gpu for gpu, _ in keys}) > 1 else []
        text = "-".join(words).replace("=", "")
        found[gpu, model] = f"engines-{re.sub(r'[^A-Za-z0-9_.-]+', '-', text)}.png"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="DIR")
    arguments = parser.parse_args()
    try:
        content, said = join(arguments.results)
        for line in said:
            print(line, file=sys.stderr)
        written = draw(content, arguments.out)
        if not written:
            where = ", ".join(map(str, arguments.results))
            raise InputError(f"{where}: no measurements, so there is no picture")
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
