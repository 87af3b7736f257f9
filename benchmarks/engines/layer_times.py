"""Prints the time of every layer of an artifact's engine, by TensorRT's own profiler.

    python benchmarks/engines/layer_times.py ARTIFACT --shape batch=21,h=300,w=300 [--most 40]

Needs a GPU. It builds the engine once more in a temporary folder: only a plan that was built for it
tells the formats and tactics of its layers. Other kernels may be chosen than in the artifact's own
engine. The profiler adds a few microseconds to each layer, and a CUDA graph has none of that.
So the sum is more than a call takes; `pipeline bench` has that time. Formats and tactics are those
that TensorRT's inspector reports. A region of Myelin is one layer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from pipeline.artifact.artifact import Artifact
from pipeline.build.settings import BuildOptions
from pipeline.commands.bench.measure import input_sets
from pipeline.convert.driver import build_artifact
from pipeline.convert.recipe import precision_and_recipe
from pipeline.errors import ArtifactError, PipelineError
from pipeline.machine.target import find_target
from pipeline.runtime.engine import load
from pipeline.spec.effort import Effort
from pipeline.spec.file_names import COMPARISON, ENGINES
from pipeline.spec.profiles import sizes_to_time

CALLS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--shape", default="", metavar="DIM=SIZE,...", help="default: every opt")
    parser.add_argument("--most", type=int, default=40, help="print so many layers (default: 40)")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = layer_times(with_details(arguments.artifact, Path(folder)), arguments.shape)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(rows)} layers, {sum(us for us, _ in rows) / 1000:.3f} ms in sum\n")
    print("| us | kind | layer | from | to | tactic |\n|---|---|---|---|---|---|")
    for us, layer in rows[: arguments.most]:
        cells = [
            f"{us:.1f}", layer.get("LayerType", ""), layer["Name"], _tensors(layer, "Inputs"),
            _tensors(layer, "Outputs"), layer.get("TacticName", ""),
        ]  # fmt: skip
        print(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
    return 0


def with_details(place: Path, folder: Path) -> Path:
    """A copy of an artifact, whose engine has its options and tells formats and tactics.

    Raises:
        PipelineError: There is no engine in the artifact, or TensorRT builds none.
    """
    manifest = Artifact.open(place).manifest
    if manifest.build is None:
        raise ArtifactError(f"{place} has no engine yet; run `pipeline build {place}`")
    copy = folder / place.resolve().name
    shutil.copytree(place, copy, ignore=shutil.ignore_patterns(ENGINES, COMPARISON))
    artifact = Artifact.open(copy, built=False)
    precision, recipe = precision_and_recipe(artifact, None, None)
    options = BuildOptions(
        find_target(manifest.target.name), precision, Effort(manifest.build.optimization_level),
        manifest.build.plugins, recipe, gpus=manifest.target.gpus, flags=manifest.build.flags,
        detailed=True,
    )  # fmt: skip
    build_artifact(artifact, options)
    return copy


def layer_times(place: Path, shape: str) -> list[tuple[float, dict[str, Any]]]:
    """The layers of an engine, the slowest first.

    Args:
        place: The artifact's folder.
        shape: The sizes as text. Dims that it leaves out have their opt.

    Returns:
        For each layer the median in microseconds of `CALLS` calls, and the inspector's record.

    Raises:
        PipelineError: There is no engine for the GPU here, or a size does not fit.
    """
    declared = Artifact.open(place).manifest.interface
    shapes = [shape] if shape else []
    point = sizes_to_time(declared.dims, declared.profiles, declared.rules, shapes)[0]
    with load(place) as engine:
        feed = input_sets(declared.inputs, point.sizes)[0]
        for _ in range(5):
            engine(feed)
        state = engine._runs  # the runtime has no public way to its profiler
        (own,) = state._contexts.values()
        context, plan, trt = own._context, state.plan.engine, state.plan.trt
        times: dict[str, list[float]] = defaultdict(list)

        class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)

            def report_layer_time(self, name: str, ms: float) -> None:
                times[name].append(1000 * ms)

        context.profiler = Profiler()
        for _ in range(CALLS):
            engine(feed)
        inspector = plan.create_engine_inspector()
        inspector.execution_context = context
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    # TensorRT 8.6 writes control characters into its JSON
    layers = json.loads(text, strict=False)["Layers"]
    known = {layer["Name"]: layer for layer in layers if isinstance(layer, dict)}
    rows = [
        (statistics.median(found) * len(found) / CALLS, known.get(name, {"Name": name}))
        for name, found in times.items()
    ]
    return sorted(rows, key=lambda row: -row[0])


def _tensors(layer: dict[str, Any], side: str) -> str:
    return "; ".join(
        f"{t.get('Format/Datatype', '?')} {t.get('Dimensions', '?')}" for t in layer.get(side, [])
    )


if __name__ == "__main__":
    sys.exit(main())
