"""Reductions and DFT: axes that are an input in later opsets become an attribute.

Reduce* has the axes as an input from opset 18 (ReduceSum from 13), DFT from opset 20. TensorRT 8.6
ignores the input of Reduce* and reduces over all axes (source of onnx-tensorrt 8.6).
"""

from __future__ import annotations

import numpy as np

from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lowering._site import Converter, Site, Steps, numbers

# for other ops with noop_with_empty_axes, the standard does not say whether they still square, or
# take the absolute value or the logarithm
_PLAIN = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd")


def _reduce(site: Site) -> Steps:
    node = site.node
    boolean = node.inputs[0].dtype == np.bool_ and site.crosses(20)
    inputs, attrs = [node.inputs[0]], dict(node.attrs)
    if site.crosses(18):
        given = site.input(1)
        axes = [] if given is None else numbers(given)
        if axes is None:
            raise Refused(
                "its axes are computed, but before opset 18 they are an attribute: use constants"
            )
        noop = bool(attrs.pop("noop_with_empty_axes", 0))
        if noop and not axes:
            if node.op not in _PLAIN:
                raise Refused(
                    "noop_with_empty_axes without axes, which the standard leaves open: give axes"
                )
            yield "Identity: there are no axes, and noop_with_empty_axes is set"
            chain = Chain(site.graph, node)
            chain.op("Identity", node.inputs[0])
            chain.finish()
            return
        if axes:
            attrs["axes"] = axes
        what = f"axes {axes} as an attribute" if axes else "all axes"
        if not boolean and given is None and attrs == node.attrs:
            return
    elif boolean:
        what = ""
        inputs = list(node.inputs)
    else:
        return
    if boolean:
        what = "computed in int32: before opset 20 it lacks booleans" + (
            f"; {what}" if what else ""
        )
    yield what
    if not boolean:
        node.inputs = inputs
        node.attrs = attrs
        return
    chain = Chain(site.graph, node)
    inputs[0] = chain.cast(inputs[0], np.int32)
    chain.cast(chain.op(node.op, *inputs, dtype=np.int32, **attrs), np.bool_, "to_bool")
    chain.finish()


def _dft(site: Site) -> Steps:
    if not site.crosses(20):
        return
    axis, given = -2, site.input(2)
    if given is not None:
        found = numbers(given)
        if found is None or len(found) != 1:
            raise Refused(
                "its axis is computed, but before opset 20 it is an attribute: use a constant"
            )
        axis = found[0]
    yield f"axis {axis} as an attribute"
    site.node.inputs = list(site.node.inputs)[:2]
    site.node.attrs["axis"] = axis


_NAMES = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare",
)  # fmt: skip
CONVERTERS: dict[str, Converter] = {
    **{
        name: Converter(_reduce, attrs=("noop_with_empty_axes",), inputs=2, types=("tensor(bool)",))
        for name in _NAMES
    },
    "DFT": Converter(_dft, inputs=3),
}
