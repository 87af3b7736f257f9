"""Bitwise ops and shifts, as torch writes them for int32, int64 and uint8."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind, Shapes

_LINES: tuple[Shapes, ...] = ({"x": (2,), "z": (2,)}, {"x": (500,), "z": (500,)})
_ALL = {
    "int32": (-(2**31), 2**31),
    # fits the int32 that TensorRT 8.6 uses for int64, also after a shift by 2
    "int64": (-(2**28), 2**28),
    "uint8": (0, 256),
}
_WIDE = dict.fromkeys(("x", "z"), (-(2**63), 2**63 - 1))
_NARROWED = {"tensorrt-8.6": "its int64 is an int32, which does not hold these values"}


def _bits(
    name: str, text: str, shapes: tuple[Shapes, ...] = _LINES, dtype: str = "int64", **more: Any
) -> Case:
    kind: Kind = more.pop("kind", "positive")
    fails = {"rtx-1.7": "parse"} if kind == "positive" else {}
    low, high = _ALL[dtype]
    ranges = {axis: (low, high) for axis in ("x", "z") if f"] {axis}" in text.split("=>", 1)[0]}
    given = tuple({k: v for k, v in s.items() if f"] {k}" in text} for s in shapes)
    return Case(
        "expand_bitwise", name, kind, text, given, **{"fails": fails, "ranges": ranges, **more}
    )


def _left(dtype: str, by: int) -> str:
    to, back = ("12", "6") if dtype == "int32" else ("13", "7")
    return (
        f"({dtype}[n] x) => ({dtype}[n] y) <u{dtype} k = {{{by}}}> {{ u = Cast<to={to}>(x) "
        f's = BitShift<direction="LEFT">(u, k) y = Cast<to={back}>(s) }}'
    )


def _right(dtype: str, by: int, mask: int | None = None) -> str:
    to, back, bits = ("12", "6", 32) if dtype == "int32" else ("13", "7", 64)
    ones = 2**bits - 1
    mask = ones ^ (ones >> by) if mask is None else mask
    return (
        f"({dtype}[n] x) => ({dtype}[n] y) <u{dtype} k = {{{by}}}, u{dtype} m = {{{mask}}}, "
        f"{dtype} zero = {{0}}> {{ b = Less(x, zero) u = Cast<to={to}>(x) "
        's = BitShift<direction="RIGHT">(u, k) f = BitwiseOr(s, m) '
        f"p = Cast<to={back}>(f) q = Cast<to={back}>(s) y = Where(b, p, q) }}"
    )


def _binary(op: str, dtype: str) -> str:
    return f"({dtype}[n] x, {dtype}[n] z) => ({dtype}[n] y) {{ y = {op}(x, z) }}"


CASES: tuple[Case, ...] = (
    *(
        _bits(f"{op} {dtype}", _binary(op, dtype), dtype=dtype)
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
        for dtype in ("int32", "int64", "uint8")
    ),
    *(
        _bits(
            f"BitwiseNot {dtype}",
            f"({dtype}[n] x) => ({dtype}[n] y) {{ y = BitwiseNot(x) }}",
            dtype=dtype,
        )
        for dtype in ("int32", "int64", "uint8")
    ),
    *(
        _bits(f"{op} int64, all bits", _binary(op, "int64"), ranges=_WIDE, not_for=_NARROWED)
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ),
    *(
        _bits(
            name,
            text,
            ranges={"x": _WIDE["x"]},
            not_for=_NARROWED,
        )
        for name, text in (
            ("BitwiseNot int64, all bits", "(int64[n] x) => (int64[n] y) { y = BitwiseNot(x) }"),
            ("int64 shifted left by 2, all bits", _left("int64", 2)),
            ("int64 shifted left by 40", _left("int64", 40)),
            ("int64 shifted right by 1, all bits", _right("int64", 1)),
            ("int64 shifted right by 40", _right("int64", 40)),
            ("int64 shifted right by 63", _right("int64", 63)),
        )
    ),
    _bits(
        "BitwiseAnd with a mask",
        "(int64[n] x) => (int64[n] y) <int64 m = {6}> { y = BitwiseAnd(x, m) }",
    ),
    _bits(
        "BitwiseAnd with a mask of 40 bits",
        "(int64[n] x) => (int64[n] y) <int64 m = {1099511627775}> { y = BitwiseAnd(m, x) }",
        ranges={"x": _WIDE["x"]},
        not_for=_NARROWED,
    ),
    _bits(
        "BitwiseOr with minus 8",
        "(int64[n] x) => (int64[n] y) <int64 m = {-8}> { y = BitwiseOr(x, m) }",
    ),
    _bits(
        "BitwiseXor of two shapes",
        "(int32[n] x, int32[m,1] z) => (int32[m,n] y) { y = BitwiseXor(x, z) }",
        ({"x": (2,), "z": (3, 1)}, {"x": (50,), "z": (4, 1)}),
        "int32",
    ),
    *(
        _bits(f"{dtype} shifted left by {by}", _left(dtype, by), dtype=dtype)
        for dtype, by in (("int64", 2), ("int32", 3), ("int64", 0))
    ),
    *(
        _bits(f"{dtype} shifted right by {by}", _right(dtype, by), dtype=dtype)
        for dtype, by in (("int64", 1), ("int32", 3))
    ),
    *(
        _bits(
            f"uint8 shifted {way}",
            "(uint8[n] x) => (uint8[n] y) <uint8 k = {3}> "
            f'{{ y = BitShift<direction="{way}">(x, k) }}',
            dtype="uint8",
        )
        for way in ("LEFT", "RIGHT")
    ),
    _bits("And", "(bool[n] x, bool[n] z) => (bool[n] y) { y = And(x, z) }", kind="near miss"),
    _bits("Not", "(bool[n] x) => (bool[n] y) { y = Not(x) }", kind="near miss"),
    _bits(
        "uint32",
        "(uint32[n] x, uint32[n] z) => (uint32[n] y) { y = BitwiseAnd(x, z) }",
        kind="refusal",
        reason="uint32",
        ranges={},
    ),
    _bits(
        "int64 shifted right without its sign",
        _right("int64", 1, mask=0),
        kind="refusal",
        reason="",
    ),
    _bits(
        "shifted by a computed number",
        '(uint8[n] x, uint8[n] z) => (uint8[n] y) { y = BitShift<direction="LEFT">(x, z) }',
        kind="refusal",
        reason="computed",
        ranges={"z": (0, 8)},
        dtype="uint8",
    ),
)
