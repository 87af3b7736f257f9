"""``DFT`` (torch's fft, rfft, ifft, irfft) becomes MatMuls with a cosine and a sine matrix.

TensorRT has no DFT: RTX 1.7's parser looks for a plugin and finds none. It accepts STFT.

The angle of row j and column k is 2 pi (j k mod N) / N. The remainder is computed in integers, so
that cosine and sine are exact to the last digit for any length. If the length is dynamic, the
matrices are built in the graph. Each has (length x frequencies) elements, and a row takes as many
multiplications. That is fine for hundreds of points, and heavy for ten thousand (800 MB). The
pass refuses more than 2**28 static elements. On targets that compute int64 as int32 (TensorRT
8.6) the products fit up to a length of 46340.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import (
    floor_div,
    is_half,
    rank_of,
    size_of,
    static_size,
    widen,
    work_dtype,
)
from pipeline.passes.lib.sizes import dims_of, elements_of
from pipeline.passes.lib.values import Value

_MOST = 2**28  # elements of a matrix
_STORED = 2**22  # a larger matrix is built in the graph, even if its size is static


@dataclass(frozen=True)
class _Transform:
    """One DFT: its axis, and the numbers of points before and after."""

    axis: int
    inverse: bool
    onesided: bool
    length: Value
    rows: Value
    columns: Value


def run(graph: gs.Graph) -> PassResult:
    """Rewrites DFT of opset 17 and of 20: ``(..., n, ..., 1 or 2) -> (..., k, ..., 2)``.

    Forward, inverse and onesided (real input, or inverse with real output). A constant or computed
    length pads or cuts the signal. Half precision is computed in float32, float64 in float64.
    Refused: an unknown rank or dtype, a computed axis, a last axis that is not 1 or 2, and
    matrices of more than 2**28 elements.
    """
    return each(graph, "DFT", lambda inner, node: _rewrite(Chain(inner, node)))


def _rewrite(chain: Chain) -> str:
    data = chain.node.inputs[0]
    rank = rank_of(data)
    parts = static_size(data, rank - 1, "the last axis (real, imaginary)")
    if parts not in (1, 2):
        raise Refused(f"the last axis of {data.name} has {parts} elements, not 1 (real) or 2")
    dtype = work_dtype(data, (np.float32, np.float64))
    x, plan = _plan(chain, widen(chain, data, dtype), rank)
    to_real = plan.inverse and plan.onesided
    output = chain.node.outputs[0]
    if output.shape is None:  # ONNX infers nothing for a computed length; the next DFT needs it
        output.shape = [*data.shape[:-1], 1 if to_real else 2]
        output.shape[plan.axis] = None
        output.dtype = output.dtype or data.dtype
        _tell_scaled(output)
    if to_real and parts == 1:
        raise Refused(f"{data.name} is real, but a onesided inverse needs a complex spectrum")
    cosine, sine = _matrices(chain, plan, dtype)
    # move the signal to the last axis, and real and imaginary part before it
    order = [n for n in range(rank - 1) if n != plan.axis] + [rank - 1, plan.axis]
    x = chain.op("Transpose", x, dtype=dtype, perm=order)
    if to_real:
        real, imaginary = (
            chain.op("Gather", x, np.array([n]), short="part", dtype=dtype, axis=rank - 2)
            for n in range(2)
        )
        one = chain.op("MatMul", real, cosine, dtype=dtype)
        other = chain.op("MatMul", imaginary, sine, dtype=dtype)
        y = chain.op("Sub", one, other, dtype=dtype)
    else:
        one = chain.op("MatMul", x, cosine, dtype=dtype)
        other = chain.op("MatMul", x, sine, dtype=dtype)
        if parts == 1:
            y = chain.op("Concat", one, other, dtype=dtype, axis=rank - 2)
        else:
            # (a + ib)(c + is) = ac - bs + i(bc + as)
            turned = chain.op("Gather", other, np.array([1, 0]), dtype=dtype, axis=rank - 2)
            turned = chain.op("Mul", turned, np.array([[-1], [1]], dtype), dtype=dtype)
            y = chain.op("Add", one, turned, dtype=dtype)
    back = [order.index(n) for n in range(rank)]
    y = chain.op("Transpose", y, dtype=dtype, shape=chain.node.outputs[0].shape, perm=back)
    if is_half(data.dtype):
        y = chain.cast(y, data.dtype, short="narrowed")
    chain.finish(y)
    known = plan.length.known is not None
    words = f"{plan.length.known[0]} points" if known else "a computed length"  # type: ignore[index]
    return f"MatMuls with cosine and sine of {words} along axis {plan.axis}"


def _tell_scaled(tensor: gs.Tensor) -> None:
    """Gives the tensor's shape to its multiples by a scalar, as torch writes for ``norm=``."""
    for node in tensor.outputs:
        others = [other for other in node.inputs if other is not tensor]
        scaled = node.op in ("Div", "Mul") and all(other.shape in ((), []) for other in others)
        if scaled and node.outputs[0].shape is None:
            node.outputs[0].shape = list(tensor.shape)
            node.outputs[0].dtype = node.outputs[0].dtype or tensor.dtype
            _tell_scaled(node.outputs[0])


def _plan(chain: Chain, x: gs.Tensor, rank: int) -> tuple[gs.Tensor, _Transform]:
    """Axis and sizes, and the signal cut to the points that the transform uses."""
    node = chain.node
    data = node.inputs[0]
    inverse, onesided = bool(node.attrs.get("inverse", 0)), bool(node.attrs.get("onesided", 0))
    axis = _axis(node, chain.graph.opset, rank)
    size = size_of(chain, data, axis)
    given = node.inputs[1] if len(node.inputs) > 1 and node.inputs[1].name else None
    length = size if given is None else _length(chain, given)
    if inverse and onesided:
        if given is None:
            length = (size - 1) * 2
        used = floor_div(length, 2) + 1
    else:
        used = length
    cut = used is not size and not (given is not None and _is_size(given, data, axis))
    if inverse and onesided:
        cut = given is not None
    if cut and (used.known is None or size.known is None or used.known[0] < size.known[0]):
        x = chain.op(
            "Slice", x, np.array([0]), used.data, np.array([axis]), short="cut", dtype=x.dtype
        )
        rows = Value(chain, chain.size(x, axis))
        if used.known is not None and size.known is not None:
            rows = used
    else:
        rows = size
    forward_half = onesided and not inverse
    columns = floor_div(length, 2) + 1 if forward_half else length
    return x, _Transform(axis, inverse, onesided, length, rows, columns)


def _axis(node: gs.Node, opset: int, rank: int) -> int:
    if opset < 20:
        axis = int(node.attrs.get("axis", 1))
    elif len(node.inputs) > 2 and node.inputs[2].name:
        values = values_of(node.inputs[2])
        if values is None:
            raise Refused(f"the axis {node.inputs[2].name} is computed: use a constant")
        axis = int(values.reshape(-1)[0])
    else:
        axis = -2
    return axis % rank


def _length(chain: Chain, given: gs.Tensor) -> Value:
    values = values_of(given)
    if values is not None:
        return Value(chain, values.reshape(-1)[:1].astype(np.int64))
    wide = widen(chain, given, np.dtype(np.int64))
    return Value(chain, chain.op("Reshape", wide, np.array([1]), dtype=np.int64, shape=[1]))


def _is_size(given: gs.Tensor, data: gs.Tensor, axis: int) -> bool:
    """True if the length is computed as the size of this axis, as torch's exporter writes it."""
    elements, dims = elements_of(given), dims_of(data)
    return elements is not None and dims is not None and elements.values == [dims[axis]]


def _matrices(chain: Chain, plan: _Transform, dtype: np.dtype) -> tuple[Any, Any]:
    """Cosine and signed sine, of shape (points, frequencies), scaled by all factors."""
    sizes = [v.known for v in (plan.rows, plan.columns, plan.length)]
    elements = math.prod(int(size[0]) for size in sizes[:2] if size is not None)
    if elements > _MOST:
        raise Refused(
            f"the cosine matrix would have {elements} elements, more than {_MOST}: transform "
            "shorter pieces"
        )
    if all(size is not None for size in sizes) and elements <= _STORED:
        return _stored(plan, dtype)
    return _built(chain, plan, dtype)


def _stored(plan: _Transform, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    rows, columns, length = (
        int(v.known[0]) for v in (plan.rows, plan.columns, plan.length) if v.known is not None
    )
    j, k = np.arange(rows)[:, None], np.arange(columns)[None]
    angles = 2 * np.pi * ((j * k) % length) / length
    factor = 1 / length if plan.inverse else 1.0
    if plan.inverse and plan.onesided:
        # the other half of the frequencies are conjugates of this half
        twice = 2.0 - (j == 0) - (2 * j == length)
        factor = factor * twice
    sign = 1 if plan.inverse else -1
    return (np.cos(angles) * factor).astype(dtype), (sign * np.sin(angles) * factor).astype(dtype)


def _built(chain: Chain, plan: _Transform, dtype: np.dtype) -> tuple[gs.Tensor, gs.Tensor]:
    j, k = plan.rows.upto().reshape(-1, 1).data, plan.columns.upto().data
    length = plan.length.data
    product = chain.op("Mul", j, k, dtype=np.int64)
    # the remainder without Mod, which onnx-tensorrt's operators.md lacks for TensorRT 8
    whole = chain.op("Div", product, length, dtype=np.int64)
    whole = chain.op("Mul", whole, length, dtype=np.int64)
    rest = chain.op("Sub", product, whole, dtype=np.int64)
    # angles from -pi to pi: the rounding error is half of that up to 2 pi
    double = chain.op("Mul", rest, np.array([2]), dtype=np.int64)
    upper = chain.op("Greater", double, length, dtype=np.bool_)
    below = chain.op("Sub", rest, length, dtype=np.int64)
    rest = chain.cast(chain.op("Where", upper, below, rest, dtype=np.int64), dtype)
    points = chain.cast(_tensor(chain, length), dtype)
    turns = chain.op("Div", rest, points, dtype=dtype)
    angles = chain.op("Mul", turns, np.array([2 * np.pi], dtype), short="angles", dtype=dtype)
    cosine = chain.op("Cos", angles, dtype=dtype)
    sine = chain.op("Sin", angles, dtype=dtype)
    if not plan.inverse:
        return cosine, chain.op("Neg", sine, dtype=dtype)
    factor: gs.Tensor = points
    if plan.onesided:
        twice = chain.op("Mul", j, np.array([2]), dtype=np.int64)
        once = [
            chain.cast(chain.op("Equal", *pair, dtype=np.bool_), dtype)
            for pair in ((j, np.array([0])), (twice, length))
        ]
        weight = chain.op("Sub", np.array([2], dtype), once[0], dtype=dtype)
        weight = chain.op("Sub", weight, once[1], dtype=dtype)
        cosine = chain.op("Mul", cosine, weight, dtype=dtype)
        sine = chain.op("Mul", sine, weight, dtype=dtype)
    return (
        chain.op("Div", cosine, factor, dtype=dtype),
        chain.op("Div", sine, factor, dtype=dtype),
    )


def _tensor(chain: Chain, data: np.ndarray | gs.Tensor) -> gs.Tensor:
    return data if isinstance(data, gs.Tensor) else chain.constant(data)


PASS = Pass(
    name="expand_dft",
    run=run,
    targets=EVERY,
    summary="DFT -> MatMuls with cosine and sine",
    fault="TensorRT has no DFT: the parser refuses it ('Plugin not found')",
    evidence=(
        "cases: rtx-1.7 does not parse it, in opset 17 or 20",
        "onnx-tensorrt's operators.md does not list it",
    ),
)
