"""Latency against size, a picture a model, of what benchmarks/engines.py measured.

    python benchmarks/plot.py RESULTS.json --out docs

Needs matplotlib (the extra `bench`). Both axes are logarithmic; a line is a runner at a precision,
of one artifact where there are several; the least floor is drawn where it was counted. A runner
that was measured at one size is a point.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import floors
from engine_results import Record, extent, find, groups, label, read, sizes_of, title, whose

from pipeline.errors import InputError, PipelineError

COLOURS = {
    "engine graph": "C0", "engine": "C9", "naive ONNX graph": "C4", "naive ONNX": "C4",
    "onnxruntime CUDA": "C5", "torch eager": "C7", "torch compile": "C1", "torch autotune": "C3",
}  # fmt: skip
STYLES = {"fp32": ":", "tf32": "--", "fp16": "-"}
MARKERS = "os^Dv*"


def series(records: Sequence[Record]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(runner, precision) to its (extent of the sizes, median in ms), from small to large; behind
    the runner ``: artifact`` where it was measured of several in that precision."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
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
                line.append((extent(at), float(record["median_ms"])))
        name = runner.removesuffix(f"-{precision}")
        more = f": {text}" if several[runner, precision] > 1 else ""
        found[name + more, precision] = line
    return found


def floor_series(
    content: Mapping[str, Any], gpu: str, model: str, precision: str
) -> list[tuple[int, float]]:
    """The floors at the sizes that were counted; the least where artifacts differ."""
    rates = {**floors.RATES, **content["rates"].get(gpu, {})}
    found: dict[int, float] = {}
    for record in (f for f in content["floors"] if title(f) == model):
        at = extent(record["sizes"])
        floor = floors.times(record["work"], precision, rates)["floor"]
        found[at] = min(floor, found.get(at, floor))
    return sorted(found.items())


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes one PNG for each model and GPU; returns their paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (gpu, model), records in groups(content).items():
        lines = series(records)
        if not lines:
            continue
        figure, axes = plt.subplots(figsize=(9, 5.5))
        texts = sorted({name.partition(": ")[2] for name, _ in lines})
        for (runner, precision), line in sorted(lines.items()):
            kind, _, text = runner.partition(": ")
            axes.plot(
                *zip(*line, strict=True), markersize=4, linewidth=1.6,
                marker=MARKERS[texts.index(text) % len(MARKERS)],
                color=COLOURS.get(kind, "C8"), linestyle=STYLES.get(precision, "-."),
                label=f"{runner}, {precision}",
            )  # fmt: skip
        for precision in sorted({precision for _, precision in lines}):
            line = floor_series(content, gpu, model, precision)
            if line:
                axes.plot(
                    *zip(*line, strict=True), color="black", linewidth=0.9, marker=".",
                    linestyle=STYLES.get(precision, "-."), label=f"floor, {precision}",
                )  # fmt: skip
        names = next(iter(sizes_of(records)), {})
        axes.set(
            xscale="log", yscale="log", title=f"{model} on {gpu}",
            xlabel=" x ".join(names) or "fixed sizes", ylabel="median latency, ms",
        )  # fmt: skip
        axes.grid(True, which="both", linewidth=0.3)
        axes.legend(fontsize=7, handlelength=4, loc="center left", bbox_to_anchor=(1.01, 0.5))
        place = folder / f"engines-{model.replace(' ', '-').replace('=', '')}.png"
        figure.savefig(place, dpi=120, bbox_inches="tight")
        plt.close(figure)
        written.append(place)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR")
    arguments = parser.parse_args()
    try:
        written = draw(read(arguments.results), arguments.out)
        if not written:
            raise InputError(f"{arguments.results}: nothing was measured, so there is no picture")
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
