"""Runs one engine, or ONNX Runtime, at several sizes. benchmarks/engines/engines.py starts it.

    python benchmarks/engines/run_engine.py engine ARTIFACT --shape h=440,w=1024 [--reference DIR]
    python benchmarks/engines/run_engine.py ort ARTIFACT --shape h=440,w=1024 [--reference DIR]

Prints a line of JSON for each size. An engine has two: with a CUDA graph and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from references import as_written, held_against, option_texts, reference_file

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.commands.bench.measure import Method, WallClock, input_sets, timed
from pipeline.errors import InputError, PipelineError
from pipeline.models import MODELS
from pipeline.spec.profiles import sizes_to_time

Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runner", choices=("engine", "ort"))
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--shape", action="append", default=[], metavar="DIM=SIZE,...")
    parser.add_argument("--repeat", type=int, default=Method.repeat)
    parser.add_argument("--seconds", type=float, default=Method.seconds)
    parser.add_argument("--reference", type=Path, metavar="DIR")
    parser.add_argument("--provider", default="CUDAExecutionProvider", help="of ort")
    arguments = parser.parse_args()
    records = run_engine(arguments) if arguments.runner == "engine" else run_ort(arguments)
    try:
        for record in records:
            print(json.dumps(record), flush=True)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run_engine(arguments: argparse.Namespace) -> Iterator[Record]:
    """Runs `pipeline bench`, and computes the distance of its results to torch's."""
    from pipeline.commands.bench.bench import bench
    from pipeline.runtime import engine as runtime

    method = Method(arguments.repeat, arguments.seconds)
    report = bench(arguments.artifact, shapes=arguments.shape, method=method)
    manifest = Artifact.open(arguments.artifact, check=False).manifest
    for point in report.points:
        base: Record = {"sizes": dict(point.sizes), "versions": {report.target: report.version}}
        if point.why:
            yield {**base, "graph": False, "why": point.why}
            continue
        with runtime.load_own(arguments.artifact, how=runtime.settled(manifest)) as engine:
            base |= _error(arguments, manifest, point.sizes, engine)
        for name in ("memory_bytes", "engine_bytes", "load_s", "first_call_s"):
            base[name] = getattr(point, name)
        for timing, graph in ((point.plain, False), (point.graph, True)):
            if timing is not None:
                yield {**base, "graph": graph, **asdict(timing)}
        if point.graph is None:
            yield {
                "sizes": base["sizes"], "graph": True, "why": f"no CUDA graph: {point.graph_why}"
            }  # fmt: skip


def run_ort(arguments: argparse.Namespace) -> Iterator[Record]:
    """Times ONNX Runtime with inputs and outputs on the GPU.

    A wall clock times each run and its wait for the results. CUDA events, which time the engine and
    torch, do not fit, because ONNX Runtime uses its own stream.
    """
    import onnxruntime as ort

    there = ort.get_available_providers()
    if arguments.provider not in there:
        raise InputError(
            f"onnxruntime {ort.__version__} here has no {arguments.provider} "
            f"(it has {', '.join(there)})"
        )
    artifact = Artifact.open(arguments.artifact)
    manifest = artifact.manifest
    declared = manifest.interface
    start = time.perf_counter()
    session = ort.InferenceSession(str(artifact.model), providers=[arguments.provider])
    loaded = time.perf_counter() - start
    names = [output.name for output in session.get_outputs()]
    kind = "cuda" if arguments.provider.startswith("CUDA") else "cpu"
    for point in sizes_to_time(declared.dims, declared.profiles, declared.rules, arguments.shape):
        bindings = []
        for one in input_sets(declared.inputs, point.sizes):
            binding = session.io_binding()
            for name, array in one.items():
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, kind, 0))
            for name in names:
                binding.bind_output(name, kind)
            bindings.append(binding)

        def call(n: int) -> None:
            session.run_with_iobinding(bindings[n % len(bindings)])  # noqa: B023

        yield {
            "sizes": dict(point.sizes),
            "device": "cuda" if kind == "cuda" else "cpu",
            "load_s": loaded,
            **asdict(timed(call, WallClock(), Method(arguments.repeat, arguments.seconds))),
            "versions": {"onnxruntime": ort.__version__},
            **_error(
                arguments,
                manifest,
                point.sizes,
                lambda feed: dict(zip(names, session.run(None, feed), strict=True)),
            ),
        }


def _error(
    arguments: argparse.Namespace,
    manifest: Manifest,
    sizes: Mapping[str, int],
    run: Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]],
) -> dict[str, float | str | None]:
    """The distance of the outputs for the first inputs to torch's stored outputs in float32."""
    if arguments.reference is None:
        return {"error": None}
    info = manifest.model
    name = info.source if info.source in MODELS else manifest.name
    options = option_texts(as_written(name, info.options))
    place = reference_file(arguments.reference, name, options, sizes)
    if not place.is_file():
        return {"error": None}
    outputs = run(input_sets(manifest.interface.inputs, sizes)[0])
    return held_against([np.asarray(outputs[o.name]) for o in manifest.interface.outputs], place)


if __name__ == "__main__":
    sys.exit(main())
