"""Standard functions: ops of opsets 18 to 24 that have a body in their schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.passes.case import Case, Failure, Kind, Shapes

_IMAGES = ({"x": (1, 4, 3, 8)}, {"x": (2, 4, 6, 8)}, {"x": (2, 4, 9, 8)})
_X = "(float[n,4,h,8] x)"
_QKV = "float[n,4,s,8] q, float[n,2,t,8] k, float[n,2,t,8] v"
_SMALL = {"q": (1, 4, 1, 8), "k": (1, 2, 1, 8), "v": (1, 2, 1, 8)}
_LARGE = {"q": (2, 4, 6, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8)}


def _case(
    name: str,
    opset: int,
    text: str,
    shapes: tuple[Shapes, ...] = _IMAGES,
    fails: Failure = "none",
    kind: Kind = "positive",
    level: int = 19,
    **more: Any,
) -> Case:
    # TensorRT-RTX needs only level 19
    known: Mapping[str, Failure] = {"rtx-1.7": fails} if level == 19 else {}
    return Case(
        f"expand_functions_{level}", name, kind, text, shapes, opset=opset, fails=known, **more
    )


def _attention(
    name: str,
    text: str,
    small: Shapes | None = None,
    large: Shapes | None = None,
    fails: Failure = "build",
    opset: int = 23,
    **more: Any,
) -> Case:
    shapes = ({**_SMALL, **(small or {})}, {**_LARGE, **(large or {})})
    return _case(f"Attention {name}", opset, text, shapes, fails, **more)


_ATTENTIONS = (
    _attention(
        "causal with grouped heads",
        f"({_QKV}) => (float[n,4,s,8] y) {{ y = Attention<is_causal=1>(q, k, v) }}",
    ),
    _attention(
        "with a mask, scale and softcap",
        f"({_QKV}, float[s,t] m) => (float[n,4,s,8] y)"
        "{ y = Attention<scale=0.5, softcap=2.0>(q, k, v, m) }",
        {"m": (1, 1)},
        {"m": (6, 7)},
        "parse",
    ),
    _attention(
        "with a boolean mask",
        f"({_QKV}, bool[n,1,s,t] m) => (float[n,4,s,8] y) {{ y = Attention(q, k, v, m) }}",
        {"m": (1, 1, 1, 1)},
        {"m": (2, 1, 6, 7)},
    ),
    _attention(
        "with a cache and no mask",
        f"({_QKV}, float[n,2,p,8] pk, float[n,2,p,8] pv) => "
        "(float[n,4,s,8] y, float[n,2,a,8] nk, float[n,2,b,8] nv)"
        "{ y, nk, nv = Attention<is_causal=1>(q, k, v, , pk, pv) }",
        {"pk": (1, 2, 2, 8), "pv": (1, 2, 2, 8)},
        {"pk": (2, 2, 4, 8), "pv": (2, 2, 4, 8)},
        "parse",
    ),
    _attention(
        "with a cache and a mask",
        f"({_QKV}, float[s,u] m, float[n,2,p,8] pk, float[n,2,p,8] pv) => "
        "(float[n,4,s,8] y, float[n,2,a,8] nk, float[n,2,b,8] nv)"
        "{ y, nk, nv = Attention(q, k, v, m, pk, pv) }",
        {"m": (1, 3), "pk": (1, 2, 2, 8), "pv": (1, 2, 2, 8)},
        {"m": (6, 11), "pk": (2, 2, 4, 8), "pv": (2, 2, 4, 8)},
        "parse",
    ),
    _attention(
        "with its weights as an output",
        f"({_QKV}) => (float[n,4,s,8] y, float[n,4,s,a] w)"
        "{ y, , , w = Attention<qk_matmul_output_mode=3>(q, k, v) }",
        fails="parse",
    ),
    _attention(
        "with the keys that count",
        f"({_QKV}, int64[n] l) => (float[n,4,s,8] y) {{ y = Attention(q, k, v, , , , l) }}",
        {"l": (1,)},
        {"l": (2,)},
        opset=24,
        ranges={"l": (1, 2)},
    ),
    _case(
        "Attention of rank 3",
        23,
        "(float[n,s,32] q, float[n,t,16] k, float[n,t,16] v) => (float[n,s,32] y)"
        "{ y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v) }",
        (
            {"q": (1, 1, 32), "k": (1, 1, 16), "v": (1, 1, 16)},
            {"q": (2, 6, 32), "k": (2, 7, 16), "v": (2, 7, 16)},
        ),
        "build",
    ),
    _case(
        "Attention in half",
        23,
        "(float16[n,4,s,8] q, float16[n,4,t,8] k, float16[n,4,t,8] v) => (float16[n,4,s,8] y)"
        "{ y = Attention(q, k, v) }",
        tuple({**d, "k": (n, 4, 7, 8), "v": (n, 4, 7, 8)} for d, n in ((_SMALL, 1), (_LARGE, 2))),
        "build",
        not_for={"tensorrt-8.6": "ONNX Runtime does not load the rewritten graph: not compared"},
    ),
    _case(
        "Attention in the bodies of If",
        23,
        f"({_QKV}, bool c) => (float[n,4,s,8] y) {{ y = If(c) <"
        "then_branch = t () => (float[n,4,s,8] a) { a = Attention<is_causal=1>(q, k, v) },"
        "else_branch = e () => (float[n,4,s,8] b) { b = Attention(q, k, v) }> }",
        ({**_SMALL, "c": ()}, {**_LARGE, "c": ()}),
        "build",
    ),
)

CASES: tuple[Case, ...] = (
    *_ATTENTIONS,
    _case(
        "RMSNormalization",
        23,
        "(float[n,4,h,8] x, float[8] s) => (float[n,4,h,8] y) { y = RMSNormalization(x, s) }",
        tuple({**shapes, "s": (8,)} for shapes in _IMAGES),
    ),
    _case(
        "RMSNormalization in half",
        23,
        "(float16[n,4,h,8] x, float16[h,8] s) => (float16[n,4,h,8] y)"
        "{ y = RMSNormalization<axis=2, epsilon=0.01>(x, s) }",
        tuple({**shapes, "s": shapes["x"][2:]} for shapes in _IMAGES),
    ),
    _case(
        "RotaryEmbedding with positions",
        23,
        "(float[n,s,32] x, float[50,4] c, float[50,4] d, int64[n,s] p) => (float[n,s,32] y)"
        "{ y = RotaryEmbedding<num_heads=4, interleaved=1>(x, c, d, p) }",
        (
            {"x": (1, 1, 32), "c": (50, 4), "d": (50, 4), "p": (1, 1)},
            {"x": (2, 6, 32), "c": (50, 4), "d": (50, 4), "p": (2, 6)},
        ),
    ),
    _case(
        "RotaryEmbedding of a part",
        23,
        "(float[n,4,s,8] x, float[n,s,2] c, float[n,s,2] d) => (float[n,4,s,8] y)"
        "{ y = RotaryEmbedding<rotary_embedding_dim=4>(x, c, d) }",
        (
            {"x": (1, 4, 3, 8), "c": (1, 3, 2), "d": (1, 3, 2)},
            {"x": (2, 4, 6, 8), "c": (2, 6, 2), "d": (2, 6, 2)},
        ),
    ),
    _case("Swish", 24, f"{_X} => (float[n,4,h,8] y) {{ y = Swish<alpha=1.5>(x) }}"),
    _case("Gelu", 20, f"{_X} => (float[n,4,h,8] y) {{ y = Gelu(x) }}"),
    _case(
        "Gelu for 8.6",
        22,
        '(float16[n,4,h,8] x) => (float16[n,4,h,8] y) { y = Gelu<approximate="tanh">(x) }',
        level=17,
    ),
    _case("Mish for 8.6", 18, f"{_X} => (float[n,4,h,8] y) {{ y = Mish(x) }}", level=17),
    _case(
        "AffineGrid, whose body is not sound",
        20,
        "(float[n,2,3] t, float[n,3,h,w] x) => (float[n,h,w,2] y)"
        "{ s = Shape(x) y = AffineGrid(t, s) }",
        ({"t": (1, 2, 3), "x": (1, 3, 4, 5)}, {"t": (2, 2, 3), "x": (2, 3, 6, 7)}),
        "parse",
        "near miss",
    ),
    _case(
        "CenterCropPad",
        18,
        "(float[n,4,h,w] x, float[a,b] z) => (float[n,4,a,b] y)"
        "{ s = Shape(z) y = CenterCropPad<axes=[2, 3]>(x, s) }",
        ({"x": (1, 4, 3, 8), "z": (4, 5)}, {"x": (2, 4, 6, 8), "z": (5, 9)}),
        "parse",
    ),
    _case(
        "ops that opset 19 has",
        20,
        f"{_X} => (float[n,4,h,8] y) {{ a = HardSwish(x) b = Mish(a) y = Elu(b) }}",
        kind="near miss",
    ),
    _case(
        "ops that opset 17 has",
        22,
        f"{_X} => (float[n,4,h,8] y) {{ a = HardSwish(x) y = Elu(a) }}",
        kind="near miss",
        level=17,
    ),
)
