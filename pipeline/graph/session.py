"""ONNX Runtime, and ONNX's reference evaluator: every run of a model goes through here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.spec.tensors import Feed


def run_onnx(model: Path, feeds: Sequence[Feed]) -> Iterator[dict[str, np.ndarray]]:
    """The ONNX model's outputs by name in ONNX Runtime on the CPU, unoptimised."""
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False  # memory goes back after each point
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    with OnnxrtRunner(session, name=model.stem) as runner:
        for feed in feeds:
            yield {name: np.asarray(v) for name, v in runner.infer(dict(feed)).items()}


def run_reference(model: bytes, feeds: Sequence[Feed]) -> list[dict[str, np.ndarray]]:
    """ONNX Runtime's outputs by name, its graph optimisations off, so that they hide nothing."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return [dict(zip(names, session.run(None, dict(feed)), strict=True)) for feed in feeds]
