"""DeformConv, as torchvision's deform_conv2d."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.passes.case import Case, Kind, Shapes


def _deformed(
    name: str,
    *,
    kernel: tuple[int, int] = (3, 3),
    groups: tuple[int, int] = (1, 1),
    optional: Collection[str] = (),
    attributes: str = "",
    images: tuple[tuple[int, int, int, int, int], ...] = ((1, 5, 6, 3, 4), (2, 7, 8, 5, 6)),
    dtype: str = "float",
    **more: Any,
) -> Case:
    """A DeformConv.

    Args:
        groups: numbers of weight groups and of offset groups.
        optional: which of the inputs ``bias`` and ``mask`` are given.
    """
    weight_groups, offset_groups = groups
    bias, mask = "bias" in optional, "mask" in optional
    kind: Kind = more.pop("kind", "positive")
    fails = {"rtx-1.7": "parse"} if kind == "positive" else {}
    high, wide = kernel
    places = high * wide * offset_groups
    inputs = [
        f"{dtype}[n,4,h,w] x",
        f"{dtype}[6,{4 // weight_groups},{high},{wide}] k",
        f"{dtype}[n,{places * 2},p,q] o",
    ]
    inputs += [f"{dtype}[6] b"] * bias + [f"{dtype}[n,{places},p,q] m"] * mask
    given = "x, k, o" + (", b" if bias else ", " if mask else "") + (", m" if mask else "")
    parts = [f"group={weight_groups}, offset_group={offset_groups}"]
    attributes = ", ".join(parts + [attributes] * bool(attributes))
    text = (
        f"({', '.join(inputs)}) => ({dtype}[n,6,p,q] y) {{ y = DeformConv<{attributes}>({given}) }}"
    )
    shapes: list[Shapes] = []
    for n, h, w, p, q in images:
        shape = {
            "x": (n, 4, h, w),
            "k": (6, 4 // weight_groups, high, wide),
            "o": (n, places * 2, p, q),
            "b": (6,),
            "m": (n, places, p, q),
        }
        left_out = {"b"} - {"b" * bias} | {"m"} - {"m" * mask}
        shapes.append({k: v for k, v in shape.items() if k not in left_out})
    return Case(
        "expand_deform_conv", name, kind, text, tuple(shapes),
        **{"fails": fails, "opset": 19, **more},
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    _deformed("plain"),
    _deformed("mask and bias", optional=("bias", "mask")),
    _deformed("mask", optional=("mask",)),
    _deformed("bias", optional=("bias",)),
    _deformed("groups", groups=(2, 1), optional=("mask",)),
    _deformed("offset groups", groups=(1, 2), optional=("mask",)),
    _deformed("groups and offset groups", groups=(2, 4), optional=("bias",)),
    _deformed(
        "strides, pads, dilations",
        attributes="strides=[2,1], pads=[1,2,1,2], dilations=[1,2]",
        images=((1, 5, 6, 3, 6), (2, 8, 9, 4, 9)),
        optional=("mask",),
    ),
    _deformed("kernel of 1 by 2", kernel=(1, 2), images=((1, 1, 3, 1, 2), (2, 4, 5, 4, 4))),
    _deformed(
        "image of one column",
        kernel=(2, 1),
        images=((1, 3, 1, 2, 1), (2, 4, 1, 3, 1)),
    ),
    _deformed("opset 22", optional=("mask",), opset=22, fails={"rtx-1.7": "parse"}),
    Case(
        "expand_deform_conv",
        "Conv",
        "near miss",
        "(float[n,4,h,w] x, float[6,4,3,3] k) => (float[n,6,p,q] y) { y = Conv(x, k) }",
        ({"x": (1, 4, 5, 6), "k": (6, 4, 3, 3)},),
        not_for={
            "tensorrt-8.6": "parse: The input tensor shape misaligns with the input kernel shape."
        },
    ),
    Case(
        "expand_deform_conv",
        "Conv that gives its kernel's shape",
        "near miss",
        "(float[n,4,h,w] x, float[6,4,3,3] k) => (float[n,6,p,q] y) "
        "{ y = Conv<kernel_shape=[3,3]>(x, k) }",
        ({"x": (1, 4, 5, 6), "k": (6, 4, 3, 3)},),
    ),
    Case(
        "expand_deform_conv",
        "kernel of unknown size",
        "refusal",
        "(float[n,4,h,w] x, float[6,4,a,b] k, float[n,18,p,q] o) => (float[n,6,p,q] y) "
        "{ y = DeformConv(x, k, o) }",
        ({"x": (1, 4, 5, 6), "k": (6, 4, 3, 3), "o": (1, 18, 3, 4)},),
        opset=19,
        reason="axis 2 of k",
    ),
)
