"""Runs passes on small graphs, and compares ONNX Runtime's numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from pipeline.graph.files import infer_shapes
from pipeline.passes import DEFAULT_PASSES, Pass, PassResult
from pipeline.passes.case import Case

PASSES: dict[str, Pass] = {p.name: p for p in DEFAULT_PASSES}


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with inferred dtypes and shapes, as passes get it from the stage."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    infer_shapes(copy)
    return copy


def apply(p: Pass, model: onnx.ModelProto) -> tuple[onnx.ModelProto, PassResult]:
    """The model after one pass (the graph alone, without the stage)."""
    return apply_inferred(p, inferred(model))


def apply_inferred(p: Pass, model: onnx.ModelProto) -> tuple[onnx.ModelProto, PassResult]:
    """`apply` on a copy from `inferred`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if p.level == "model":
        result = p.run(copy)
        return copy, result
    graph = gs.import_onnx(copy)
    result = p.run(graph)
    return gs.export_onnx(graph), result


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """ONNX Runtime's outputs without graph optimisations, which could hide a fault."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    """Equal shapes and dtypes; integers equal, floats within 1e-5 (half: one step of 2**-10)."""
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype.kind == "f":
            assert np.isfinite(a).all()
            near = 2e-3 if a.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(b.astype(np.float64), a.astype(np.float64), near, near)
        else:
            np.testing.assert_array_equal(b, a)


def own(pass_name: str, kind: str) -> list[Case]:
    """The cases of one kind that belong to a pass."""
    from pipeline.passes.cases import CASES

    return [case for case in CASES if case.pass_name == pass_name and case.kind == kind]
