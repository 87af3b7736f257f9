"""Elu before and after recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.passes.case import Case, Kind

_TIMES = ({"x": (3, 1, 2)}, {"x": (7, 2, 2)}, {"x": (12, 3, 2)})
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _numbers(*shape: int) -> str:
    drawn = np.random.default_rng(0).normal(0, 0.5, shape).astype(np.float32)
    return ", ".join(f"{value:.3f}" for value in drawn.flat)


def _case(name: str, body: str, layer: str = "LSTM", kind: Kind = "positive", **more: Any) -> Case:
    rows = 2 * _GATES[layer]
    text = (
        f"(float[t,b,2] x) => (float[t,b,2] y) <float[1,{rows},2] w = {{{_numbers(rows, 2)}}}, "
        f"float[1,{rows},2] r = {{{_numbers(rows, 2)}}}, int64[1] one = {{1}}> {{ {body} }}"
    )
    fails = more.pop("fails", "build" if kind == "positive" else "none")
    return Case("expand_elu", name, kind, text, _TIMES, fails={"rtx-1.7": fails}, **more)


def _layer(result: str, source: str, op: str = "LSTM") -> str:
    return f"{result}4 = {op}<hidden_size=2>({source}, w, r) {result} = Squeeze({result}4, one) "


CASES: tuple[Case, ...] = (
    *(
        _case(f"between two {op}s", _layer("a", "x", op) + "e = Elu(a) " + _layer("y", "e", op), op)
        for op in _GATES
    ),
    _case("with alpha, and a product between",
          _layer("a", "x") + "e = Elu<alpha=0.5>(a) m = Mul(e, e) " + _layer("y", "m")),
    _case("two of three", _layer("a", "x") + "e = Elu(a) " + _layer("c", "e") + "f = Elu(c) "
          + _layer("d", "f") + "y = Add(d, e)"),
    _case("after one", _layer("a", "x") + "e = Elu(a) m = Mul(e, a) f = Elu(m) y = Add(f, m)"),
    _case("after two", _layer("a", "x") + _layer("c", "a") + "y = Elu(c)", fails="none"),
    _case("before", "e = Elu(x) " + _layer("a", "e") + _layer("y", "a"), kind="near miss"),
    _case("beside", _layer("a", "x") + "e = Elu(x) m = Add(a, e) " + _layer("y", "m"),
          kind="near miss"),
)  # fmt: skip
