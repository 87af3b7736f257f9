"""expand_col2im: compared with torch's fold, in half precision, and with a wrong kernel order."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
import torch
from pass_harness import apply, assert_same, own, run

from pipeline.passes.expand_col2im import PASS

POSITIVE = own("expand_col2im", "positive")


def named(name: str):
    (case,) = (c for c in POSITIVE if c.name == name)
    return case


def test_the_blocks_are_summed_as_torch_folds_them() -> None:
    case = named("strides, pads, dilations")
    # torch has one padding for both ends
    text = case.text.replace("pads=[2,1,1,2]", "pads=[2,1,2,1]")
    model = type(case)(**{**vars(case), "text": text}).model()
    x = np.random.default_rng(0).normal(size=(2, 12, 10)).astype(np.float32)
    fold = torch.nn.Fold((7, 8), (2, 3), dilation=(3, 2), padding=(2, 1), stride=(2, 3))
    x = x[:, :, : torch.nn.Unfold((2, 3), (3, 2), (2, 1), (2, 3))(torch.zeros(1, 2, 7, 8)).shape[2]]
    after, _ = apply(PASS, model)
    assert_same([fold(torch.from_numpy(x)).numpy()], run(after, {"x": x}))


def test_a_kernel_in_the_wrong_order_is_noticed() -> None:
    case = named("plain")
    feeds = case.feeds(case.shapes[1])
    graph = gs.import_onnx(apply(PASS, case.model())[0])
    (convolution,) = (n for n in graph.nodes if n.op == "ConvTranspose")
    kernel = convolution.inputs[1]
    kernel.values = np.ascontiguousarray(kernel.values[::-1])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(gs.export_onnx(graph), feeds))


def test_half_precision_is_summed_in_float32() -> None:
    case = named("half")
    after, _ = apply(PASS, case.model())
    (convolution,) = (n for n in gs.import_onnx(after).nodes if n.op == "ConvTranspose")
    assert convolution.inputs[1].dtype == np.float32
