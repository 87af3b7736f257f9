"""fuse_pixel_shuffle: the proof from the sizes, and near misses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, apply, assert_same, own, run

from pipeline.passes.case import Case

P = PASSES["fuse_pixel_shuffle"]
POSITIVE = [c for c in own("fuse_pixel_shuffle", "positive") if "If" not in c.name]


def named(name: str) -> Case:
    (case,) = (c for kind in ("positive", "near miss") for c in own(P.name, kind) if c.name == name)
    return case


def inferred(case: Case) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(case.model(), data_prop=True)


@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_nothing_of_the_reshapes_is_left(case: Case) -> None:
    model, result = apply(P, inferred(case))
    assert result.modified
    ops = [node.op_type for node in model.graph.node]
    assert ops in (["DepthToSpace"], ["SpaceToDepth"], ["SpaceToDepth", "Gather"])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("CRD from torch.export", "PixelShuffle"),
        ("CRD from torch.jit", "PixelShuffle"),
        ("unshuffle by view", "PixelUnshuffle"),
        ("torch.nn.PixelUnshuffle", "PixelUnshuffle"),
    ],
)
def test_it_is_torchs(name: str, module: str) -> None:
    torch = pytest.importorskip("torch")
    case = named(name)
    model, _ = apply(P, inferred(case))
    for shapes in case.shapes:
        feeds = case.feeds(shapes)
        expected = getattr(torch.nn, module)(2)(torch.from_numpy(feeds["x"]))
        assert_same([expected.numpy()], run(model, feeds))


def test_odd_sizes_can_pass_through_the_reshapes() -> None:
    """The reason why PixelUnshuffle needs dims that are known to be even.

    2 images of height 3 become 3 images of height 1, which SpaceToDepth would refuse.
    """
    case = named("PixelUnshuffle of sizes that may be odd")
    graph = gs.import_onnx(case.model())
    (shape,) = run(
        gs.export_onnx(_with_output(graph, "e", np.int64, [4])),
        {"x": np.zeros((2, 3, 3, 4), np.float32)},
    )[-1:]
    np.testing.assert_array_equal(shape, [-1, 12, 1, 2])


def _with_output(graph: gs.Graph, name: str, dtype: type, shape: list[int]) -> gs.Graph:
    tensor = graph.tensors()[name]
    tensor.dtype, tensor.shape = dtype, shape
    graph.outputs = [tensor]
    return graph.cleanup()


def test_a_wrong_order_of_channels_is_noticed() -> None:
    case = named("unshuffle by view")
    model, _ = apply(P, inferred(case))
    (order,) = (t for t in model.graph.initializer if len(t.dims) == 1 and t.dims[0] == 12)
    wrong = np.roll(onnx.numpy_helper.to_array(order), 1)
    order.CopyFrom(onnx.numpy_helper.from_array(wrong, order.name))
    feeds = case.feeds(case.shapes[0])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(model, feeds))


def test_reshapes_that_something_else_reads_stay() -> None:
    graph = gs.import_onnx(inferred(named("CRD from torch.export")))
    middle = next(node for node in graph.nodes if node.op == "Transpose").outputs[0]
    graph.outputs.append(middle)
    assert not P.run(graph).modified


@pytest.mark.parametrize("perm", [[0, 1, 2, 4, 3, 5], [0, 1, 5, 2, 4, 3], [0, 1, 4, 3, 5, 2]])
def test_another_order_is_left_alone(perm: list[int]) -> None:
    graph = gs.import_onnx(inferred(named("CRD from torch.export")))
    next(node for node in graph.nodes if node.op == "Transpose").attrs["perm"] = perm
    assert not P.run(graph).modified
