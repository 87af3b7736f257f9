"""Latency against size, a picture a model, of what benchmarks/engines.py measured.

    python benchmarks/plot.py RESULTS.json --out docs

Needs matplotlib (the extra `bench`). Both axes are logarithmic; a line is a runner at a precision;
the floor is drawn where it was counted. A runner that was measured at one size is a point.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import floors
from engine_results import Record, extent, find, groups, sizes_of, title

COLOURS = {
    "engine graph": "C0", "engine": "C9", "naive ONNX graph": "C4", "naive ONNX": "C4",
    "onnxruntime CUDA": "C5", "torch eager": "C7", "torch compile": "C1", "torch autotune": "C3",
}  # fmt: skip
STYLES = {"fp32": ":", "tf32": "--", "fp16": "-"}


def series(records: Sequence[Record]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(runner, precision) to its (extent of the sizes, median in ms), from small to large."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    sizes = sizes_of(records)
    for runner, precision in dict.fromkeys((r["runner"], r["precision"]) for r in records):
        line = []
        for at in sizes:
            record = find(records, runner=runner, precision=precision, sizes=at)
            if record is not None:
                line.append((extent(at), float(record["median_ms"])))
        if line:
            found[runner.removesuffix(f"-{precision}"), precision] = line
    return found


def floor_series(
    content: Mapping[str, Any], gpu: str, model: str, precision: str
) -> list[tuple[int, float]]:
    """The floors at the sizes that were counted."""
    rates = {**floors.RATES, **content["rates"].get(gpu, {})}
    return sorted(
        (extent(f["sizes"]), floors.times(f["work"], precision, rates)["floor"])
        for f in content["floors"]
        if title(f) == model
    )


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
        for (runner, precision), line in sorted(lines.items()):
            axes.plot(
                *zip(*line, strict=True), marker="o", markersize=4, linewidth=1.6,
                color=COLOURS.get(runner, "C8"), linestyle=STYLES.get(precision, "-."),
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
        content = json.loads(arguments.results.read_text())
        written = draw(content, arguments.out)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {arguments.results}: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
