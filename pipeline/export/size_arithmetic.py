"""Numbers of sizes that a program can't compute at some declared size.

- A divisor that is 0 there, such as in ``1 / (h - 233)``: Python fails. torch makes no guard of it,
  and few of many sizes are tried.
- A number beyond 64 bits, such as ``h**6 * w**6``: Python computes it, and ONNX's int64 does not.
  A power with a size as its exponent must be below 2^53: ONNX Runtime computes it in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pipeline.export.guards import Broken, Symbol, as_formula, broken_by, recorded
from pipeline.export.ops.refusals import line_of
from pipeline.export.symbols import exact
from pipeline.probe.evaluate import fits, symbols_in
from pipeline.spec.tensors import Input

_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)
_LARGEST, _LARGEST_POWER = (1 << 63) - 1, 1 << 53


def zero_divisors(
    program: torch.export.ExportedProgram, inputs: Sequence[Input], rules: Sequence[str] = ()
) -> list[Broken]:
    """A guard for each divisor of sizes that is 0 at some of the declared sizes.

    Args:
        program: what torch exported.
        inputs: its inputs as declared.
        rules: the rules on sizes; sizes that break one are ignored.
    """
    lines: dict[str, str] = {}
    for node in program.graph.nodes:
        divisor = node.args[1] if node.target in _DIVISIONS else None
        value = divisor.meta.get("val") if isinstance(divisor, torch.fx.Node) else None
        if isinstance(value, torch.SymInt):
            lines.setdefault(f"Ne({value.node.expr}, 0)", line_of(node))
    return _broken(lines, recorded(program, inputs)[0], inputs, rules) if lines else []


def too_large(
    program: torch.export.ExportedProgram, inputs: Sequence[Input], rules: Sequence[str] = ()
) -> list[Broken]:
    """A guard for each number of sizes that ONNX can't compute at some of the declared sizes.

    Args:
        program, inputs, rules: see `zero_divisors`.
    """
    most = {dim.name: dim.max for i in inputs for dim in i.dims}
    symbols, _ = recorded(program, inputs)
    lines: dict[str, str] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        text = exact(value.node.expr)
        growing = node.target is operator.pow and not isinstance(node.args[1], int)
        limit = _LARGEST_POWER if growing else _LARGEST
        known = symbols_in(text) <= symbols.keys()
        if known and not fits(as_formula(text, symbols), most, limit):
            lines[f"{text} <= {limit}"] = lines[f"{text} >= {-limit}"] = line_of(node)
    found = _broken(lines, symbols, inputs, rules)
    return [replace(guard, too_large=True) for guard in found]


def _broken(
    lines: Mapping[str, str],
    symbols: Mapping[str, Symbol],
    inputs: Sequence[Input],
    rules: Sequence[str],
) -> list[Broken]:
    """The broken ones of these conditions, which have a line of the model each."""
    found = broken_by(list(lines), symbols, inputs, rules)
    return [replace(guard, line=lines[guard.text]) for guard in found if guard.formula]
