"""``Col2Im`` (torch's fold) becomes a ConvTranspose with an identity kernel.

TensorRT has no Col2Im: the parsers of RTX 1.7 and 8.6 refuse it. Each column of the input is a
block of the image, and Col2Im sums blocks that overlap. A transposed convolution does the same if
its kernel puts channel k of a block at the block's k-th position.

The transposed convolution covers the image as far as whole blocks reach. If the stride is more
than 1, that may be less than the image. The pass fills the rest with zeros, and then cuts the
padding off.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import floor_div, is_half, join, size_of, widen, work_dtype
from pipeline.passes.lib.values import Value
from pipeline.passes.spread_deconv import spread

_MOST_AXES = 3  # TensorRT's limit for the spatial axes of a ConvTranspose


def run(graph: gs.Graph) -> PassResult:
    """Rewrites Col2Im of 1-D to 3-D images: ``(N, C * block, L) -> (N, C, image...)``.

    N, C, L and the image's sizes may be dynamic or computed. Half precision is computed in
    float32. Refused: a computed block shape, more than three axes, an unknown dtype, and
    dtypes other than float16, bfloat16 and float32.
    """
    return each(graph, "Col2Im", lambda inner, node: _rewrite(Chain(inner, node)))


def _rewrite(chain: Chain) -> str:
    columns, image_shape, block_shape = chain.node.inputs
    given = values_of(block_shape)
    if given is None:
        raise Refused(f"the block shape {block_shape.name} is computed: use a constant")
    block = [int(size) for size in given]
    axes = len(block)
    if axes > _MOST_AXES:
        raise Refused(f"the blocks have {axes} axes: the pass rewrites 1 to {_MOST_AXES}")
    dtype = work_dtype(columns, (np.float32,))
    attrs = chain.node.attrs
    strides = [int(n) for n in attrs.get("strides", [1] * axes)]
    dilations = [int(n) for n in attrs.get("dilations", [1] * axes)]
    pads = [int(n) for n in attrs.get("pads", [0] * 2 * axes)]
    spans = [d * (size - 1) + 1 for d, size in zip(dilations, block, strict=True)]
    places = math.prod(block)

    values = values_of(image_shape)
    image = [
        _pick(chain, image_shape, axis) if values is None else Value(chain, values[axis : axis + 1])
        for axis in range(axes)
    ]
    padded = [size + (pads[n] + pads[n + axes]) for n, size in enumerate(image)]
    counts = [
        floor_div(size - span, stride) + 1
        for size, span, stride in zip(padded, spans, strides, strict=True)
    ]
    blocks = chain.op(
        "Reshape", widen(chain, columns, dtype), join(chain, -1, places, *counts), dtype=dtype
    )
    kernel = np.eye(places, dtype=dtype).reshape(places, 1, *block)
    if max(strides) > 1 and max(dilations) > 1:
        # RTX 1.7 builds no transposed convolution that is both (see spread_deconv)
        kernel, dilations = spread(kernel, dilations), [1] * axes
    summed = chain.op(
        "ConvTranspose", blocks, kernel, dtype=dtype,
        kernel_shape=[*kernel.shape[2:]], strides=strides, dilations=dilations,
    )  # fmt: skip
    rest = [stride - 1 for stride in strides]
    if any(rest):
        longer = np.array([0] * (axes + 4) + rest)
        summed = chain.op("Pad", summed, longer, np.zeros(1, dtype).reshape(()), dtype=dtype)
    if any(rest) or any(pads):
        ends = [size + pads[n] for n, size in enumerate(image)]
        summed = chain.op(
            "Slice", summed, np.array(pads[:axes]), join(chain, *ends),
            np.arange(2, 2 + axes), dtype=dtype,
        )  # fmt: skip
    sizes = join(chain, size_of(chain, columns, 0), -1, *image)
    result = chain.op("Reshape", summed, sizes, dtype=dtype, shape=chain.node.outputs[0].shape)
    if is_half(columns.dtype):
        result = chain.cast(result, columns.dtype, short="narrowed")
    chain.finish(result)
    return f"ConvTranspose with an identity kernel of {places} positions"


def _pick(chain: Chain, sizes: gs.Tensor, axis: int) -> Value:
    """One element of a 1-D int64 tensor, of shape ``(1,)``."""
    picked = chain.op(
        "Slice", sizes, np.array([axis]), np.array([axis + 1]), np.array([0]),
        short="size", dtype=np.int64, shape=[1],
    )  # fmt: skip
    return Value(chain, picked)


PASS = Pass(
    name="expand_col2im",
    run=run,
    targets=EVERY,
    summary="Col2Im -> ConvTranspose with an identity kernel",
    fault="TensorRT has no Col2Im: the parser refuses it",
    evidence=(
        "cases: rtx-1.7 does not parse it",
        "an op of opset 18; TensorRT 8.6 documents opset 17",
    ),
)
