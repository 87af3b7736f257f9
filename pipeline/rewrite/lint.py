"""Finds every node of an ONNX file that a target refuses or computes wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from pipeline.graph.files import nodes_of
from pipeline.graph.names import name_nodes
from pipeline.graph.origin import origin_of
from pipeline.machine.target import Target
from pipeline.passes import Change, Pass
from pipeline.rewrite.record import PassRecord
from pipeline.rewrite.rewrite import rewrite


@dataclass(frozen=True)
class LintFinding:
    """One node with a problem.

    Args:
        node, op: the node's name and op.
        origin: the torch module and source line that it came from, or empty.
        fault: what the target does with the unchanged node.
        mended: whether the rewrite fixes it.
        how: the pass and its replacement, or why the node cannot be fixed.
        certain: False if the target may compute the unchanged node correctly.
        mended_by: the pass that fixes it, or empty.
    """

    node: str
    op: str
    origin: str
    fault: str
    mended: bool
    how: str
    certain: bool = True
    mended_by: str = ""


@dataclass(frozen=True)
class LintResult:
    """All findings, the passes' warnings, and the opset before the rewrite."""

    target: str
    findings: tuple[LintFinding, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the rewrite fixes every certain finding."""
        return all(f.mended or not f.certain for f in self.findings)


def lint(source: Path, target: Target, passes: Sequence[Pass]) -> LintResult:
    """Runs the target's passes on the model without writing a file.

    Clean-up passes and the inlining of functions find no faults, so they are not listed.

    Raises:
        InputError, RewriteError: see `pipeline.rewrite.rewrite.rewrite`.
    """
    result = rewrite(source, None, target, passes)
    model = onnx.load(source, load_external_data=False)  # rewrite() has validated it
    name_nodes(model.graph)
    nodes = {node.name: node for node in nodes_of(model.graph)}
    findings = [
        _finding(nodes, record, change, mended, p)
        for record, p in zip(result.passes, passes, strict=True)
        if not p.clean_up and p.name != "inline_functions"
        for mended, changes in ((True, record.rewritten), (False, record.refused))
        for change in changes
    ]
    findings += _custom(model)
    return LintResult(target.name, tuple(findings), result.warnings)


def _custom(model: onnx.ModelProto) -> list[LintFinding]:
    """Nodes of other domains without a function in the file."""

    known = {(f.domain, f.name) for f in model.functions}
    return [
        LintFinding(
            node.name,
            f"{node.domain}::{node.op_type}",
            origin_of(node),
            "is not a standard ONNX op: the parser needs a plugin for it",
            False,
            "pass the library that holds its plugin: --plugin libfoo.so",
        )
        for node in nodes_of(model.graph)
        if node.domain not in ("", "ai.onnx") and (node.domain, node.op_type) not in known
    ]


def _finding(
    nodes: dict[str, onnx.NodeProto], record: PassRecord, change: Change, mended: bool, p: Pass
) -> LintFinding:

    name = change.node
    while name not in nodes and "/" in name:  # a node that an earlier pass made
        name = name.rpartition("/")[0]
    how = f"{record.name}: {change.detail}" if mended else change.detail
    origin = origin_of(nodes[name]) if name in nodes else ""
    fault = record.fault or record.summary
    certain, by = mended or not p.tolerable, record.name if mended else ""
    return LintFinding(change.node, change.op, origin, fault, mended, how, certain, by)
