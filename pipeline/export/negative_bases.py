"""Powers of a negative number, which torch's generated code reads as ``-(1 ** n)``.

torch writes the code of a program's module from its nodes, a power as ``a ** b``. For
``(-1) ** n`` it writes ``-1 ** n``, which is -1 for every n (`torch.fx.graph.magic_methods`). The
ONNX file is written from the nodes, so it is right.
"""

from __future__ import annotations

import operator
from typing import Any

import torch


def module_of(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The program as a module without guards, with powers of negative numbers as calls."""
    module: torch.fx.GraphModule = program.module(check_guards=False)
    for inner in module.modules():
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        negative = [node for node in inner.graph.nodes if _is_negative_power(node)]
        for node in negative:
            node.target = _power
        if negative:
            inner.recompile()
    return module


def _is_negative_power(node: torch.fx.Node) -> bool:
    base = node.args[0] if node.target is operator.pow else None
    return isinstance(base, int | float) and base < 0


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent
