"""``Hardmax`` becomes ArgMax and a comparison with a Range.

TensorRT-RTX turns Hardmax into OneHot, whose depth must be known at build time (``Depth input of
IOneHotLayer must be a build time constant``). A dynamic axis fails. TensorRT 8.6 has no Hardmax.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import rank_of, size_of


def run(graph: gs.Graph) -> PassResult:
    """Rewrites Hardmax of opset 13 and above; the dtype stays. Refused: an unknown rank or dtype,
    and older opsets, which flatten all axes from the given one on."""
    return each(graph, "Hardmax", _rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str:
    data = node.inputs[0]
    rank = rank_of(data)
    if graph.opset < 13:
        raise Refused(f"opset {graph.opset} is too old for the pass: export with opset 13")
    if data.dtype is None:
        raise Refused(f"the dtype of {data.name} is not known: declare it in value_info")
    axis = int(node.attrs.get("axis", -1)) % rank
    chain = Chain(graph, node)
    # ArgMax and Hardmax both choose the first of equal maxima
    largest = chain.op("ArgMax", data, dtype=np.int64, axis=axis, keepdims=1)
    positions = size_of(chain, data, axis).upto().reshape(-1, *[1] * (rank - 1 - axis)).data
    hit = chain.op("Equal", positions, largest, dtype=np.bool_)
    chain.finish(chain.cast(hit, data.dtype))
    return f"ArgMax over axis {axis}, comparison with a Range"


PASS = Pass(
    name="expand_hardmax",
    run=run,
    targets=EVERY,
    summary="Hardmax -> ArgMax, comparison with a Range",
    fault="it does not build ('Depth input of IOneHotLayer must be a build time constant')",
    evidence=(
        "cases: rtx-1.7 parses it and does not build",
        "cases: TensorRT 8.6.0 has no Hardmax at all",
    ),
)
