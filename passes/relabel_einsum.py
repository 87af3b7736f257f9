"""``Einsum`` with capital letters gets small ones.

The standard allows both, and torch exports ``bchw,bcHw->bhH`` unchanged. TensorRT's parser stops at
a capital letter (``Invalid character(s) in Einsum equation``).
"""

from __future__ import annotations

import string

import onnx_graphsurgeon as gs

from pipeline.machine.target import FROM_10, RTX, Versions
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every Einsum whose equation has capitals; refuses more than 26 labels.

    Without ``->`` the output's labels are in alphabetical order, capitals first. So the pass writes
    the output before it changes the letters.
    """
    return each(graph, "Einsum", _rewrite)


def _rewrite(_: gs.Graph, node: gs.Node) -> str | None:
    equation = "".join(node.attrs["equation"].split())
    labels = sorted({c for c in equation if c.isalpha()})
    if not any(c.isupper() for c in labels):
        return None
    if len(labels) > len(string.ascii_lowercase):
        raise Refused(f"the equation has {len(labels)} labels: use at most 26")
    free = [c for c in string.ascii_lowercase if c not in labels]
    names = {c: free.pop(0) for c in labels if c.isupper()}
    new = "".join(names.get(c, c) for c in _written_out(equation))
    node.attrs["equation"] = new
    return f"{new} in place of {equation}"


def _written_out(equation: str) -> str:
    if "->" in equation:
        return equation
    once = sorted(c for c in set(equation) if c.isalpha() and equation.count(c) == 1)
    return f"{equation}->{'...' if '...' in equation else ''}{''.join(once)}"


PASS = Pass(
    name="relabel_einsum",
    run=run,
    targets=(RTX, FROM_10, Versions("tensorrt", below=(10,), basis="read")),
    summary="Einsum with capital letters -> small letters",
    fault="it does not parse: 'Invalid character(s) in Einsum equation'",
    evidence=("tensorrt-rtx 1.7.1: the cases",),
)
