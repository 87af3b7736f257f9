"""Measures one run of an ONNX model in ONNX Runtime on this CPU: seconds and peak memory.

    python benchmarks/conversion/onnx_memory.py MODEL.onnx --size h=2160 --size w=3840 [--plain]

A size names a dynamic dim of the model. Inputs are uniform in -1..1. With --plain, graph
optimisations and the memory arena are off, as in the pipeline's comparison.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

from pipeline.spec.dims import evaluate


def peak() -> int:
    """The peak memory of this process, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (s.partition("=") for s in arguments.size)}
    options = ort.SessionOptions()
    if arguments.plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
    session = ort.InferenceSession(arguments.model, options, providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    feed = {
        i.name: generator.random([evaluate(dim, sizes) for dim in i.shape], np.float32) * 2 - 1
        for i in session.get_inputs()
    }
    loaded, start = peak(), time.perf_counter()
    outputs = session.run(None, feed)
    seconds = time.perf_counter() - start
    shapes = ", ".join(str(output.shape) for output in outputs)
    finite = all(np.isfinite(output).all() for output in outputs)
    print(
        f"{arguments.model.name} {' '.join(arguments.size)}: {seconds:.1f} s, peak "
        f"{peak() / 2**30:.2f} GiB ({loaded / 2**30:.2f} before the run), {shapes}"
        f"{'' if finite else ', NOT FINITE'}"
    )


if __name__ == "__main__":
    main()
