"""Biases in int32 as onnxruntime.quantization writes them, and weights that stay quantised."""

from __future__ import annotations

from pipeline.passes.case import Case

_X = ({"x": (2, 3)}, {"x": (5, 3)})
_PASS = "dequantize_constants"


def _bias(name: str, kind: str, constants: str, call: str = "DequantizeLinear(q, s, z)") -> Case:
    text = (
        f"(float[n,3] x) => (float[n,3] y) <int32[3] q = {{-70000, 3, 16777217}}, {constants}> "
        f"{{ b = {call} y = Add(x, b) }}"
    )
    fails = {"rtx-1.7": "parse"} if kind == "positive" else {}
    return Case(_PASS, name, kind, text, _X, fails=fails)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    _bias("one scale", "positive", "float s = {0.25}, int32 z = {0}"),
    _bias("no zero point", "positive", "float s = {0.1}", "DequantizeLinear(q, s)"),
    _bias(
        "a scale for each channel",
        "positive",
        "float[3] s = {0.25, 1.5, 0.0001}, int32[3] z = {0, 0, 0}",
        "DequantizeLinear<axis=0>(q, s, z)",
    ),
    Case(
        _PASS,
        "a matrix",
        "positive",
        "(float[n,2] x) => (float[n,2] y) <int32[2,2] q = {1, 2, 3, 4}, float[2] s = {0.5, 2.0}, "
        "int32[2] z = {0, 0}> { b = DequantizeLinear<axis=-1>(q, s, z) y = MatMul(x, b) }",
        ({"x": (2, 2)}, {"x": (5, 2)}),
        fails={"rtx-1.7": "parse"},
    ),
    Case(
        _PASS,
        "a weight in int8",
        "near miss",
        "(float[n,3] x) => (float[n,3] y) <int8[3] q = {-7, 3, 1}, float s = {0.25}, int8 z = {0}> "
        "{ b = DequantizeLinear(q, s, z) y = Add(x, b) }",
        _X,
        not_for={"tensorrt-8.6": "build: int8 is not configured in the builder (no INT8 flag)"},
    ),
    Case(
        _PASS,
        "a computed input",
        "refusal",
        "(float[n,3] x) => (float[n,3] y) <float s = {0.25}> "
        "{ q = Cast<to=6>(x) y = DequantizeLinear(q, s) }",
        _X,
        reason="cannot dequantise int32",
    ),
)
