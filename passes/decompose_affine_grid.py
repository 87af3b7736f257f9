"""``AffineGrid`` (opset 20) becomes multiplications and sums.

TensorRT-RTX 1.7.1 has no importer for AffineGrid: the parser fails with the word "false". Each
coordinate of the grid is a sum: ``theta[n, k, 0] * x + theta[n, k, 1] * y (+ ...) + shift``. Each
term depends on one axis. The pass broadcasts the terms and builds no matrix.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import drop_unused
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.sizes import elements_of
from pipeline.passes.lib.values import Value


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every AffineGrid with theta of shape ``(N, 2, 3)`` or ``(N, 3, 4)``.

    The sizes may be constants, computed or an input. float16 is computed in float32. Refused: a
    theta of unknown shape or dtype, bfloat16 and float64.
    """

    def rewrite(inner: gs.Graph, node: gs.Node) -> str:
        size = node.inputs[1]
        detail = _rewrite(inner, node)
        drop_unused(graph, size)
        return detail

    return each(graph, "AffineGrid", rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str:
    theta, size = node.inputs
    shape = [] if theta.shape is None else list(theta.shape)[1:]
    if shape not in ([2, 3], [3, 4]):
        raise Refused(
            f"{theta.name} has the shape {theta.shape}: give a batch of 2x3 or 3x4 matrices"
        )
    if theta.dtype not in (np.float32, np.float16):
        raise Refused(
            f"the dtype of {theta.name} is {theta.dtype}, not float or half: cast it to float"
        )
    axes = shape[0]
    aligned = bool(node.attrs.get("align_corners", 0))
    c = Chain(graph, node)
    data = theta if theta.dtype == np.float32 else c.cast(theta, np.float32, "to_float")
    made = _column(c, data, axes, axes)
    for place in range(axes):
        # the first coordinate runs along the innermost axis
        axis = axes - 1 - place
        steps = _places(_element(c, size, 2 + axis), aligned).reshape(-1, *[1] * (axes - axis))
        term = c.op("Mul", _column(c, data, place, axes), steps.data, dtype=np.float32)
        made = c.op("Add", made, term, dtype=np.float32)
    if theta.dtype != np.float32:
        made = c.cast(made, theta.dtype, "from_float")
    c.finish(made)
    return f"{axes}-D grid from broadcast sums"


def _column(c: Chain, theta: gs.Tensor, place: int, axes: int) -> gs.Tensor:
    """Column of the matrices, laid out as ``(N, 1, ..., 1, axes)``."""
    column = c.op("Gather", theta, np.array(place), dtype=np.float32, axis=2)
    shape = np.array([-1, *[1] * axes, axes])
    return c.op("Reshape", column, shape, dtype=np.float32)


def _places(size: Value, aligned: bool) -> Value:
    """Coordinates of the pixels of one axis, in -1..1.

    With align_corners, the only pixel of an axis of size 1 lies at 0, as in torch. The standard
    divides by 0 in this case, and ONNX Runtime 1.31 returns 1.
    """
    i = size.upto().cast(np.float32)
    n = size.cast(np.float32)
    if aligned:
        along = i * 2.0 / (n - 1.0).at_least(1.0) - 1.0
        return (n > 1.0).where(along, i * 0.0)
    return (i * 2.0 + 1.0) / n - 1.0


def _element(c: Chain, sizes: gs.Tensor, n: int) -> Value:
    """Element n of the sizes, int64 of shape ``(1,)``."""
    followed = elements_of(sizes)
    if followed is not None and n < len(followed.values) and followed.values[n].is_Integer:
        return Value(c, np.array([int(followed.values[n])]))
    made = c.op(
        "Slice", sizes, np.array([n]), np.array([n + 1]), np.array([0]),
        short="size", dtype=np.int64, shape=[1],
    )  # fmt: skip
    return Value(c, made)


PASS = Pass(
    name="decompose_affine_grid",
    run=run,
    targets=EVERY,
    summary="AffineGrid -> multiplications and sums",
    fault="the parser has no importer for it",
    evidence=("tensorrt-rtx 1.7.1: the parser fails with 'false'; 8.6 documents opset 17",),
)
