"""``Resize`` in forms that TensorRT does not read, or reads wrongly, becomes plain ops.

Measured on TensorRT-RTX 1.7.1:

- The parser refuses antialias, keep_aspect_ratio_policy, tf_crop_and_resize, half_pixel_symmetric
  and integer data.
- tf_half_pixel_for_nn with linear or cubic is silently read as half_pixel, half a pixel off. With
  a nearest_mode other than round_prefer_floor the parser refuses it.
- Computed scales fail in the builder.
- The parser refuses ``axes`` with constant sizes over dynamic axes, and with computed scales.

TensorRT 8.6 silently ignores antialias, axes and keep_aspect_ratio_policy (NVIDIA/TensorRT#3560).

A filtered resize (antialias) is a product with a weight matrix per axis. Every other resize is a
weighted sum of 1 (nearest), 2 (linear) or 4 (cubic) gathered pixels per axis. If an axis' sizes
are known the weights are constants; otherwise they are computed from the sizes. A Resize that only
has ``axes`` gets sizes or scales for all axes. Computed scales with a known value become constants.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import constant, drop_unused, label, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.resize import all_sizes, read, used_input, write_out

_SCALES = 2


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every Resize (opset 11 and later) that has one of the forms above.

    float16 is computed in float32. Refused: an unknown rank or dtype, integer data with linear or
    cubic, antialias together with tf_crop_and_resize, a computed region of interest, and a
    region on an axis that keeps its size (ONNX Runtime and the standard differ).
    """

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        why = _why(node)
        if why is None:
            return None
        try:
            return f"{why}: {_rewrite(graph, inner, node)}"
        except Refused as reason:
            raise Refused(f"{why}: {reason}") from reason

    return each(graph, "Resize", rewrite) if graph.opset >= 11 else PassResult(())


def _why(node: gs.Node) -> str | None:
    """The attribute or input that TensorRT does not accept, or None."""
    attrs = node.attrs
    reason = _beyond(node)
    if reason is not None:
        return reason
    for name, harmless in (("antialias", 0), ("keep_aspect_ratio_policy", "stretch")):
        if attrs.get(name, harmless) != harmless:
            return name
    if "axes" in attrs:
        return "axes"
    return "computed scales" if _computed_scales(node) else None


def _beyond(node: gs.Node) -> str | None:
    """The form that TensorRT's Resize cannot express with other attributes or inputs, or None."""
    attrs, dtype = node.attrs, node.inputs[0].dtype
    transform = attrs.get("coordinate_transformation_mode", "half_pixel")
    nearest = attrs.get("mode", "nearest") == "nearest"
    if attrs.get("antialias", 0) and not nearest:
        return "antialias"
    if attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch" and _sized(node):
        return "keep_aspect_ratio_policy"
    if transform in ("tf_crop_and_resize", "half_pixel_symmetric", "tf_half_pixel_for_nn"):
        return str(transform)
    return "integer data" if dtype in (np.int32, np.int64) else None


def _sized(node: gs.Node) -> bool:
    return used_input(node) == _SCALES + 1


def _computed_scales(node: gs.Node) -> bool:
    return used_input(node) == _SCALES and values_of(node.inputs[_SCALES]) is None


def _rewrite(root: gs.Graph, graph: gs.Graph, node: gs.Node) -> str:
    form = read(node)
    source = node.inputs[form.place]
    numbers = form.numbers
    if _beyond(node) or (_computed_scales(node) and numbers is None):
        detail = write_out(graph, form)
        drop_unused(root, source)
        return detail
    for name in ("antialias", "keep_aspect_ratio_policy"):  # they have no effect here
        node.attrs.pop(name, None)
    if form.sized:
        return "sizes of all axes" if all_sizes(graph, form) else "attribute dropped"
    if node.attrs.pop("axes", None) is None and not _computed_scales(node):
        return "attribute dropped"
    assert numbers is not None
    full = np.ones(form.rank, np.float32)
    full[list(form.axes)] = numbers
    node.inputs[_SCALES] = constant(f"{label(node)}/scales", full)
    drop_unused(root, source)
    return f"scales {full.tolist()}"


PASS = Pass(
    name="expand_resize",
    run=run,
    targets=EVERY,
    summary="Resize with antialias, tf_crop_and_resize, axes and the like -> weights or gathers",
    fault="the parser refuses it, or ignores the attribute and gives wrong numbers",
    evidence=(
        "https://github.com/NVIDIA/TensorRT/issues/3560",
        "tensorrt-rtx 1.7.1: 'Antialiasing is not supported currently', and the cases",
    ),
)
