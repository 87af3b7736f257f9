"""``Resize`` with computed ``sizes`` gets constant ``scales`` if they are whole numbers.

torch's exporter computes the output sizes of an upsampling from the shape of another tensor.
TensorRT 8.6 must follow this shape tensor, and often cannot (onnx-tensorrt#389, #398). If every
output size is a whole multiple of the input's for all sizes, the multiples mean the same. The ONNX
standard defines scale = size_out / size_in for given sizes, and size_out = floor(size_in * scale)
for given scales. Both are exact for whole numbers. Every coordinate_transformation_mode and
nearest_mode uses only these numbers (align_corners uses the two lengths).

The multiples come from the arithmetic that computes the sizes, and from the symbolic dims in
value_info (``s17`` -> ``8*s17``). If they disagree, the node is refused. tf_crop_and_resize,
keep_aspect_ratio_policy, antialias, axes and computed scales belong to expand_resize, which runs
before.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from pipeline.machine.target import Versions
from pipeline.passes.graph_ops import constant, drop_unused, label, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.sizes import Elements, dims_of, elements_of

_SCALES, _SIZES = 2, 3


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every Resize (opset 11 and later) whose output is a whole multiple of its input.

    Scales are float32 of shape ``(rank,)``. Nodes that computed the sizes are removed if nothing
    else reads them. Refused: a computed size that is not provably a constant whole multiple, and
    the attributes named above.
    """

    def rewrite(_: gs.Graph, node: gs.Node) -> str | None:
        if not _sizes_are_computed(node):
            return None
        scales, source = _scales(node), node.inputs[_SIZES]
        values = constant(f"{label(node)}/scales", np.array(scales, np.float32))
        node.inputs = [*node.inputs[:_SCALES], values]
        dropped = drop_unused(graph, source)
        return f"scales {scales} in place of computed sizes; {dropped} nodes dropped"

    return each(graph, "Resize", rewrite) if graph.opset >= 11 else PassResult(())


def _sizes_are_computed(node: gs.Node) -> bool:
    if len(node.inputs) <= _SIZES or node.inputs[_SIZES].is_empty():
        return False
    return values_of(node.inputs[_SIZES]) is None


def _scales(node: gs.Node) -> list[int]:
    mode = node.attrs.get("coordinate_transformation_mode", "half_pixel")
    for reason, found in (
        ("coordinate_transformation_mode=tf_crop_and_resize", mode == "tf_crop_and_resize"),
        ("antialias", node.attrs.get("antialias", 0) != 0),
        ("axes", "axes" in node.attrs),
        (
            "keep_aspect_ratio_policy",
            node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch",
        ),
    ):
        if found:
            raise Refused(f"{reason} changes the meaning of the sizes")
    return _ratios(node, elements_of(node.inputs[_SIZES]))


def _ratios(node: gs.Node, followed: Elements | None) -> list[int]:
    before, after = dims_of(node.inputs[0]), dims_of(node.outputs[0])
    if before is None:
        raise Refused(f"the rank of {node.inputs[0].name} is not known: declare it in value_info")
    found, reasons = [], []
    for sizes in (None if followed is None else followed.values, after):
        if sizes is None or len(sizes) != len(before):
            continue
        try:
            pairs = zip(sizes, before, strict=True)
            found.append(_whole([sympy.cancel(a / b) for a, b in pairs]))
        except Refused as reason:
            reasons.append(str(reason))
    if not found:
        raise Refused(reasons[0] if reasons else "the output's sizes are not known")
    if found[0] != found[-1]:
        raise Refused(
            f"the computed sizes are {found[0]} times the input's, but value_info says {found[1]}: "
            "correct value_info"
        )
    return found[0]


def _whole(ratios: list[sympy.Expr]) -> list[int]:
    for axis, ratio in enumerate(ratios):
        if not (ratio.is_Integer and ratio >= 1):
            raise Refused(
                f"axis {axis}: output / input is {ratio}, not a constant whole number. If TensorRT "
                "cannot follow the size, resize by a whole factor"
            )
    return [int(ratio) for ratio in ratios]


PASS = Pass(
    name="scale_resize",
    run=run,
    targets=(Versions("tensorrt", below=(10,), basis="read"),),
    summary="Resize with computed sizes -> constant whole scales",
    fault="the parser fails on sizes that it cannot follow as a shape tensor",
    evidence=(
        "https://github.com/onnx/onnx-tensorrt/issues/389",
        "https://github.com/onnx/onnx-tensorrt/issues/398",
        "RAFT-small's upsampling from torch: s17 -> 8*s17",
    ),
    tolerable=True,  # TensorRT parses sizes that are slices of a Shape
)
