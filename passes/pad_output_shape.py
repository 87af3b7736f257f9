"""``ConvTranspose`` with ``output_shape`` gets the pads that the standard computes from it.

TensorRT 8.6.0 builds such a ConvTranspose and silently computes wrong numbers. The standard
computes for each axis ``total = stride * (in - 1) + output_padding + (kernel - 1) * dilation + 1 -
output_shape``. With ``auto_pad=SAME_UPPER`` the half of it that is rounded down is the padding at
the beginning, otherwise the padding at the end. The tests compare it with ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10, Versions
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites ConvTranspose if data and kernel have static spatial sizes.

    Refused: dynamic sizes, and sizes that would need negative padding."""
    return each(graph, "ConvTranspose", _rewrite)


def _rewrite(_: gs.Graph, node: gs.Node) -> str | None:
    if "output_shape" not in node.attrs:
        return None
    node.attrs["pads"] = pads = _pads(node)
    del node.attrs["output_shape"]
    node.attrs.pop("auto_pad", None)
    return f"pads {pads} in place of output_shape"


def _pads(node: gs.Node) -> list[int]:
    data, kernel = node.inputs[:2]
    sizes = [] if data.shape is None else data.shape[2:]
    taps = node.attrs.get("kernel_shape") or ([] if kernel.shape is None else kernel.shape[2:])
    if not taps or not all(isinstance(n, (int, np.integer)) for n in (*sizes, *taps)):
        raise Refused("output_shape with dynamic sizes: give pads and output_padding instead")
    ones = [1] * len(taps)
    wanted = node.attrs["output_shape"][-len(taps) :]
    strides = node.attrs.get("strides", ones)
    dilations = node.attrs.get("dilations", ones)
    more = node.attrs.get("output_padding", [0] * len(taps))
    begin, end = [], []
    for n, size in enumerate(sizes):
        reach = strides[n] * (size - 1) + more[n] + (taps[n] - 1) * dilations[n] + 1
        total = int(reach - wanted[n])
        if total < 0:
            raise Refused(
                f"output_shape {wanted[n]} of spatial axis {n} is larger than {reach}, its size "
                "without padding: use a smaller output_shape"
            )
        low = total // 2 if node.attrs.get("auto_pad") == "SAME_UPPER" else total - total // 2
        begin.append(low)
        end.append(total - low)
    return [*begin, *end]


PASS = Pass(
    name="pad_output_shape",
    run=run,
    targets=(
        BELOW_10,
        Versions("tensorrt", since=(10,), basis="read"),
        Versions("tensorrt_rtx", basis="read"),
    ),
    summary="ConvTranspose with output_shape -> pads",
    fault="TensorRT 8.6 computes wrong numbers, without a warning",
    evidence=(
        "TensorRT 8.6.0 on an H200: spread_deconv's case with output_shape is wrong by as much as "
        "the largest value",
    ),
)
