"""Divisions by a number of sizes that is 0 at some declared size, such as ``1 / (h - 233)``.

Python fails there. torch makes no guard of it, and few of many
sizes are tried. So each divisor in a program counts as a guard.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipeline.export.guards import Broken, broken_by, recorded
from pipeline.export.ops.refusals import line_of
from pipeline.spec.tensors import Input

_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


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
    if not lines:
        return []
    symbols, _ = recorded(program, inputs)
    found = broken_by(list(lines), symbols, inputs, rules)
    return [replace(guard, line=lines[guard.text]) for guard in found if guard.formula]
