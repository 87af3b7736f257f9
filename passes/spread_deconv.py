"""A ConvTranspose that is strided and dilated gets a kernel with the zeros between its taps.

RTX 1.7 parses such a transposed convolution, but does not build it: 'Strided & Dilated Deconv are
currently not supported'. A dilation of d means ``d - 1`` zeros between two taps of the kernel. With
these zeros in the kernel the dilation is 1, and every size stays the same. ``output_padding``,
``output_shape`` and ``auto_pad`` depend only on the kernel's extent, which does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import FROM_10, RTX
from pipeline.passes.graph_ops import constant, label, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites ConvTranspose with a constant kernel ``(C, M / group, k1, ...)``; any sizes.

    The kernel grows to ``(k - 1) * dilation + 1`` along each axis. Refused: a kernel that is
    computed or is not float32 or float16.
    """
    return each(graph, "ConvTranspose", _rewrite)


def spread(kernel: np.ndarray, dilations: Sequence[int]) -> np.ndarray:
    """The kernel ``(C, M, k1, ...)`` with the zeros of its dilations, one dilation per axis."""
    spans = [(k - 1) * d + 1 for k, d in zip(kernel.shape[2:], dilations, strict=True)]
    wide = np.zeros((*kernel.shape[:2], *spans), kernel.dtype)
    taps: list[Any] = [slice(None, None, step) for step in dilations]
    wide[(..., *taps)] = kernel
    return wide


def _rewrite(_: gs.Graph, node: gs.Node) -> str | None:
    dilations = [int(d) for d in node.attrs.get("dilations", ())]
    strides = [int(s) for s in node.attrs.get("strides", ())]
    if max(dilations, default=1) == 1 or max(strides, default=1) == 1:
        return None
    weight = node.inputs[1]
    kernel = values_of(weight)
    if kernel is None:
        raise Refused(
            f"its kernel {weight.name} is computed: use a constant kernel, or a stride or dilation "
            "of 1"
        )
    if weight.dtype not in (np.float32, np.float16):
        raise Refused(f"its kernel {weight.name} is {weight.dtype}: cast it to float32 or float16")
    wide = spread(kernel, dilations)
    node.inputs[1] = constant(f"{label(node)}/spread", wide)
    node.attrs["kernel_shape"] = [*wide.shape[2:]]
    del node.attrs["dilations"]
    was, now = ("x".join(map(str, array.shape[2:])) for array in (kernel, wide))
    return f"its kernel of {was} taps spread to {now}"


PASS = Pass(
    name="spread_deconv",
    run=run,
    targets=(RTX, FROM_10),
    summary="ConvTranspose with strides and dilations -> zeros between the taps of its kernel",
    fault="the builder fails: 'Strided & Dilated Deconv are currently not supported'",
    evidence=("cases: rtx-1.7 parses it and does not build it",),
)
