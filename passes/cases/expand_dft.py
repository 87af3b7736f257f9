"""DFT in the forms of opset 17 and 20, as torch.fft is exported."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind, Shapes


def _dft(name: str, text: str, *shapes: tuple[int, ...], **more: Any) -> Case:
    kind: Kind = more.pop("kind", "positive")
    fails = {"rtx-1.7": "parse"} if kind == "positive" else {}
    given: tuple[Shapes, ...] = tuple({"x": shape} for shape in shapes)
    return Case("expand_dft", name, kind, text, given, **{"fails": fails, "opset": 17, **more})


def _plain(attributes: str, x: str, y: str, dtype: str = "float") -> str:
    return f"({dtype}[{x}] x) => ({dtype}[{y}] y) {{ y = DFT<{attributes}>(x) }}"


_NO_KERNEL = {
    "tensorrt-8.6": "build: Could not find any implementation for node {ForeignNode[...]}"
}
_OF_SIZE = (
    "(float[n,t,1] x) => (float[n,k,2] y) <int64[1] zero = {{0}}> "
    "{{ s = Shape<start=1, end=2>(x) l = Squeeze(s, zero) y = DFT<axis=1{}>(x, l) }}"
)
_TO_LENGTH = (
    "(float[n,t,{parts}] x) => (float[n,{k},{to}] y) <int64 l = {{{length}}}> "
    "{{ y = DFT<axis=1{more}>(x, l) }}"
)


def _length(parts: int, length: int, more: str = "", to: int = 2, k: int = 0) -> str:
    return _TO_LENGTH.format(parts=parts, length=length, more=more, to=to, k=k or length)


CASES: tuple[Case, ...] = (
    _dft("real, static", _plain("axis=1", "n,8,1", "n,8,2"), (1, 8, 1), (3, 8, 1)),
    _dft("real", _plain("axis=1", "n,t,1", "n,t,2"), (1, 2, 1), (3, 9, 1), (2, 64, 1)),
    _dft(
        "over two axes",
        "(float[n,h,w,1] x) => (float[n,h,k,2] y) <int64[1] zero = {0}> { "
        "s = Shape<start=1, end=2>(x) l = Squeeze(s, zero) a = DFT<axis=1>(x, l) "
        "t = Shape<start=2, end=3>(a) m = Squeeze(t, zero) y = DFT<axis=2>(a, m) }",
        (1, 2, 3, 1),
        (2, 5, 4, 1),
    ),
    _dft(
        "over two axes, divided by each length",
        "(float[n,h,w,1] x) => (float[n,h,k,2] y) <int64[1] zero = {0}> { "
        "s = Shape<start=1, end=2>(x) l = Squeeze(s, zero) p = Cast<to=1>(l) "
        "a = DFT<axis=1>(x, l) b = Div(a, p) "
        "t = Shape<start=2, end=3>(b) m = Squeeze(t, zero) q = Cast<to=1>(m) "
        "c = Div(b, q) y = DFT<axis=2>(c, m) }",
        (1, 2, 3, 1),
        (2, 5, 4, 1),
    ),
    _dft("complex", _plain("axis=1", "n,t,2", "n,t,2"), (1, 2, 2), (3, 9, 2), (2, 64, 2)),
    _dft(
        "inverse, complex",
        _plain("axis=1, inverse=1", "n,t,2", "n,t,2"),
        (1, 2, 2),
        (3, 9, 2),
    ),
    _dft(
        "inverse, real",
        _plain("axis=1, inverse=1", "n,t,1", "n,t,2"),
        (1, 2, 1),
        (3, 9, 1),
        not_for=_NO_KERNEL,
    ),
    _dft(
        "inverse, static",
        _plain("axis=2, inverse=1", "n,c,6,2", "n,c,6,2"),
        (1, 2, 6, 2),
        (3, 1, 6, 2),
    ),
    _dft("onesided", _plain("axis=1, onesided=1", "n,t,1", "n,k,2"), (1, 4, 1), (3, 9, 1)),
    _dft(
        "middle axis",
        _plain("axis=1", "n,h,w,2", "n,h,w,2"),
        (1, 3, 4, 2),
        (2, 6, 5, 2),
    ),
    _dft("axis from the end", _plain("axis=-2", "n,h,w,1", "n,h,w,2"), (1, 3, 4, 1), (2, 6, 5, 1)),
    _dft("no axis", "(float[n,h,w,1] x) => (float[n,h,w,2] y) { y = DFT(x) }", (1, 3, 4, 1)),
    _dft("length of the axis, as torch", _OF_SIZE.format(", onesided=1"), (1, 4, 1), (2, 9, 1)),
    _dft("padded", _length(1, 12), (1, 4, 1), (2, 12, 1), not_for=_NO_KERNEL),
    _dft("cut or padded", _length(2, 6), (1, 4, 2), (2, 9, 2)),
    _dft(
        "irfft",
        _length(2, 14, ", inverse=1, onesided=1", to=1),
        (1, 8, 2),
        (2, 8, 2),
    ),
    _dft(
        "irfft of odd length, padded or whole",
        _length(2, 9, ", inverse=1, onesided=1", to=1),
        (1, 4, 2),
        (2, 5, 2),
    ),
    _dft(
        "irfft, length by the input",
        _plain("axis=1, inverse=1, onesided=1", "n,t,2", "n,k,1"),
        (1, 3, 2),
        (2, 6, 2),
    ),
    _dft(
        "opset 18",
        _plain("axis=1, onesided=1", "n,t,1", "n,k,2"),
        (1, 4, 1),
        (3, 9, 1),
        opset=18,
    ),
    _dft(
        "opset 20",
        "(float[n,h,w,1] x) => (float[n,h,k,2] y) <int64 a = {2}> { y = DFT<onesided=1>(x, , a) }",
        (1, 3, 4, 1),
        (2, 6, 5, 1),
        opset=20,
    ),
    _dft(
        "opset 20, no axis",
        "(float[n,h,w,2] x) => (float[n,h,w,2] y) { y = DFT<inverse=1>(x) }",
        (1, 3, 4, 2),
        (2, 6, 5, 2),
        opset=20,
    ),
    _dft(
        "in two axes, as torch's rfft2",
        "(float[n,h,w,1] x) => (float[n,h,k,2] y) "
        "{ r = DFT<axis=2, onesided=1>(x) y = DFT<axis=1>(r) }",
        (1, 2, 4, 1),
        (2, 4, 3, 1),
    ),
    _dft(
        "STFT",
        "(float[n,t,1] x) => (float[n,f,5,2] y) <int64 s = {4}, "
        "float[8] w = {1,1,1,1,1,1,1,1}> { y = STFT(x, s, w) }",
        (1, 32, 1),
        kind="near miss",
        not_for={"tensorrt-8.6": "it has no STFT: refuse_unsupported_below_10"},
    ),
    _dft(
        "computed axis",
        "(float[n,h,w,1] x) => (float[p,q,r,2] y) <int64[1] zero = {0}> "
        "{ s = Shape(x) l = Shape(s) a = Squeeze(l, zero) t = Constant<value_int = -3>() "
        "b = Add(a, t) y = DFT(x, , b) }",
        (1, 3, 4, 1),
        kind="refusal",
        reason="axis",
        opset=20,
    ),
    _dft(
        "too long",
        _plain("axis=1", "1,20000,1", "1,20000,2"),
        (1, 20000, 1),
        kind="refusal",
        reason="elements",
    ),
)
