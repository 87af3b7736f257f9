"""Helpers for tests that need a GPU: the target whose engines run here, and small ONNX files.

These tests run on machines without torch, so they and this file do not import it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from pipeline.machine.gpu import why_not
from pipeline.machine.target import TARGETS, Target, installed_version


def runnable() -> tuple[Target | None, str]:
    """The installed target whose engines a GPU here can run, or the reason why there is none."""
    reasons = []
    for target in TARGETS.values():
        version = installed_version(target)
        if version is None or not version.startswith(".".join(map(str, target.version))):
            continue
        why = why_not(target)
        if not why:
            return target, ""
        reasons.append(f"{target}: {why}")
    return None, "; ".join(reasons) or "no TensorRT is installed here"


TARGET, WHY = runnable()
ALONE = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="measures memory or time, so nothing else may use the GPU: run it without -n",
)
needs_gpu = pytest.mark.skipif(TARGET is None, reason=WHY)
_NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b,3,h,w] x) => (float[b,8,h,w] y, float[b,8,1,1] mean)
{
    a = Conv<pads = [1, 1, 1, 1]>(x, first)
    t = Tanh(a)
    y = Conv<pads = [1, 1, 1, 1]>(t, second)
    mean = GlobalAveragePool(y)
}"""


def save_net(path: Path) -> Path:
    """Saves two convolutions of x [b, 3, h, w] with random weights.

    The outputs are y [b, 8, h, w] and its mean [b, 8, 1, 1].
    """
    model = onnx.parser.parse_model(_NET)
    rng = np.random.default_rng(0)
    for name, shape in (("first", (8, 3, 3, 3)), ("second", (8, 8, 3, 3))):
        weights = rng.uniform(-0.3, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    onnx.save(model, path)
    return path


def mix_rows(path: Path) -> None:
    """Makes rows depend on each other: subtracts the batch's mean from a `save_net` input."""
    model = onnx.load(path)
    mixing = onnx.parser.parse_graph(
        """g (float[b,3,h,w] x) => (float[b,3,h,w] mixed)
        { over = ReduceMean<axes = [0], keepdims = 1>(x)  mixed = Sub(x, over) }"""
    )
    for node in model.graph.node:
        node.input[:] = ["mixed" if name == "x" else name for name in node.input]
    nodes = [*mixing.node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    onnx.save(model, path)
