"""What a conversion costs, stage by stage: seconds, peak memory, and whose time it is.

    python benchmarks/stages.py [MODEL ...] [--out DIR]

Each model is converted twice in a child process: once from nothing, once with nothing changed.
Prints a Markdown table and writes DIR/stages.json (default: bench-results). Seconds depend on
the machine and on what else runs there; the shares are taken within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
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
    """One conversion in a child: its report, wall-clock seconds, and peak memory in bytes."""
    command = [sys.executable, "-m", "pipeline", "convert", model, "--out", str(out), "--json"]
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
    kib = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss // 1024
    report = json.loads(output)
    # the stages reset the kernel's high-water mark, so the process's own is the last stage's
    peaks = [stage["peak_bytes"] or 0 for stage in report["manifest"]["stages"]]
    return report, seconds, max(kib * 1024, *peaks)


def measure(model: str, folder: Path) -> dict[str, Any]:
    """All figures of one model."""
    report, seconds, peak = convert(model, folder / model)
    _, again, _ = convert(model, folder / model)
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
    """The figures as two Markdown tables."""
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
