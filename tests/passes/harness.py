"""Running small graphs: in ONNX Runtime as they are, and through TensorRT-RTX's builder."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest

from pipeline.passes import DEFAULT_PASSES, Pass, PassResult
from pipeline.passes._case import Case, Shapes

PASSES: dict[str, Pass] = {p.name: p for p in DEFAULT_PASSES}


def apply(p: Pass, model: onnx.ModelProto) -> tuple[onnx.ModelProto, PassResult]:
    """The model after one pass (the graph alone, without the stage)."""
    graph = gs.import_onnx(model)
    result = p.run(graph)
    return gs.export_onnx(graph), result


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """ONNX Runtime's outputs with its graph optimisations off, so that they hide nothing."""
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


def build(model: onnx.ModelProto, shapes: tuple[Shapes, ...]) -> str:
    """Parses and builds with TensorRT-RTX, which needs no GPU for that.

    Returns:
        What went wrong; nothing if an engine came out. Skips the test without TensorRT-RTX.
    """
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()):
        return "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for place in range(network.num_inputs):
        tensor = network.get_input(place)
        sizes = np.array([s[tensor.name] for s in shapes], int).reshape(len(shapes), -1)
        profile.set_shape(tensor.name, sizes.min(0), sizes[0], sizes.max(0))
    if config.add_optimization_profile(profile) < 0:
        return "the profile is not valid"
    return "" if builder.build_serialized_network(network, config) is not None else "no engine"


def own(pass_name: str, kind: str) -> list[Case]:
    """The cases of one kind that were written for a pass."""
    from pipeline.passes.cases import CASES

    return [case for case in CASES if case.pass_name == pass_name and case.kind == kind]
