"""NonZero as exporters write it, and forms that need its size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.passes.case import Case, Kind

_XM = tuple({"x": s, "m": s} for s in ((1, 2), (3, 5), (8, 7)))
_X = tuple({"x": x["x"]} for x in _XM)
_HEAD = "(float[h,w] x, bool[h,w] m) => (float[h,w] y)"
_PLACES = "p = NonZero(m) i = Transpose<perm = [1, 0]>(p)"
# torch's exporter writes the number of selected elements as the sum of the mask
_COUNT = "f = Reshape(m, flat) g = Cast<to = 7>(f) k = ReduceSum<keepdims = 1>(g)"
_ROWS = "(float[h,w] x, bool[h] m) => (float[h,w] y)"
_XR = tuple({"x": (h, w), "m": (h,)} for h, w in ((1, 2), (3, 5), (8, 7)))


def _case(name: str, kind: Kind, text: str, shapes: Any = _XM, **more: Any) -> Case:
    fails: dict[str, Any] = {} if kind == "near miss" else {"rtx-1.7": "parse"}
    return Case("replace_nonzero", name, kind, text, shapes, **{"fails": fails, **more})


def _scalar(opset: int, kind: str, value: str) -> Case:
    return _case(
        f"number written by a mask, opset {opset}, {kind}",
        "positive",
        f"({kind}[h,w] x, bool[h,w] m) => ({kind}[h,w] y)"
        f"<{kind} v = {{{value}}}, int64[1] flat = {{-1}}>"
        f"{{ {_PLACES} {_COUNT} e = Expand(v, k) u = Reshape(e, flat) y = ScatterND(x, i, u) }}",
        opset=opset,
    )


_SELECT = f"{_PLACES} s = GatherND(x, i)"


def _reduction(op: str, name: str = "", kind: str = "float", **more: Any) -> Case:
    attrs = "" if more.pop("keep", False) else "<keepdims = 0>"
    dims = "[1]" if not attrs else ""
    return _case(
        name or f"{op} of the selection",
        "positive",
        f"({kind}[h,w] x, bool[h,w] m) => ({kind}{dims} y) <{kind}[k] s> "
        f"{{ {_SELECT} y = {op}{attrs}(s) }}",
        **more,
    )


# every element is selected, so that the selection is not empty at any size
_ALL = {"m": (1.0, 2.0)}

_CASES: tuple[Case, ...] = (
    _scalar(18, "float", "9"),
    _scalar(13, "float", "9"),
    # 9 as half-precision bits
    _scalar(18, "float16", "18560"),
    _scalar(18, "int64", "9"),
    _case(
        "arithmetic on the selection written back",
        "positive",
        f"{_HEAD} <float two = {{2}}, int64[1] flat = {{-1}}, float[k] s, float[k] r,"
        f"float[k] t> {{ {_SELECT} r = Relu(s)"
        f"t = Mul(r, two) {_COUNT} e = Expand(t, k) u = Reshape(e, flat) y = ScatterND(x, i, u) }}",
    ),
    _case(
        "arithmetic written back, as the TorchScript exporter does",
        "positive",
        f"{_HEAD} <int64[1] flat = {{-1}}, int64[1] none = {{0}}, int64 zero = {{0}},"
        f"float[k] s, float[k] t> {{ {_SELECT}"
        "t = Exp(s) all = Shape(x) wide = Expand(m, all) q = NonZero(wide) j = Transpose(q)"
        "v = Reshape(t, flat) c = Shape(j) k = Gather(c, zero) e = Unsqueeze(k, none)"
        "u = Slice(v, none, e, none) y = ScatterND(x, j, u) }",
    ),
    _case(
        "two tensors under one mask",
        "positive",
        "(float[h,w] x, float[h,w] z, bool[h,w] m) => (float[h,w] y)"
        f"<float[k] s, float[k] t, float[k] u> {{ {_SELECT} t = GatherND(z, i)"
        "u = Mul(s, t) y = ScatterND(x, i, u) }",
        tuple({**s, "z": s["x"]} for s in _XM),
    ),
    _case(
        "added under a mask",
        "positive",
        f"{_HEAD} <float[k] s, float[k] u> {{ {_SELECT} u = Tanh(s) "
        'y = ScatterND<reduction = "add">(x, i, u) }',
    ),
    _case(
        "rows by a mask of lower rank",
        "positive",
        f"{_ROWS} <float[k,w] s, float[k,w] u> {{ {_SELECT} u = Sigmoid(s)"
        "y = ScatterND(x, i, u) }",
        _XR,
    ),
    _case(
        "rows overwritten by torch's exporter",
        "positive",
        f"{_ROWS} <float v = {{9}}, int64[1] flat = {{-1}}, int64[1] one = {{1}},"
        "int64[1] two = {2}, int64[1] zero = {0}, bool[h,1] a, bool[h,w] b>"
        "{ a = Unsqueeze(m, flat) all = Shape<start = 0>(x) b = Expand(a, all) p = NonZero(b)"
        f"i = Transpose<perm = [1, 0]>(p) {_COUNT} w = Slice(all, one, two, zero)"
        "n = Concat<axis = 0>(k, w) e = Expand(v, n) u = Reshape(e, flat) y = ScatterND(x, i, u) }",
        _XR,
    ),
    _case(
        "one row for all",
        "positive",
        "(float[h,w] x, bool[h] m, float[w] r) => (float[h,w] y) <int64[1] flat = {-1},"
        "int64[1] one = {1}, int64[1] two = {2}, int64[1] zero = {0}>"
        f"{{ {_PLACES} {_COUNT} all = Shape(x) w = Slice(all, one, two, zero)"
        "n = Concat<axis = 0>(k, w) u = Expand(r, n) y = ScatterND(x, i, u) }",
        tuple({**s, "r": s["x"][1:]} for s in _XR),
    ),
    _case(
        "arithmetic on rows, as torch's exporter writes it back",
        "positive",
        f"{_ROWS} <int64[1] flat = {{-1}}, int64[1] one = {{1}}, int64[1] two = {{2}},"
        "int64[1] zero = {0}, int64[k] q, float[k,w] s, float[k,w] t, bool[h,1] a, bool[h,w] b>"
        "{ p = NonZero(m) i = Transpose<perm = [1, 0]>(p) q = Squeeze(i, one) o = Max(q)"
        "n = Shape<start = 0>(o) r = Expand(q, n) j = Unsqueeze(r, flat) s = GatherND(x, j)"
        "t = Tanh(s) a = Unsqueeze(m, flat) all = Shape<start = 0>(x) b = Expand(a, all)"
        f"z = NonZero(b) d = Transpose<perm = [1, 0]>(z) {_COUNT}"
        "w = Slice(all, one, two, zero) c = Concat<axis = 0>(k, w) e = Expand(t, c)"
        "u = Reshape(e, flat) y = ScatterND(x, d, u) }",
        _XR,
    ),
    _reduction("ReduceSum"),
    _reduction("ReduceSum", "sum, one axis kept", keep=True),
    _reduction("ReduceMean", ranges=_ALL),
    _reduction("ReduceMax", ranges=_ALL),
    _reduction("ReduceMin", ranges=_ALL),
    _reduction("ReduceSumSquare"),
    _reduction("ReduceSum", "sum of integers", kind="int64"),
    _reduction("ReduceMean", "mean in half", kind="float16", ranges=_ALL),
    _case(
        "mean of rows",
        "positive",
        f"(float[h,w] x, bool[h] m) => (float y) <float[k,w] s> "
        f"{{ {_SELECT} y = ReduceMean<keepdims = 0>(s) }}",
        _XR,
        ranges=_ALL,
    ),
    _case(
        "how many",
        "positive",
        f"{_HEAD} <int64[1] k> {{ {_PLACES} k = Shape<start = 0, end = 1>(i) f = Cast<to = 1>(k)"
        "y = Add(x, f) }",
    ),
    _case(
        "how many, float mask",
        "positive",
        "(float[h,w] x) => (float[h,w] y) <int64 one = {1}, float[h,w] r> { r = Relu(x)"
        "p = NonZero(r) s = Shape(p) k = Gather(s, one) f = Cast<to = 1>(k) y = Add(x, f) }",
        _X,
    ),
    _case(
        "arange of the TorchScript exporter",
        "positive",
        "(float[h,w] x) => (int64[h] y) <int64[1] one = {1}, int64[1] zero = {0}, int64[1] h>"
        "{ s = Shape(x) h = Gather(s, zero) o = ConstantOfShape<value = int64[1] {1}>(h)"
        "p = NonZero(o) t = Transpose(p) y = Squeeze(t, one) }",
        _X,
    ),
    _case(
        "constant",
        "positive",
        "(float[h,w] x) => (float[h,w] y) <int64[2,2] c = {0, 3, 1, 0}>"
        "{ p = NonZero(c) f = Cast<to = 1>(p) s = ReduceSum<keepdims = 0>(f) y = Add(x, s) }",
        _X,
    ),
    _case(
        "constant that is an output",
        "positive",
        "(float[h,w] x) => (float[h,w] y, int64[2,2] p) <int64[2,2] c = {0, 3, 1, 0}>"
        "{ p = NonZero(c) y = Relu(x) }",
        _X,
    ),
    _case(
        "inside If",
        "positive",
        "(float[h,w] x, bool[h,w] m, bool c) => (float[h,w] y) { y = If(c) <"
        f"then_branch = t () => (float[h,w] a) {{ {_SELECT} u = Abs(s) a = ScatterND(x, i, u) }},"
        "else_branch = e () => (float[h,w] b) { b = Relu(x) }> }",
        tuple({**s, "c": ()} for s in _XM),
    ),
    _case(
        "Where already",
        "near miss",
        f"{_HEAD} <float v = {{9}}> {{ y = Where(m, v, x) }}",
    ),
    _case(
        "indices that are given",
        "near miss",
        "(float[h,w] x, int64[k,1] i, float[k,w] u) => (float[h,w] y) { y = ScatterND(x, i, u) }",
        (
            {"x": (3, 2), "i": (1, 1), "u": (1, 2)},
            {"x": (4, 5), "i": (1, 1), "u": (1, 5)},
        ),
        ranges={"i": (0, 3)},
    ),
    _case(
        "indices are the result",
        "refusal",
        f"(bool[h,w] m) => (int64[k,2] i) {{ {_PLACES} }}",
        tuple({"m": s["m"]} for s in _XM),
        reason="depends on the data",
    ),
    _case(
        "selection is the result",
        "refusal",
        f"(float[h,w] x, bool[h,w] m) => (float[k] s) {{ {_SELECT} }}",
        reason="torch.where",
    ),
    _case(
        "masked_scatter takes from the front",
        "refusal",
        f"(float[h,w] x, float[h,w] z, bool[h,w] m) => (float[h,w] y) <int64[1] flat = {{-1}},"
        f"int64[1] zero = {{0}}> {{ v = Reshape(z, flat) {_PLACES} all = Shape(i)"
        "k = Gather(all, zero) u = Slice(v, zero, k, zero) y = ScatterND(x, i, u) }",
        tuple({**s, "z": s["x"]} for s in _XM),
        reason="not made from a selection",
    ),
    _case(
        "sizes that may differ",
        "refusal",
        "(float[h,w] x, bool[a,b] m) => (float[h,w] y) <float v = {9}, int64[1] flat = {-1}>"
        f"{{ {_PLACES} {_COUNT} u = Expand(v, k) y = ScatterND(x, i, u) }}",
        ({"x": (3, 5), "m": (2, 4)}, {"x": (8, 7), "m": (8, 3)}),
        reason="not provably",
    ),
    _case(
        "selected by one mask, written by another",
        "refusal",
        f"{_HEAD} <float[k] s, bool[h,w] n> {{ n = And(m, m) {_SELECT} q = NonZero(n)"
        "j = Transpose(q) y = ScatterND(x, j, s) }",
        reason="depends on the data",
    ),
    _case(
        "one row written to all",
        "refusal",
        "(float[h,w] x, bool[1] m) => (float[h,w] y) <int64[1] flat = {-1}, bool[1,1] a,"
        "float[k,w] s, bool[h,w] b> { p = NonZero(m) i = Transpose(p) s = GatherND(x, i)"
        "a = Unsqueeze(m, flat) all = Shape(x) b = Expand(a, all) z = NonZero(b)"
        "d = Transpose(z) e = Expand(s, all) u = Reshape(e, flat) y = ScatterND(x, d, u) }",
        tuple({"x": s["x"], "m": (1,)} for s in _XM),
        reason="depends on the data",
        ranges={"m": (1, 2)},
    ),
    _case(
        "softmax over the selection",
        "refusal",
        f"{_HEAD} <float[k] s> {{ {_SELECT} u = Softmax(s) y = ScatterND(x, i, u) }}",
        reason="not elementwise",
    ),
    _case(
        "Unique",
        "refusal",
        "(float[h] x) => (float[k] y) { y = Unique(x) }",
        ({"x": (2,)}, {"x": (9,)}),
        reason="depends on the data",
    ),
    _case(
        "NonMaxSuppression",
        "refusal",
        "(float[1,n,4] b, float[1,1,n] s) => (int64[k,3] y) <int64 most = {3}, float iou = {0.5},"
        "float least = {-9}> { y = NonMaxSuppression(b, s, most, iou, least) }",
        ({"b": (1, 3, 4), "s": (1, 1, 3)}, {"b": (1, 9, 4), "s": (1, 1, 9)}),
        reason="depends on the data",
        fails={"rtx-1.7": "build"},
    ),
)

# TensorRT 8.6 has NonZero, but builds no GatherND or ScatterND with its result
_BELOW_10 = {
    "number written by a mask, opset 13, float": "",
    "number written by a mask, opset 18, float": "",
    "ReduceMean of the selection": "",
    "how many": "",
    "constant": "",
    "selection is the result": "no GatherND or ScatterND",
    "masked_scatter takes from the front": "not made from a selection",
    "softmax over the selection": "not elementwise",
}


def _below_10(case: Case) -> Iterator[Case]:
    name, new = case.name, "replace_nonzero_below_10"
    if name in ("indices are the result", "NonMaxSuppression") or case.kind == "near miss":
        yield replace(case, pass_name=new, kind="near miss", reason="", fails={})
    elif name in _BELOW_10:
        yield replace(case, pass_name=new, reason=_BELOW_10[name])


CASES: tuple[Case, ...] = (*_CASES, *(new for case in _CASES for new in _below_10(case)))
