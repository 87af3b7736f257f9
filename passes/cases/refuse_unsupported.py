"""Ops that TensorRT cannot run and no pass fixes, one graph per op; and near misses."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Failure, Kind, Shapes

_IMAGES = ({"x": (1, 3, 6, 4)}, {"x": (2, 3, 8, 7)})
_ROWS = ({"x": (2, 5)}, {"x": (3, 9)})
_NAMES = {"": "refuse_unsupported", "8": "refuse_unsupported_below_10"}
_NAMES["rtx"] = "refuse_unsupported_rtx"


def _case(
    family: str,
    name: str,
    text: str,
    shapes: tuple[Shapes, ...] = _ROWS,
    fails: Failure = "parse",
    kind: Kind = "refusal",
    **more: Any,
) -> Case:
    return Case(
        _NAMES[family], name, kind, text, shapes, "TensorRT" if kind == "refusal" else "",
        fails={} if family == "8" else {"rtx-1.7": fails}, **more,
    )  # fmt: skip


def _row(body: str, output: str = "float[p,q] y", values: str = "") -> str:
    return f"(float[n,m] x) => ({output}) {values} {{ {body} }}"


_CHOICE = "<then_branch = tb () => ({0} tt) {{ {1} }}, else_branch = eb () => ({2} ee) {{ {3} }}>"
_IMAGE = "float[n,3,h,w]"
_LABELS = ({"x": (2, 4), "t": (2,)}, {"x": (3, 4), "t": (3,)})
_BYTES = ({"x": (1, 1, 6, 4)}, {"x": (2, 1, 8, 7)})
_CHOSEN = tuple({**shapes, "c": ()} for shapes in _IMAGES)

_NOWHERE = (
    _case(
        "", "SequenceConstruct and SequenceAt",
        _row("s = SequenceConstruct(x, x) y = SequenceAt(s, z)", values="<int64 z = {0}>"),
    ),
    _case(
        "", "SplitToSequence",
        _row("s = SplitToSequence<axis=1>(x) y = SequenceAt(s, z)", values="<int64 z = {0}>"),
    ),
    _case(
        "", "SequenceEmpty, SequenceInsert, ConcatFromSequence",
        _row("s = SequenceEmpty() t = SequenceInsert(s, x) y = ConcatFromSequence<axis=1>(t)"),
    ),
    _case(
        "", "SequenceLength", _row("s = SequenceConstruct(x, x) y = SequenceLength(s)", "int64 y")
    ),
    _case(
        "", "TfIdfVectorizer",
        "(int64[n,m] x) => (float[p,q] y) { y = TfIdfVectorizer<max_gram_length=1, "
        'max_skip_count=0, min_gram_length=1, mode="TF", ngram_counts=[0], '
        "ngram_indexes=[0,1], pool_int64s=[1,2]>(x) }",
    ),
    _case(
        "", "Det", "(float[n,3,3] x) => (float[n] y) { y = Det(x) }",
        ({"x": (1, 3, 3)}, {"x": (2, 3, 3)}),
    ),
    _case(
        "", "MaxPool with indices, MaxUnpool",
        "(float[2,3,8,8] x) => (float[2,3,8,8] y) { "
        "a, b = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) "
        "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(a, b) }",
        ({"x": (2, 3, 8, 8)},),
    ),
    _case(
        "", "MaxPool with indices",
        f"({_IMAGE} x) => (float[p,q,r,s] y, int64[p,q,r,s] i) "
        "{ y, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }",
        _IMAGES,
    ),
    _case(
        "", "MaxRoiPool",
        f"({_IMAGE} x) => (float[1,3,2,2] y) <float[1,5] r = {{0,0,0,3,3}}> "
        "{ y = MaxRoiPool<pooled_shape=[2,2]>(x, r) }",
        _IMAGES,
    ),
    _case(
        "", "BitShift",
        '(uint8[n,m] x) => (uint8[n,m] y) <uint8 k = {1}> { y = BitShift<direction="LEFT">(x, k) }',
    ),
    _case(
        "", "ConvInteger",
        "(uint8[n,1,h,w] x) => (int32[p,q,r,s] y) <uint8[1,1,2,2] k = {1,2,3,4}> "
        "{ y = ConvInteger(x, k) }",
        _BYTES,
    ),
    _case(
        "", "QLinearConv",
        "(uint8[n,1,h,w] x) => (uint8[p,q,r,t] y) <uint8[1,1,2,2] k = {1,2,3,4}, "
        "float s = {0.1}, uint8 z = {0}> { y = QLinearConv(x, s, z, k, s, z, s, z) }",
        _BYTES,
    ),
    _case(
        "", "MatMulInteger",
        "(uint8[n,2] x) => (int32[p,q] y) <uint8[2,2] k = {1,2,3,4}> { y = MatMulInteger(x, k) }",
        ({"x": (1, 2)}, {"x": (3, 2)}),
    ),
    _case(
        "", "QLinearMatMul",
        "(uint8[n,2] x) => (uint8[p,q] y) <uint8[2,2] k = {1,2,3,4}, float s = {0.1}, "
        "uint8 z = {0}> { y = QLinearMatMul(x, s, z, k, s, z, s, z) }",
        ({"x": (1, 2)}, {"x": (3, 2)}),
    ),
    _case(
        "", "QuantizeLinear with a zero point",
        _row(
            "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, o)",
            "float[n,m] y", "<float s = {0.25}, int8 z = {2}, int8 o = {0}>",
        ),
    ),
    _case(
        "", "DequantizeLinear with a zero point",
        _row(
            "q = QuantizeLinear(x, s, o) y = DequantizeLinear(q, s, z)",
            "float[n,m] y", "<float s = {0.25}, int8 z = {2}, int8 o = {0}>",
        ),
    ),
    _case(
        "", "QuantizeLinear with a zero point of 0",
        _row(
            "q = QuantizeLinear(x, s, o) y = DequantizeLinear(q, s, o)",
            "float[n,m] y", "<float s = {0.25}, int8 o = {0}>",
        ),
        kind="near miss", fails="none",
    ),
    _case(
        "", "DynamicQuantizeLinear",
        _row("y, s, z = DynamicQuantizeLinear(x)", "uint8[p,q] y, float s, uint8 z"),
    ),
    _case(
        "", "SoftmaxCrossEntropyLoss",
        "(float[n,4] x, int64[n] t) => (float y) { y = SoftmaxCrossEntropyLoss(x, t) }",
        _LABELS, ranges={"t": (0, 4)},
    ),
    _case(
        "", "NegativeLogLikelihoodLoss",
        "(float[n,4] x, int64[n] t) => (float y) { y = NegativeLogLikelihoodLoss(x, t) }",
        _LABELS, ranges={"t": (0, 4)},
    ),
    _case(
        "", "MelWeightMatrix",
        "(float[n,5] x) => (float[n,4] y) <int64 a = {4}, int64 b = {8}, int64 c = {1000}, "
        "float d = {0}, float f = {500}> { k = MelWeightMatrix(a, b, c, d, f) y = MatMul(x, k) }",
        ({"x": (2, 5)}, {"x": (3, 5)}),
    ),
    _case(
        "", "BatchNormalization in training",
        f"({_IMAGE} x) => ({_IMAGE} y) <float[3] s = {{1,2,3}}> "
        "{ y, a, b = BatchNormalization<training_mode=1>(x, s, s, s, s) }",
        _IMAGES,
    ),
    _case(
        "", "Dropout in training",
        _row("y = Dropout(x, r, t)", "float[n,m] y", "<float r = {0}, bool t = {1}>"),
    ),
    _case(
        "", "MaxPool, BatchNormalization and Dropout for inference",
        f"({_IMAGE} x) => (float[p,q,r,t] y) <float[3] s = {{1,2,3}}, float z = {{0}}, "
        "bool no = {0}> { a = MaxPool<kernel_shape=[2,2]>(x) "
        "b = BatchNormalization(a, s, s, s, s) y = Dropout(b, z, no) }",
        _IMAGES, "none", "near miss",
    ),
    _case(
        "", "TopK of 3841",
        "(float[n,m] x) => (float[n,3841] y, int64[n,3841] i) <int64[1] k = {3841}> "
        "{ y, i = TopK<axis=1>(x, k) }",
        ({"x": (1, 4000)}, {"x": (2, 5000)}), "build",
    ),
    _case(
        "", "TopK of 3840",
        "(float[n,m] x) => (float[n,3840] y, int64[n,3840] i) <int64[1] k = {3840}> "
        "{ y, i = TopK<axis=1>(x, k) }",
        ({"x": (1, 4000)}, {"x": (2, 5000)}), "none", "near miss",
    ),
    _case(
        "", "TopK of a computed number",
        "(float[n,m] x) => (float[n,k] y, int64[n,k] i) <int64[1] one = {1}> "
        "{ s = Shape(x) k = Gather(s, one) y, i = TopK<axis=1>(x, k) }",
        ({"x": (1, 40)}, {"x": (2, 50)}), "none", "near miss",
    ),
    _case(
        "", "AveragePool with dilations",
        f"({_IMAGE} x) => (float[p,q,r,s] y) "
        "{ y = AveragePool<kernel_shape=[2,2], dilations=[2,2]>(x) }",
        _IMAGES, opset=19,
    ),
    _case(
        "", "MaxPool with dilations",
        f"({_IMAGE} x) => (float[p,q,r,s] y) "
        "{ y = MaxPool<kernel_shape=[2,2], dilations=[2,2]>(x) }",
        _IMAGES,
    ),
)  # fmt: skip

_TWO_RANKS = (
    f"({_IMAGE} x) => (float y) <float z = {{0}}, int64[1] flat = {{-1}}> {{ "
    "m = ReduceMax<keepdims=0>(x) c = Greater(m, z) r = If(c) "
    + _CHOICE.format("float[p,q,r,s]", "tt = Relu(x)", "float[p]", "ee = Reshape(x, flat)")
    + "y = ReduceSum<keepdims=0>(r) }"
)
_TWO_SIZES = (
    f"({_IMAGE} x, bool c) => (float[n,q,h,w] y) {{ y = If(c) "
    + _CHOICE.format(_IMAGE, "tt = Relu(x)", "float[n,6,h,w]", "ee = Concat<axis=1>(x, x)")
    + "}"
)
_STATIC_SIZES = (
    "(float[2,3,4,5] x, bool c) => (float[2,q,4,5] y) { y = If(c) "
    + _CHOICE.format(
        "float[p,q,r,s]", "tt = Relu(x)", "float[p,q,r,s]", "ee = Concat<axis=1>(x, x)"
    )
    + "}"
)
_KNOWN_SIZES = _STATIC_SIZES.replace("[p,q,r,s] tt", "[2,3,4,5] tt").replace(
    "[p,q,r,s] ee", "[2,6,4,5] ee"
)
_STATIC = ({"x": (2, 3, 4, 5), "c": ()},)
_VOLUMES = (
    "(float[n,2,d,h,w] x, float[n,i,j,k,3] g) => (float[n,2,i,j,k] y) {{ y = GridSample{}(x, g) }}"
)
_SAMPLED = (
    {"x": (1, 2, 3, 4, 5), "g": (1, 2, 3, 4, 3)},
    {"x": (2, 2, 4, 5, 6), "g": (2, 3, 4, 5, 3)},
)

_BELOW_10 = (
    _case(
        "8", "GridSample of volumes, opset 20", _VOLUMES.format('<mode="linear">'), _SAMPLED,
        opset=20, ranges={"g": (-1.2, 1.2)},
    ),
    _case(
        "8", "GridSample of volumes, opset 16", _VOLUMES.format(""), _SAMPLED,
        opset=16, ranges={"g": (-1.2, 1.2)},
    ),
    _case(
        "8", "GridSample of images",
        "(float[n,3,h,w] x, float[n,i,j,2] g) => (float[n,3,i,j] y) { y = GridSample(x, g) }",
        ({"x": (1, 3, 4, 5), "g": (1, 2, 2, 2)}, {"x": (2, 3, 6, 7), "g": (2, 4, 5, 2)}),
        kind="near miss", opset=16, ranges={"g": (-1.2, 1.2)},
    ),
    _case(
        "8", "STFT",
        "(float[n,t,1] x) => (float[n,f,5,2] y) <int64 s = {4}, "
        "float[8] w = {1,1,1,1,1,1,1,1}> { y = STFT(x, s, w) }",
        ({"x": (1, 32, 1)},), opset=17,
    ),
    _case("8", "Unique", "(float[h] x) => (float[k] y) { y = Unique(x) }",
          ({"x": (2,)}, {"x": (9,)})),
    _case("8", "If on data with branches of two ranks", _TWO_RANKS, _IMAGES),
    _case("8", "If on an input with branches of two sizes", _TWO_SIZES, _CHOSEN),
    _case("8", "If on an input with branches of two static sizes", _KNOWN_SIZES, _STATIC),
    _case(
        "8", "If on an input with branches of one size",
        f"({_IMAGE} x, bool c) => ({_IMAGE} y) {{ y = If(c) "
        + _CHOICE.format(_IMAGE, "tt = Relu(x)", _IMAGE, "ee = Neg(x)") + "}",
        _CHOSEN, kind="near miss",
    ),
)  # fmt: skip

_RTX_ONLY = (
    _case(
        "rtx", "RoiAlign",
        f"({_IMAGE} x) => (float[1,3,2,2] y) <float[1,4] r = {{0,0,3,3}}, int64[1] b = {{0}}> "
        "{ y = RoiAlign<output_height=2, output_width=2>(x, r, b) }",
        _IMAGES,
    ),
    _case(
        "rtx", "Loop that counts, without a number of iterations",
        _row(
            "y = Loop(, yes, x) <body = b (int64 i, bool c, float[n,m] v) => "
            "(bool d, float[n,m] u) { d = Less(i, t) u = Add(v, v) }>",
            "float[n,m] y", "<int64 t = {3}, bool yes = {1}>",
        ),
    ),
    _case(
        "rtx", "Loop that counts, with the largest number of iterations",
        _row(
            "y = Loop(many, yes, x) <body = b (int64 i, bool c, float[n,m] v) => "
            "(bool d, float[n,m] u) { d = Less(i, t) u = Add(v, v) }>",
            "float[n,m] y",
            "<int64 t = {3}, int64 many = {9223372036854775807}, bool yes = {1}>",
        ),
    ),
    _case(
        "rtx", "Loop that counts, with a number of iterations",
        _row(
            "y = Loop(t, yes, x) <body = b (int64 i, bool c, float[n,m] v) => "
            "(bool d, float[n,m] u) { d = Less(i, t) u = Add(v, v) }>",
            "float[n,m] y", "<int64 t = {2147483646}, bool yes = {1}>",
        ).replace("Less(i, t)", "Less(i, i)"),
        fails="none", kind="near miss",
    ),
    _case(
        "rtx", "Loop without a number of iterations, and without counting",
        _row(
            "y = Loop(, yes, x) <body = b (int64 i, bool c, float[n,m] v) => "
            "(bool d, float[n,m] u) { d = Not(c) u = Add(v, v) }>",
            "float[n,m] y", "<bool yes = {1}>",
        ),
        fails="none", kind="near miss",
    ),
    _case(
        "rtx", "If on data with branches of two ranks", _TWO_RANKS, _IMAGES, "build",
    ),
    _case(
        "rtx", "If on an input with branches of two sizes", _TWO_SIZES, _CHOSEN, "build",
    ),
    _case(
        "rtx", "If on an input with branches of two static sizes", _STATIC_SIZES, _STATIC,
        "none", "near miss",
        not_for={"tensorrt-8.6": "it needs branches of the same sizes"},
    ),
    _case(
        "rtx", "cubic Resize of what an If on an input made",
        f"({_IMAGE} x, bool c) => (float[p,q,r,s] y) <float[4] k = {{1,1,2,2}}> {{ z = If(c) "
        + _CHOICE.format(_IMAGE, "tt = Relu(x)", _IMAGE, "ee = Neg(x)")
        + ' t = Transpose<perm=[0,1,3,2]>(z) y = Resize<mode="cubic">(t, , k) }',
        _CHOSEN, "build",
    ),
    _case(
        "rtx", "linear Resize of what an If on an input made",
        f"({_IMAGE} x, bool c) => (float[p,q,r,s] y) <float[4] k = {{1,1,2,2}}> {{ z = If(c) "
        + _CHOICE.format(_IMAGE, "tt = Relu(x)", _IMAGE, "ee = Neg(x)")
        + ' t = Transpose<perm=[0,1,3,2]>(z) y = Resize<mode="linear">(t, , k) }',
        _CHOSEN, "none", "near miss",
    ),
)  # fmt: skip

CASES: tuple[Case, ...] = (*_NOWHERE, *_BELOW_10, *_RTX_ONLY)
