"""Pools that round their sizes up, from torch's exporters and in other forms."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Failure, Kind

# every remainder of a stride of 2 or 3
_SIZES = tuple({"x": (1, 2, n, n + 1)} for n in (4, 5, 6, 9))


def _case(
    name: str,
    op: str,
    attributes: str,
    fails: Failure = "none",
    kind: Kind = "positive",
    **more: Any,
) -> Case:
    dtype = more.pop("dtype", "float")
    text = (
        f"({dtype}[n,2,h,w] x) => ({dtype}[n,2,p,q] y) {{ y = {op}<ceil_mode=1, {attributes}>(x) }}"
    )
    return Case(
        "pad_ceil_pools", name, kind, **{"text": text, "shapes": _SIZES, **more},
        fails={"rtx-1.7": fails},
    )  # fmt: skip


def _window(kernel: int, stride: int, begin: int = 0, end: int | None = None) -> str:
    end = begin if end is None else end
    return (
        f"kernel_shape=[{kernel},{kernel}], strides=[{stride},{stride}], "
        f"pads=[{begin},{begin},{end},{end}]"
    )


CASES: tuple[Case, ...] = (
    _case("max, stride beyond the kernel", "MaxPool", _window(2, 3), "sizes"),
    _case("max, padding", "MaxPool", _window(3, 3, 1), "sizes", opset=13),
    _case("max, half", "MaxPool", _window(2, 2, 1), "sizes", dtype="float16", opset=17),
    _case("max, opset 22", "MaxPool", _window(3, 3, 1), "sizes", opset=22),
    _case("max, padding at the end", "MaxPool", _window(2, 3, 0, 1), "sizes", opset=11),
    _case(
        "max, auto_pad VALID", "MaxPool",
        'auto_pad="VALID", kernel_shape=[2,2], strides=[3,3]', "sizes",
    ),
    _case(
        "max, one axis of two", "MaxPool",
        "kernel_shape=[3,3], strides=[2,3], pads=[1,1,1,1]", "sizes",
    ),
    _case("average", "AveragePool", _window(2, 3), "sizes"),
    _case("average, padding", "AveragePool", _window(3, 3, 1), "sizes"),
    _case(
        "average, padding counts", "AveragePool",
        _window(3, 3, 1) + ", count_include_pad=1", "sizes",
    ),
    _case(
        "average, uneven padding counts", "AveragePool",
        _window(3, 4, 1, 0) + ", count_include_pad=1", "sizes", opset=22,
    ),
    _case(
        "average, no padding to count", "AveragePool",
        _window(2, 3) + ", count_include_pad=1", "sizes", opset=13,
    ),
    _case("norm", "LpPool", _window(3, 3, 1), "sizes"),
    _case(
        "1-D", "MaxPool", "",
        text="(float[n,2,l] x) => (float[n,2,p] y) "
        "{ y = MaxPool<ceil_mode=1, kernel_shape=[2], strides=[3]>(x) }",
        shapes=({"x": (1, 2, 5)}, {"x": (2, 2, 6)}), fails="sizes",
    ),
    _case(
        "3-D", "AveragePool", "",
        text="(float[n,2,d,h,w] x) => (float[n,2,p,q,r] y) "
        "{ y = AveragePool<ceil_mode=1, kernel_shape=[3,3,3], strides=[3,3,3], "
        "pads=[1,1,1,1,1,1], count_include_pad=1>(x) }",
        shapes=({"x": (1, 2, 5, 6, 7)}, {"x": (2, 2, 8, 9, 5)}), fails="sizes",
    ),
    _case(
        "in a branch", "MaxPool", "",
        text="(float[n,2,h,w] x, bool c) => (float[n,2,p,q] y) { y = If(c) <"
        "then_branch = t () => (float[n,2,p,q] a) "
        "{ a = MaxPool<ceil_mode=1, kernel_shape=[2,2], strides=[3,3]>(x) }, "
        "else_branch = e () => (float[n,2,p,q] b) "
        "{ b = AveragePool<ceil_mode=1, kernel_shape=[2,2], strides=[3,3]>(x) }> }",
        shapes=({"x": (1, 2, 5, 6), "c": ()}, {"x": (2, 2, 9, 9), "c": ()}), fails="sizes",
    ),
    _case(
        "static size, opset 22", "MaxPool", "",
        text="(float[n,2,6,5] x) => (float[n,2,p,q] y) "
        "{ y = MaxPool<ceil_mode=1, kernel_shape=[2,2], strides=[3,3]>(x) }",
        shapes=({"x": (1, 2, 6, 5)}, {"x": (3, 2, 6, 5)}), fails="sizes", opset=22,
    ),
    _case("kernel as large as the stride", "MaxPool", _window(2, 2), kind="near miss"),
    _case("padding within the kernel", "MaxPool", _window(3, 2, 1), kind="near miss"),
    _case(
        "average over the edge, kernel as large as the stride", "AveragePool",
        _window(2, 2) + ", count_include_pad=1", kind="near miss",
    ),
    _case(
        "average over the edge, padding within the kernel", "AveragePool",
        _window(3, 2, 1) + ", count_include_pad=1", kind="near miss",
    ),
    _case(
        "auto_pad SAME_UPPER", "MaxPool",
        'auto_pad="SAME_UPPER", kernel_shape=[3,3], strides=[3,3]', kind="near miss",
    ),
    _case(
        "static size that leaves no rest", "MaxPool", "",
        text="(float[n,2,5,8] x) => (float[n,2,2,3] y) "
        "{ y = MaxPool<ceil_mode=1, kernel_shape=[2,2], strides=[3,3]>(x) }",
        shapes=({"x": (1, 2, 5, 8)}, {"x": (3, 2, 5, 8)}), kind="near miss",
    ),
    _case(
        "rounded down", "MaxPool", "",
        text="(float[n,2,h,w] x) => (float[n,2,p,q] y) "
        "{ y = MaxPool<kernel_shape=[2,2], strides=[3,3]>(x) }",
        kind="near miss",
    ),
    _case(
        "static size that ONNX infers wrongly", "MaxPool", "",
        text="(float[n,2,6,5] x) => (float[n,2,p,q] y) "
        "{ z = MaxPool<ceil_mode=1, kernel_shape=[2,2], strides=[3,3]>(x) y = Relu(z) }",
        shapes=({"x": (1, 2, 6, 5)}, {"x": (3, 2, 6, 5)}), fails="sizes",
        kind="refusal", reason="is stated or inferred as 3, but is 2",
    ),
)  # fmt: skip
