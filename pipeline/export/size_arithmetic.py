"""Numbers of sizes that a program can't compute at some declared size.

- A divisor that is 0 there, such as in ``1 / (h - 233)``: Python fails. torch makes no guard of it,
  and few of many sizes are tried.
- A product beyond 64 bits, such as ``h**6 * w**6``: Python computes it, and ONNX's int64 does not.
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
_GROWING = (operator.mul, operator.pow, operator.lshift)
_LARGEST = (1 << 63) - 1  # that int64 holds


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
    """A guard for each product of sizes that int64 can't hold at some of the declared sizes.

    Args:
        program, inputs, rules: see `zero_divisors`.
    """
    most = {dim.name: dim.max for i in inputs for dim in i.dims}
    symbols, _ = recorded(program, inputs)
    lines: dict[str, str] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target in _GROWING and isinstance(value, torch.SymInt):
            text = exact(value.node.expr)
            known = symbols_in(text) <= symbols.keys()
            if known and not fits(as_formula(text, symbols), most, _LARGEST):
                lines[f"{text} <= {_LARGEST}"] = lines[f"{text} >= {-_LARGEST}"] = line_of(node)
    return _broken(lines, symbols, inputs, rules)


def _broken(
    lines: Mapping[str, str],
    symbols: Mapping[str, Symbol],
    inputs: Sequence[Input],
    rules: Sequence[str],
) -> list[Broken]:
    """The broken ones of these conditions, which have a line of the model each."""
    found = broken_by(list(lines), symbols, inputs, rules)
    return [replace(guard, line=lines[guard.text]) for guard in found if guard.formula]
