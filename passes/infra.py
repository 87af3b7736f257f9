"""What a rewrite pass is, and what it reports.

A pass changes an onnx-graphsurgeon graph in place. It reports each node that it rewrote, and each
node that it could not fix. A pass

- keeps the names, types and dims of the graph's inputs and outputs
- keeps every dynamic axis
- handles the bodies of If and Loop
- changes nothing when it runs a second time
- names new nodes ``<name of the replaced node>/<short>``, so that they inherit its metadata
- gives new constants new names
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_graphsurgeon as gs

from pipeline.graph.change import Change
from pipeline.machine.target import Target, Versions
from pipeline.passes.graph_ops import is_op, label, walk

__all__ = ["Change", "Pass", "PassResult", "Refused", "each"]


@dataclass(frozen=True)
class PassResult:
    """What a pass did to a graph.

    Args:
        rewritten: the nodes that it replaced or changed.
        refused: nodes that have the problem but that the pass cannot fix. ``detail`` is the
            reason. Nodes without the problem are not listed.
    """

    rewritten: tuple[Change, ...]
    refused: tuple[Change, ...] = ()

    @property
    def modified(self) -> bool:
        return bool(self.rewritten)


@dataclass(frozen=True)
class Pass:
    """A rewrite with its reasons.

    Args:
        name: the module's name.
        run: changes the graph in place and reports the changes. With `level` ``model`` it gets
            the whole onnx.ModelProto instead of the graph-surgeon graph.
        targets: the versions of TensorRT that need the pass.
        summary: one line: which pattern becomes what.
        fault: one line: what these versions do with the unchanged pattern.
        evidence: issue links and measured cases that show the need.
        tolerable: True if TensorRT may compute a refused node correctly. A refusal is then a
            warning; otherwise it ends the conversion.
        clean_up: True for a pass that fixes nothing. It makes the engine smaller or faster, or
            the build faster.
        level: what `run` gets.
        own: True for a user-supplied pass. The contract that tests check for the other passes
            is checked each time that it runs.
    """

    name: str
    run: Callable[[Any], PassResult]
    targets: tuple[Versions, ...]
    summary: str
    evidence: tuple[str, ...]
    fault: str = ""
    tolerable: bool = False
    clean_up: bool = False
    level: Literal["graph", "model"] = "graph"
    own: bool = False

    def needed_by(self, target: Target) -> bool:
        return any(needs.covers(target) for needs in self.targets)


class Refused(Exception):
    """Raised inside a pass if a node has the problem but cannot be fixed. Its text is the reason
    and what to do."""


def each(
    graph: gs.Graph, ops: str | Sequence[str], rewrite: Callable[[gs.Graph, gs.Node], str | None]
) -> PassResult:
    """Calls `rewrite` on every node of these standard ops, with the graph that holds it.

    Args:
        graph: the whole graph. The bodies of If, Loop and Scan are visited too.
        ops: one op, or several.
        rewrite: changes the graph and returns a description. It returns None for a node without
            the problem. It raises `Refused` with the reason if it cannot fix the node.
    """
    names = (ops,) if isinstance(ops, str) else ops
    rewritten, refused = [], []
    for inner, node in walk(graph):
        op = node.op
        # a node without outputs was removed by an earlier rewrite
        if not node.outputs or not any(is_op(node, o) for o in names):
            continue
        name = label(node)
        try:
            detail = rewrite(inner, node)
        except Refused as reason:
            refused.append(Change(name, op, str(reason)))
        else:
            if detail is not None:
                rewritten.append(Change(name, op, detail))
    return PassResult(tuple(rewritten), tuple(refused))
