"""QuantizeLinear and DequantizeLinear: opset 21 added blocks and output_dtype, 23 precision."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import label
from pipeline.passes.infra import Refused
from pipeline.passes.lowering._site import Converter, Site, Steps, type_name

_UINT8 = onnx.TensorProto.UINT8


def _quantize(site: Site) -> Steps:
    node = site.node
    _refuse_blocks(site)
    wanted, zero, scale = int(node.attrs.get("output_dtype", 0)), site.input(2), node.inputs[1]
    if node.attrs.get("precision", 0):
        raise Refused("precision is new in opset 23")
    if wanted == 0 or not site.crosses(21):
        return
    if zero is None and wanted != _UINT8:
        if scale.shape is None or not all(isinstance(size, int) for size in scale.shape):
            raise Refused(
                "output_dtype is new in opset 21, and the scale's size is not known: give a zero "
                "point"
            )
        if site.old is None or type_name(wanted) not in site.old.inputs[2].types:
            raise Refused(f"quantizing to {type_name(wanted)} needs a newer opset")
        yield "output_dtype written as the dtype of a zero point of 0"
        dtype = onnx.helper.tensor_dtype_to_np_dtype(wanted)
        zeros = np.zeros([int(size) for size in scale.shape], dtype)
        node.inputs = [*node.inputs[:2], gs.Constant(f"{label(node)}/zero_point", zeros)]
    else:
        yield "output_dtype dropped: it equals the zero point's dtype"
    del node.attrs["output_dtype"]


def _dequantize(site: Site) -> Steps:
    node = site.node
    _refuse_blocks(site)
    wanted = int(node.attrs.get("output_dtype", 0))
    if wanted == 0 or not site.crosses(23):
        return
    if type_name(wanted) != type_name(node.inputs[1].dtype):
        raise Refused("output_dtype is new in opset 23, and differs from the scale's dtype")
    yield "output_dtype dropped: it equals the scale's dtype"
    del node.attrs["output_dtype"]


def _refuse_blocks(site: Site) -> None:
    if site.crosses(21) and int(site.node.attrs.get("block_size", 0)):
        raise Refused("block_size is new in opset 21")
    scale = site.node.inputs[1]
    if scale.shape is not None and len(scale.shape) > 1:
        raise Refused("a scale per block is new in opset 21")


CONVERTERS: dict[str, Converter] = {
    "DequantizeLinear": Converter(_dequantize, attrs=("block_size", "output_dtype")),
    "QuantizeLinear": Converter(_quantize, attrs=("block_size", "output_dtype", "precision")),
}
