"""``Sign`` of integers becomes ``Clip(x, -1, 1)``. ``Pow`` of integers becomes multiplications.

TensorRT 8.6's parser refuses both: "This version of TensorRT does not support the given operator
with the given input data type", "Elementwise layer does not support the given inputs and
operator". Models with relative positions have such nodes (DeBERTa). The results are the same
numbers for every product that fits. A larger one wraps around, as in torch; ONNX Runtime's Pow
gives the smallest integer instead.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10
from pipeline.passes.graph_ops import values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain

_INTEGERS = (np.int32, np.int64)
_CLIP = 12  # the first opset whose Clip takes integers
_MOST = 64  # the largest exponent


def run(graph: gs.Graph) -> PassResult:
    """Rewrites Sign of int32 and int64, and Pow of them by one constant exponent from 1 to 64.

    Refused: Pow of integers by another exponent, and opsets below 12. Other dtypes, and unknown
    ones, are left alone: floats are right as they are.
    """

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        dtype = node.inputs[0].dtype
        if dtype not in _INTEGERS:
            return None
        chain = Chain(inner, node)
        if node.op == "Pow":
            return _power(chain)
        if graph.opset < _CLIP:
            raise Refused(f"Sign of integers needs opset {_CLIP} or later, not {graph.opset}")
        ends = (np.array(end, dtype) for end in (-1, 1))
        chain.op("Clip", node.inputs[0], *ends, dtype=dtype, shape=node.inputs[0].shape)
        chain.finish()
        return "Clip(x, -1, 1)"

    return each(graph, ("Sign", "Pow"), rewrite)


def _power(chain: Chain) -> str:
    """x**k by repeated squares."""
    x, exponent = chain.node.inputs
    values = values_of(exponent)
    if values is None or values.ndim or not 1 <= values <= _MOST or int(values) != values:
        raise Refused(
            f"Pow of integers needs one constant exponent from 1 to {_MOST}: compute it in float32"
        )
    rest, square, result = int(values), x, None
    while rest:
        if rest % 2:
            result = square if result is None else _product(chain, result, square)
        rest //= 2
        if rest:
            square = _product(chain, square, square)
    if not chain.nodes:  # x**1
        chain.op("Identity", x, dtype=x.dtype, shape=x.shape)
    chain.finish()
    return f"products for x**{int(values)}"


def _product(chain: Chain, a: gs.Tensor, b: gs.Tensor) -> gs.Tensor:
    product: gs.Tensor = chain.op("Mul", a, b, dtype=a.dtype, shape=a.shape)
    return product


PASS = Pass(
    name="expand_integer_ops",
    run=run,
    targets=(BELOW_10,),
    summary="Sign of integers -> Clip, Pow of integers -> Mul",
    fault="they do not parse: the parser refuses these dtypes",
    evidence=(
        "cases: TensorRT 8.6.0 on an H200 parses none of them; RTX 1.7 builds all",
        "the case `Sign as DeBERTa uses it` is that model's own form",
        "onnx2trt_utils.cpp, `unaryHelper` and `elementwiseCheck`, refuse the dtypes",
    ),
)
