"""Pad and Resize with axes, and the names of GridSample's modes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import values_of
from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lowering._site import Converter, Site, Steps, numbers

# GridSample-20 renamed them; TensorRT up to 11.1 reads the new names as nearest
# (NVIDIA/TensorRT#4646)
_SAMPLING = {"linear": "bilinear", "cubic": "bicubic"}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pad(site: Site) -> Steps:
    node = site.node
    if site.crosses(19) and _text(node.attrs.get("mode", "constant")) == "wrap":
        raise Refused("mode wrap is new in opset 19: pad with Slice and Concat")
    given = site.input(3)
    if not site.crosses(18) or given is None:
        return
    rank = site.rank()
    axes = site.axes(given, rank)
    yield f"pads of axes {axes} written as pads of all {rank} axes"
    pads = node.inputs[1]
    # index of each full pad in the given pads; the index after their end stands for 0
    places = [
        axes.index(n % rank) + len(axes) * (n // rank) if n % rank in axes else 2 * len(axes)
        for n in range(2 * rank)
    ]
    chain = Chain(site.graph, node)
    full = _spread(chain, pads, np.zeros(1, np.int64), places)
    rest = [] if site.input(2) is None else [node.inputs[2]]
    chain.op("Pad", node.inputs[0], full, *rest, **node.attrs)
    chain.finish()


def _resize(site: Site) -> Steps:
    node = site.node
    attrs = dict(node.attrs)
    transform = _text(attrs.get("coordinate_transformation_mode", "half_pixel"))
    if site.crosses(19) and transform == "half_pixel_symmetric":
        raise Refused("coordinate_transformation_mode half_pixel_symmetric is new in opset 19")
    if not site.crosses(18):
        return
    scales, sizes = site.input(2), site.input(3)
    if attrs.pop("antialias", 0):
        raise Refused("antialias is new in opset 18")
    policy = _text(attrs.pop("keep_aspect_ratio_policy", "stretch"))
    if policy != "stretch" and sizes is not None:
        raise Refused(f"keep_aspect_ratio_policy {policy} is new in opset 18")
    if "axes" not in attrs:
        if attrs != node.attrs:
            yield "attributes of opset 18 dropped: they have no effect here"
            node.attrs = attrs
        return
    if transform == "tf_crop_and_resize":
        raise Refused(
            "tf_crop_and_resize with axes is not rewritten: give sizes or scales of all axes"
        )
    rank = site.rank()
    axes = site.axes(attrs.pop("axes"), rank)
    yield f"{'sizes' if scales is None else 'scales'} of axes {axes} written for all {rank} axes"
    data, chain, empty = node.inputs[0], Chain(site.graph, node), gs.Variable.empty
    if scales is not None:
        places = [axes.index(n) if n in axes else len(axes) for n in range(rank)]
        full = _spread(chain, scales, np.ones(1, np.float32), places)
        chain.op("Resize", data, empty(), full, **attrs)
    else:
        assert sizes is not None
        places = [axes.index(n) if n in axes else len(axes) + n for n in range(rank)]
        kept = [data.shape[n] for n in range(rank) if n not in axes]
        if all(isinstance(size, (int, np.integer)) for size in kept):
            own = np.array([s if isinstance(s, (int, np.integer)) else 0 for s in data.shape])
            full = _spread(chain, sizes, own.astype(np.int64), places)
        else:
            whole = chain.op("Shape", data, short="shape", dtype=np.int64, shape=[rank])
            full = _spread(chain, sizes, whole, places)
        chain.op("Resize", data, empty(), empty(), full, **attrs)
    chain.finish()


def _spread(
    chain: Chain, given: gs.Tensor, rest: gs.Tensor | np.ndarray, places: Sequence[int]
) -> gs.Tensor:
    """The entries at `places` of `given` followed by `rest`; a constant if both are constants."""
    values = values_of(given)
    if values is None and given.dtype == np.int64:
        found = numbers(given)
        values = None if found is None else np.array(found, np.int64)
    if values is not None and isinstance(rest, np.ndarray):
        return chain.constant(np.concatenate([values, rest])[list(places)], "full")
    both = chain.op("Concat", given, rest, axis=0, dtype=given.dtype)
    return chain.op(
        "Gather", both, np.array(places, np.int64), short="full",
        dtype=given.dtype, shape=[len(places)],
    )  # fmt: skip


def _grid_sample(site: Site) -> Steps:
    if not site.crosses(20):
        return
    # the text of opset 16 describes only images, but its schema, ONNX Runtime, and TensorRT from
    # 10 on (built with tensorrt-rtx 1.7.1) accept volumes too
    if site.rank() != 4 and site.level < 19:
        raise Refused("before opset 20 GridSample accepts only images of 4 dimensions")
    mode = _text(site.node.attrs.get("mode", "linear"))
    if mode not in _SAMPLING:
        return
    yield f"mode {mode} renamed to its older name {_SAMPLING[mode]}"
    site.node.attrs["mode"] = _SAMPLING[mode]


CONVERTERS: dict[str, Converter] = {
    "GridSample": Converter(_grid_sample),
    "Pad": Converter(_pad, inputs=4),
    "Resize": Converter(_resize, attrs=("antialias", "axes", "keep_aspect_ratio_policy")),
}
