"""Measures each stage of a conversion: seconds, peak memory, and the share of each library.

    python benchmarks/conversion/stages.py [MODEL[:OPTION=VALUE,...] ...] [--out DIR]

A child process converts each model twice: from nothing, and with nothing changed. The memory of a
stage is that of its process. "all" is the peak sum of the memory of all processes (resident,
sampled twice a second, Linux).

Prints a Markdown table and writes DIR/stages.json (default: bench-results). Seconds depend on the
machine and on its other work. The shares come from one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.models import MODELS

EXPORTER = ("import torch", "torch.export", "torch.onnx.export")
BUILDER = ("tensorrt parse", "tensorrt build")
RUNTIME = ("exported", "rewritten")  # ONNX Runtime's runs
POLYGRAPHY = ("polygraphy compare", "polygraphy store")
REFERENCE = ("model", "trying sizes", "torch")  # making the module, and running it in torch


def convert(model: str, out: Path) -> tuple[dict[str, Any], float, int]:
    """Converts once in a child: the report, wall-clock seconds, and peak memory in bytes."""
    name, _, options = model.partition(":")
    command = [sys.executable, "-m", "pipeline", "convert", name, "--out", str(out), "--json"]
    for option in options.split(",") if options else []:
        command += ["--option", option]
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak, done = [0], threading.Event()
    sampler = threading.Thread(target=_sample, args=(child.pid, peak, done))
    sampler.start()
    output, _ = child.communicate()
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
    report = json.loads(output)
    peaks = [stage["peak_bytes"] or 0 for stage in report["manifest"]["stages"]]
    return report, seconds, max(peak[0], *peaks)


def _sample(pid: int, peak: list[int], done: threading.Event) -> None:
    """Records the peak memory of a process and its descendants together, in bytes."""
    while not done.wait(0.5):
        peak[0] = max(peak[0], _resident(pid))


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):  # the process has ended, or this is not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


def measure(model: str, folder: Path) -> dict[str, Any]:
    """All measurements of one model."""
    place = folder / model.replace(":", "-").replace(",", "-")
    report, seconds, peak = convert(model, place)
    _, again, _ = convert(model, place)
    stages = report["manifest"]["stages"]
    libraries: dict[str, float] = {}
    for stage in stages:
        for name, value in stage["library_seconds"].items():
            libraries[name] = libraries.get(name, 0.0) + value
    parts = {
        label: sum(libraries.get(name, 0.0) for name in names)
        for label, names in (
            ("torch exporter", EXPORTER),
            ("TensorRT builder", BUILDER),
            ("ONNX Runtime", RUNTIME),
            ("torch reference", REFERENCE),
            ("Polygraphy", POLYGRAPHY),
        )
    }
    own = seconds - sum(parts.values())
    return {
        "model": model,
        "seconds": seconds,
        "peak_bytes": peak,
        "seconds_unchanged": again,
        "stages": stages,
        "seconds_by_owner": {**parts, "pipeline": own},
        "pipeline_share": own / seconds,
        "versions": report["manifest"]["versions"],
    }


def tables(results: list[dict[str, Any]]) -> str:
    """The measurements as two Markdown tables."""
    lines = ["| model | stage | seconds | peak memory |", "|---|---|---|---|"]
    for result in results:
        for stage in result["stages"]:
            peak = "-" if stage["peak_bytes"] is None else f"{stage['peak_bytes'] / 2**30:.2f} GiB"
            lines.append(
                f"| {result['model']} | {stage['name']} | {stage['seconds']:.1f} | {peak} |"
            )
        lines.append(
            f"| {result['model']} | **all** | {result['seconds']:.1f} "
            f"| {result['peak_bytes'] / 2**30:.2f} GiB |"
        )
        lines.append(
            f"| {result['model']} | nothing changed | {result['seconds_unchanged']:.1f} | |"
        )
    owners = list(results[0]["seconds_by_owner"])
    lines += ["", "| model | " + " | ".join(owners) + " |", "|---|" + "---|" * len(owners)]
    for result in results:
        cells = [
            f"{value:.1f} s ({value / result['seconds']:.0%})"
            for value in result["seconds_by_owner"].values()
        ]
        lines.append(f"| {result['model']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(model, Path(folder)) for model in arguments.models]
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "stages.json"
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=2))
    print(tables(results))
    print(f"\n{path}: the same and more as JSON ({machine['cores']} cores)")


if __name__ == "__main__":
    main()
