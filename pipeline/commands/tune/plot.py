"""The plot of a tuning, with matplotlib if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.machine.files import fresh
from pipeline.spec.dims import sizes_text

if TYPE_CHECKING:
    from pipeline.commands.tune.tune import Tuning


def write_plot(tuning: Tuning, path: Path) -> bool:
    """Draws the time of each right candidate at each set of sizes, as a share of the first's.

    Returns:
        False if matplotlib is not installed; then no file is written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    trials = [trial for trial in tuning.trials if trial.times]
    base = trials[0]
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(trials) * max(1, len(base.times) / 2)))
    axes = figure.subplots()
    height = 0.8 / len(base.times)
    for number, first in enumerate(base.times):
        places = [row + height * number for row in range(len(trials))]
        shares = [trial.times[number].ms / first.ms for trial in trials]
        sizes = sizes_text(first.sizes) or "fixed sizes"
        bars = axes.barh(places, shares, height, label=sizes)
        axes.bar_label(bars, [f"{trial.times[number].ms:.3f} ms" for trial in trials], padding=3)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(trials))])
    kept = tuning.kept
    axes.set_yticklabels([f"{t.name} (kept)" if t.name == kept else t.name for t in trials])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"time of one call / time of {base.name}")
    axes.set_title(f"{tuning.name}, {tuning.precision}, {tuning.target} on {tuning.gpu}")
    axes.legend()
    figure.savefig(fresh(path), format="svg", bbox_inches="tight")
    return True
