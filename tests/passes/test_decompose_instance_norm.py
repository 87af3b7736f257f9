"""decompose_instance_norm: the numbers, and that the check notices wrong numbers.

8.6 lacks the plugin. Only a GPU machine with TensorRT 8.6 shows that the decomposed form runs
there. tensorrt-rtx has an InstanceNormalization.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from pass_harness import PASSES, apply, assert_same, own, run

from pipeline.passes.case import Case

P = PASSES["decompose_instance_norm"]
POSITIVE = own("decompose_instance_norm", "positive")


def first() -> Case:
    return next(case for case in POSITIVE if case.name == "2-D")


def test_no_norm_and_no_reduce_is_left() -> None:
    for case in POSITIVE:
        graph = gs.import_onnx(apply(P, case.model())[0])
        for inner in (graph, *graph.subgraphs(recursive=True)):
            assert not {"InstanceNormalization", "ReduceMean"} & {n.op for n in inner.nodes}


@pytest.mark.parametrize(
    ("short", "replacement"),
    [("add_epsilon", 0), ("biased", 0), ("scaled", 0), ("deviation", 0), ("centred", 0)],
)
def test_a_wrong_rewrite_is_caught(short: str, replacement: int) -> None:
    """Leaves out each step in turn. The numeric check of the contract must fail."""
    case = first()
    model, _ = apply(P, case.model())
    (node,) = (n for n in model.graph.node if n.name.endswith(f"/{short}"))
    kept = node.input[replacement]
    node.op_type = "Identity"
    del node.input[:]
    node.input.append(kept)
    onnx.checker.check_model(model)
    feeds = case.feeds(case.shapes[0])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(model, feeds))


def test_half_inputs_do_not_overflow() -> None:
    """Squares of 400 exceed half precision's 65504; the float32 part holds them."""
    (case,) = (c for c in POSITIVE if c.name == "half")
    model, _ = apply(P, case.model())
    x = np.random.default_rng(0).choice([-400.0, 400.0], (1, 3, 6, 8)).astype(np.float16)
    (y,) = run(model, {"x": x})
    assert np.isfinite(y).all()
    wide = x.astype(np.float64)
    mean, var = wide.mean((2, 3), keepdims=True), wide.var((2, 3), keepdims=True)
    scale = np.array([0.5, 1.5, -2.0]).reshape(1, 3, 1, 1)
    bias = np.array([0.25, -1.0, 3.0]).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(y, (wide - mean) / np.sqrt(var + 0.01) * scale + bias, 2e-3, 2e-3)


def test_bfloat16_is_computed_in_float32() -> None:
    """ONNX Runtime has no bfloat16 InstanceNormalization (opset 22): torch is the reference."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 22]> g (float[n,3,h,w] x) => (float[n,3,h,w] y) '
        "<bfloat16[3] a = {16128, 16320, 49152}, bfloat16[3] b = {16000, 49024, 16448}> "
        "{ r = Cast<to = 16>(x) s = InstanceNormalization(r, a, b) y = Cast<to = 1>(s) }"
    )
    model.graph.node[1].name = "norm"
    after, result = apply(P, model)
    assert result.modified
    onnx.checker.check_model(after, full_check=True)
    x = torch.linspace(-300, 500, 90).reshape(2, 3, 3, 5)
    (y,) = run(after, {"x": x.numpy()})
    right = torch.nn.functional.instance_norm(
        x.bfloat16().float(),
        weight=torch.tensor([0.5, 1.5, -2]),
        bias=torch.tensor([0.25, -1, 3]),
    )
    # one step of bfloat16 is 2**-8
    np.testing.assert_allclose(y, right.numpy(), 2**-7, 2**-7)


def test_too_many_or_no_spatial_axes_are_refused() -> None:
    for rank in (2, 6):
        x, y = (gs.Variable(n, np.float32, ["n", 3, *"dhwt"][:rank]) for n in "xy")
        parts = [gs.Constant(n, np.ones(3, np.float32)) for n in "ab"]
        graph = gs.Graph([gs.Node("InstanceNormalization", "in", {}, [x, *parts], [y])], [x], [y])
        result = P.run(graph)
        assert not result.modified
        assert f"{rank - 2} spatial axes" in result.refused[0].detail


def test_tensorrt_reduces_global_average_pool_over_all_axes_but_two() -> None:
    """The reading of tensorrt-rtx's parser, for ranks 3 to 5.

    ``globalPoolingHelper`` of onnx-tensorrt 8.6 does the same.
    """
    trt = pytest.importorskip("tensorrt_rtx")
    for rank in (3, 4, 5):
        (case,) = (c for c in POSITIVE if c.name == f"{rank - 2}-D")
        model, _ = apply(P, case.model())
        logger = trt.Logger(trt.Logger.ERROR)
        network = trt.Builder(logger).create_network(0)
        assert trt.OnnxParser(network, logger).parse(model.SerializeToString())
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        reduces = [layer for layer in layers if layer.type == trt.LayerType.REDUCE]
        assert len(reduces) == 2
        for layer in reduces:
            assert list(layer.get_output(0).shape)[2:] == [1] * (rank - 2)
