"""Graphs of opsets 18 to 24, for the levels 17 and 19."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.passes.case import Case, Failure, Kind, Shapes

_IMAGES = ({"x": (1, 4, 3, 5)}, {"x": (2, 4, 6, 8)}, {"x": (2, 4, 7, 9)})
_X = "(float[n,4,h,w] x)"


def _case(
    opsets: tuple[int, int],
    name: str,
    text: str,
    shapes: tuple[Shapes, ...] = _IMAGES,
    kind: Kind = "positive",
    fails: Failure = "none",
    **more: Any,
) -> Case:
    """A case. `opsets` is the level and the model's opset. RTX needs only level 19."""
    level, opset = opsets
    known: Mapping[str, Failure] = {"rtx-1.7": fails} if level == 19 else {}
    above = {"tensorrt-8.6": "it reads opset 17 and gets lower_opset_17"} if level == 19 else {}
    more = {"fails": known, "not_for": above, **more}
    return Case(f"lower_opset_{level}", name, kind, text, shapes, opset=opset, **more)


def _refused(opsets: tuple[int, int], name: str, text: str, reason: str, **more: Any) -> Case:
    return _case(opsets, name, text, kind="refusal", reason=reason, **more)


_REDUCTIONS = (
    _case(
        (17, 18),
        "mean over H and W",
        f"{_X} => (float[n,4,1,1] y) <int64[2] a = {{-1, -2}}> {{ y = ReduceMean(x, a) }}",
    ),
    _case(
        (17, 18),
        "axes from a Constant node",
        f"{_X} => (float[n,h,w] y) {{ a = Constant<value_ints=[1]>() "
        "y = ReduceL2<keepdims=0>(x, a) }",
    ),
    _case(
        (17, 18),
        "no axes",
        f"{_X} => (float y) {{ y = ReduceMax<keepdims=0, noop_with_empty_axes=0>(x) }}",
    ),
    _case(
        (17, 18),
        "no axes and nothing to do",
        f"{_X} => (float[n,4,h,w] y) <int64[0] a = {{}}>"
        "{ y = ReduceMin<noop_with_empty_axes=1>(x, a) }",
    ),
    _case(
        (17, 18),
        "mean in the bodies of If",
        "(float[n,4,h,w] x, bool c) => (float[n,4,p,q] y) <int64[1] a = {2}> { y = If(c) <"
        "then_branch = t () => (float[n,4,k,l] u) { u = ReduceMean(x, a) },"
        "else_branch = e () => (float[n,4,i,j] v) { v = ReduceProd(x, a) }> }",
        tuple({**shapes, "c": ()} for shapes in _IMAGES),
    ),
    _case(
        (17, 18),
        "mean in the body of Loop",
        "(float[n,4,h,w] x) => (float[n,4,h,w] y)"
        "<int64 three = {3}, bool yes = {1}, int64[1] a = {1}>"
        "{ y = Loop(three, yes, x) <body = b (int64 i, bool c, float[n,4,h,w] v) => "
        "(bool d, float[n,4,h,w] u) { d = Identity(c) m = ReduceMean(v, a) u = Sub(v, m) }> }",
    ),
    _refused(
        (17, 18),
        "axes as an input",
        "(float[n,4,h,w] x, int64[1] a) => (float[i,j,k,l] y) { y = ReduceMean(x, a) }",
        "computed",
        shapes=({"x": (1, 4, 3, 5), "a": (1,)}, {"x": (2, 4, 6, 8), "a": (1,)}),
        ranges={"a": (0, 4)},
    ),
    _refused(
        (17, 18),
        "sum of squares over no axes",
        f"{_X} => (float[n,4,h,w] y) {{ y = ReduceSumSquare<noop_with_empty_axes=1>(x) }}",
        "leaves open",
    ),
    _case(
        (19, 20),
        "any of booleans",
        "(bool[n,4,h,w] x) => (bool[n,4,h,1] y) <int64[1] a = {-1}> { y = ReduceMax(x, a) }",
        fails="parse",
    ),
)

_SPLITS = (
    _case(
        (17, 18),
        "uneven parts of a fixed axis",
        "(float[n,7] x) => (float[n,3] a, float[n,3] b, float[n,1] c)"
        "{ a, b, c = Split<axis=-1, num_outputs=3>(x) }",
        ({"x": (1, 7)}, {"x": (3, 7)}),
    ),
    _case(
        (17, 18),
        "an axis that the number divides",
        "(float[n,m] x) => (float[n,k] a, float[n,k] b) { a, b = Split<axis=1, num_outputs=2>(x) }",
        ({"x": (1, 4)}, {"x": (3, 12)}),
        dims={"x": ("n", "4*m"), "a": ("n", "2*m"), "b": ("n", "2*m")},
    ),
    _case(
        (17, 18),
        "a dynamic axis",
        f"{_X} => (float[n,4,h,k] a, float[n,4,h,k] b, float[n,4,h,l] c)"
        "{ a, b, c = Split<axis=-1, num_outputs=3>(x) }",
    ),
    _case(
        (17, 18),
        "a tensor of unknown rank",
        f"{_X} => (float[i,j] a, float[k,l] b) <int64[2] to = {{0, -1}}, int64[1] zero = {{0}}>"
        "{ s = Shape(x) d = Slice(s, zero, zero) t = Concat<axis=0>(d, to) y = Reshape(x, t)"
        "a, b = Split<axis=-1, num_outputs=2>(y) }",
    ),
)

_PADS = (
    _case(
        (17, 18),
        "pads of H and W",
        f"{_X} => (float[n,4,i,j] y) <int64[4] p = {{2, 1, 0, 3}}, int64[2] a = {{-1, 2}}>"
        "{ y = Pad(x, p, , a) }",
    ),
    _case(
        (17, 19),
        "reflected",
        f"{_X} => (float[n,4,i,j] y) <int64[4] p = {{1, 1, 2, 2}}, int64[2] a = {{2, 3}}>"
        '{ y = Pad<mode="reflect">(x, p, , a) }',
    ),
    _case(
        (17, 18),
        "computed pads with a value",
        f"{_X} => (float[n,4,i,w] y) <int64[1] two = {{2}}, int64[1] a = {{2}},"
        "int64[1] three = {3}, int64[1] zero = {0}, float v = {0.5}>"
        "{ s = Shape(x) h = Slice(s, two, three) p = Concat<axis=0>(zero, h)"
        "y = Pad(x, p, v, a) }",
    ),
    _refused(
        (17, 19),
        "wrapped",
        f"{_X} => (float[n,4,h,j] y) <int64[8] p = {{0, 0, 0, 1, 0, 0, 0, 1}}>"
        '{ y = Pad<mode="wrap">(x, p) }',
        "opset 19",
    ),
    _refused(
        (17, 18),
        "axes as an input of Pad",
        "(float[n,4,h,w] x, int64[1] a) => (float[i,j,k,l] y) <int64[2] p = {1, 1}>"
        "{ y = Pad(x, p, , a) }",
        "computed",
        shapes=({"x": (1, 4, 3, 5), "a": (1,)}, {"x": (2, 4, 6, 8), "a": (1,)}),
        ranges={"a": (0, 4)},
    ),
)

_VOLUMES: tuple[tuple[int, Kind, str], ...] = (
    (17, "refusal", "4 dimensions"),
    (19, "positive", ""),
)
_IMAGE_OPS = (
    _case(
        (17, 18),
        "scales of H and W",
        f"{_X} => (float[n,4,i,j] y) <float[2] s = {{2., 3.}}>"
        '{ y = Resize<mode="linear", axes=[3, 2]>(x, , s) }',
    ),
    _case(
        (17, 19),
        "sizes of another tensor",
        "(float[n,4,h,w] x, float[n,4,i,j] z) => (float[n,4,i,j] y)"
        "<int64[1] two = {2}, int64[1] four = {4}> { s = Shape(z) t = Slice(s, two, four)"
        'y = Resize<mode="linear", axes=[-2, -1]>(x, , , t) }',
        (
            {"x": (1, 4, 3, 5), "z": (1, 4, 4, 6)},
            {"x": (2, 4, 6, 8), "z": (2, 4, 7, 9)},
        ),
    ),
    _case(
        (17, 18),
        "defaults of opset 18",
        f"{_X} => (float[n,4,i,j] y) <float[4] s = {{1., 1., 1.5, 2.}}>"
        '{ y = Resize<mode="linear", antialias=0, keep_aspect_ratio_policy="stretch">(x, , s) }',
    ),
    _refused(
        (17, 18),
        "antialias",
        f"{_X} => (float[n,4,i,j] y) <float[4] s = {{1., 1., 0.5, 0.5}}>"
        '{ y = Resize<mode="linear", antialias=1>(x, , s) }',
        "antialias",
    ),
    _refused(
        (17, 18),
        "aspect ratio kept, and a ReduceMean that could be lowered",
        f"{_X} => (float[n,4,i,j] y) <int64[4] s = {{2, 4, 8, 8}}, int64[1] a = {{1}}>"
        '{ m = ReduceMean(x, a) d = Sub(x, m) y = Resize<mode="linear", axes=[0, 1, 2, 3], '
        'keep_aspect_ratio_policy="not_larger">(d, , , s) }',
        "not_larger",
        shapes=({"x": (2, 4, 3, 5)}, {"x": (2, 4, 6, 8)}),
    ),
    *(
        _case(
            (level, opset),
            f"GridSample {mode or 'by default'} of opset {opset} for {level}",
            "(float[n,3,h,w] x, float[n,i,j,2] g) => (float[n,3,i,j] y)"
            f"{{ y = GridSample{mode}(x, g) }}",
            (
                {"x": (1, 3, 4, 5), "g": (1, 3, 2, 2)},
                {"x": (2, 3, 6, 7), "g": (2, 4, 5, 2)},
            ),
            ranges={"g": (-1.2, 1.2)},
        )
        for level, opset, mode in (
            (19, 20, '<mode="linear">'),
            (19, 22, '<mode="cubic">'),
            (19, 20, ""),
            (17, 22, '<mode="linear">'),
        )
    ),
    *(
        _case(
            (level, 20),
            f"GridSample of volumes for {level}",
            "(float[n,2,d,h,w] x, float[n,i,j,k,3] g) => (float[n,2,i,j,k] y)"
            '{ y = GridSample<mode="linear">(x, g) }',
            (
                {"x": (1, 2, 3, 4, 5), "g": (1, 2, 3, 4, 3)},
                {"x": (2, 2, 4, 5, 6), "g": (2, 3, 4, 5, 3)},
            ),
            kind,
            reason=reason,
        )
        for level, kind, reason in _VOLUMES
    ),
)

_OTHERS = (
    *(
        _case(
            (level, 21),
            f"GroupNormalization in {dtype} for {level}",
            f"({dtype}[n,4,h,w] x, {dtype}[4] s, {dtype}[4] b) => ({dtype}[n,4,h,w] y)"
            "{ y = GroupNormalization<num_groups=2, epsilon=0.01>(x, s, b) }",
            tuple({**shapes, "s": (4,), "b": (4,)} for shapes in _IMAGES),
        )
        for level, dtype in ((17, "float"), (19, "float16"))
    ),
    _case(
        (19, 21),
        "GroupNormalization of sequences",
        "(float[n,6,l] x, float[6] s, float[6] b) => (float[n,6,l] y)"
        "{ y = GroupNormalization<num_groups=3>(x, s, b) }",
        ({"x": (1, 6, 2), "s": (6,), "b": (6,)}, {"x": (2, 6, 9), "s": (6,), "b": (6,)}),
    ),
    _case(
        (19, 20),
        "IsInf in half",
        "(float16[n,4] x) => (bool[n,4] y) { y = IsInf(x) }",
        ({"x": (1, 4)}, {"x": (3, 4)}),
    ),
    _case(
        (19, 24),
        "Cast with round_mode",
        f'{_X} => (float16[n,4,h,w] y) {{ y = Cast<to=10, round_mode="up">(x) }}',
    ),
    _case(
        (19, 22),
        "nodes that mean the same",
        f"{_X} => (float[n,4,i,j] y) {{ a = MaxPool<kernel_shape=[2, 2]>(x) y = Softplus(a) }}",
    ),
    _case(
        (19, 21),
        "quantized to int8 without a zero point",
        f"{_X} => (float[n,4,h,w] y) <float s = {{0.5}}> {{"
        "q = QuantizeLinear<output_dtype=3>(x, s) y = DequantizeLinear(q, s) }",
    ),
    _refused(
        (17, 18),
        "bits",
        "(int32[n,4] x, int32[n,4] z) => (int32[n,4] y) { y = BitwiseAnd(x, z) }",
        "opset 17 has no form",
        shapes=({"x": (1, 4), "z": (1, 4)}, {"x": (3, 4), "z": (3, 4)}),
    ),
    _refused(
        (17, 18),
        "scatter with max",
        "(float[n,4] x, int64[k,4] i, float[k,4] u) => (float[n,4] y)"
        '{ y = ScatterElements<reduction="max">(x, i, u) }',
        "reduction max",
        shapes=(
            {"x": (2, 4), "i": (1, 4), "u": (1, 4)},
            {"x": (3, 4), "i": (2, 4), "u": (2, 4)},
        ),
        ranges={"i": (0, 2)},
    ),
    _refused(
        (17, 19),
        "AveragePool with dilations",
        f"{_X} => (float[n,4,i,j] y)"
        "{ y = AveragePool<kernel_shape=[2, 2], dilations=[2, 2]>(x) }",
        "dilations",
    ),
    _case(
        (17, 17),
        "opset 17 already",
        f"{_X} => (float[n,4,1,1] y) {{ y = ReduceMean<axes=[2, 3]>(x) }}",
        kind="near miss",
    ),
    _case(
        (19, 19),
        "opset 19 already",
        f"{_X} => (float[n,4,1,1] y) <int64[2] a = {{2, 3}}> {{ y = ReduceMean(x, a) }}",
        kind="near miss",
    ),
)

CASES: tuple[Case, ...] = (*_REDUCTIONS, *_SPLITS, *_PADS, *_IMAGE_OPS, *_OTHERS)
