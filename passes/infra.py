"""What a rewrite pass is, and what it reports.

A pass changes an onnx-graphsurgeon graph in place and says, node by node, what it rewrote and
what it could not mend. It keeps the names, types and dims of the graph's inputs and outputs,
keeps every dynamic axis, handles the bodies of If and Loop, and changes nothing when it is run
a second time. New nodes are called ``<name of the node they replace>/<short>``, so that the
stage can hand that node's metadata down to them; new constants get new names.
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
        rewritten: the nodes that it replaced or altered.
        refused: nodes that have the problem but that the pass can't mend; ``detail`` is the
            reason. Nodes that need nothing are not listed.
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
        run: changes the graph in place and reports; with `level` ``model`` it is given the whole
            onnx.ModelProto instead of the graph-surgeon graph.
        targets: the versions of TensorRT that need it, as data.
        summary: one line: which pattern becomes what.
        fault: one line: what those versions do with the pattern as it stands.
        evidence: issue links and measured cases that show the need.
        tolerable: True if a node that the pass refuses may still come out right, so that the
            conversion goes on with a warning; otherwise a refusal ends it.
        clean_up: True for a pass that mends nothing and only makes the engine smaller or its
            build faster.
        level: what `run` is given.
        own: True for a user's own pass: the laws that tests hold the others to are checked on it
            each time that it runs.
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
    """Raised inside a pass where a node has the problem but can't be mended; says why."""


def each(
    graph: gs.Graph, ops: str | Sequence[str], rewrite: Callable[[gs.Graph, gs.Node], str | None]
) -> PassResult:
    """Calls `rewrite` on every node of these standard ops, with the graph that holds it.

    Args:
        graph: the whole graph; the bodies of If, Loop and Scan are walked too.
        ops: one op, or several.
        rewrite: changes the graph and returns how; returns None for a node that needs nothing;
            raises `Refused` with the reason for one that it can't mend.
    """
    names = (ops,) if isinstance(ops, str) else ops
    rewritten, refused = [], []
    for inner, node in walk(graph):
        op = node.op
        # a node without outputs went while another one was rewritten
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
