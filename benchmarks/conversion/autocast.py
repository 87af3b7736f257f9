"""Compares `--precision auto` with NVIDIA's AutoCast (nvidia-modelopt): islands, error and seconds.

    python benchmarks/conversion/autocast.py ARTIFACT... --autocast-python COMMAND

Each artifact comes from ``pipeline convert MODEL --precision auto``. COMMAND is a Python with
nvidia-modelopt and its extra ``onnx``, in an environment of its own: it needs other versions of
onnx. AutoCast converts the same model.onnx to fp16, with its default options. It gets the inputs at
the opt sizes as calibration data.

All files run on the CPU with the rounding of a GPU, at the sizes of the artifact's comparison. The
error is the distance to model.onnx in float32, divided by the output's largest value; the largest
of all sizes and outputs. "float32 nodes" compute float32 values, without Casts.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from pipeline.artifact.artifact import Artifact
from pipeline.commands.table import table
from pipeline.compare.half_runner import HalfRunner
from pipeline.graph.session import run_onnx
from pipeline.spec.closeness import Difference
from pipeline.spec.file_names import HALF

SEED = 0
Outputs = Mapping[str, np.ndarray]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifacts", nargs="+", type=Path, metavar="ARTIFACT")
    parser.add_argument("--autocast-python", type=shlex.split, required=True, metavar="COMMAND")
    arguments = parser.parse_args()
    rows = [row for place in arguments.artifacts for row in compare(place, arguments)]
    head = ["model", "way", "nodes", "float32 nodes", "Casts", "error", "seconds"]
    print(table([head, *rows]))
    return 0


def compare(place: Path, arguments: argparse.Namespace) -> list[list[str]]:
    """A row for each way to half precision."""
    artifact = Artifact.open(place)
    manifest = artifact.manifest
    half_info = manifest.build.half if manifest.build is not None else None
    if half_info is None or manifest.comparison is None:
        raise SystemExit(f"{place}: convert it with --precision auto")
    interface = manifest.interface
    sizes = [point.sizes for point in manifest.comparison.points if point.compared]
    feeds = [interface.sample(one, SEED) for one in sizes]
    want = list(run_onnx(artifact.model, feeds))
    rows = []

    def row(way: str, model: Path, got: Sequence[Outputs], seconds: str) -> None:
        error = max(distance(a, b) for a, b in zip(want, got, strict=True))
        rows.append([manifest.name, way, *counts(model), f"{error:.1e}", seconds])

    half = artifact.path / HALF
    row(
        f"auto, {half_info.runs} recipes", half, list(HalfRunner(half, "fp16").run(feeds)),
        f"{half_info.seconds:.0f}",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out, data = Path(folder) / "autocast.onnx", Path(folder) / "data.npz"
        opt = interface.profiles[0].sizes(1)
        np.savez(data, **interface.sample(opt, SEED))
        command = [*arguments.autocast_python, "-m", "modelopt.onnx.autocast"]
        command += ["--onnx_path", str(artifact.model), "--output_path", str(out)]
        command += ["--calibration_data", str(data), "--keep_io_types"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = f"{time.perf_counter() - start:.0f}"
        if done.returncode != 0 or not out.is_file():
            why = next(iter(done.stderr.strip().splitlines()[::-1]), f"exit {done.returncode}")
            rows.append([manifest.name, "AutoCast", "-", "-", "-", why, seconds])
        else:
            prepare(out)
            try:
                got = list(HalfRunner(out, "fp16").run(feeds))
            except Exception as error:  # the failure is the result
                why = type(error).__name__
                rows.append([manifest.name, "AutoCast", *counts(out), why, seconds])
            else:
                row("AutoCast", out, got, seconds)
    return rows


def prepare(model: Path) -> None:
    """Makes AutoCast's file ready for the rounding, which adds nodes with the names of tensors.

    Stored shapes of inner tensors go, because ONNX Runtime fails at some of them at other sizes.
    """
    content = onnx.load(model)
    del content.graph.value_info[:]
    for n, node in enumerate(content.graph.node):
        node.name = f"autocast {n}"
    onnx.save(content, model)


def distance(want: Outputs, got: Outputs) -> float:
    """The largest difference of an output, divided by its largest value."""
    floats = [Difference(want[n], got[n]) for n in want if want[n].dtype.kind == "f"]
    return max(each.largest / (each.scale or 1.0) for each in floats)


def counts(model: Path) -> list[str]:
    """Nodes, those that compute float32 values, and Casts."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(model, load_external_data=False)).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}
    wide = [
        n for n in graph.node
        if n.op_type not in ("Cast", "Constant")
        and any(types.get(o) == onnx.TensorProto.FLOAT for o in n.output)
    ]  # fmt: skip
    casts = sum(n.op_type == "Cast" for n in graph.node)
    return [str(len(graph.node)), str(len(wide)), str(casts)]


if __name__ == "__main__":
    sys.exit(main())
