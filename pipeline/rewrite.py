"""The rewrite stage: an ONNX file in, one out that the target's parser reads right.

Runs the passes that the target needs, in order, on one onnx-graphsurgeon graph, and checks the
graph after each that changed something. Graph-surgeon keeps the graph but loses what hangs on
it (metadata of nodes, values and the model, attribute types that it does not know), so its
result is written back into the source's own model: a node that no pass touched stays the very
same, a new node ``<name>/<short>`` inherits the metadata of ``<name>``.

Opsets are not lowered here: a model above what the target reads right gets a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.inliner

from pipeline._onnx_file import copy_model, load_model, nodes_of, save_model, without_weights
from pipeline._surgeon import Surgeon
from pipeline.errors import InputError
from pipeline.passes import DEFAULT_PASSES, Change, Pass
from pipeline.target import Target


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: whether the target needs it, why it exists, and the nodes it changed."""

    name: str
    needed: bool
    summary: str
    needs: tuple[str, ...]
    evidence: tuple[str, ...]
    rewritten: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()


@dataclass(frozen=True)
class RewriteResult:
    """What the stage did; plain data, for the manifest.

    Args:
        target: the target's name.
        opset: of the standard ONNX domain, unchanged.
        changed: False if the destination is a byte-identical copy of the source.
        nodes_before, nodes_after: nodes of the graph and of the bodies of If, Loop and Scan.
        passes: one record a pass, in order, those that the target does not need included.
        refused: the nodes that the target would fail or go wrong on and that no pass mends
            (`Pass.tolerable` refusals are warnings instead).
        warnings: one sentence each.
    """

    target: str
    opset: int
    changed: bool
    nodes_before: int
    nodes_after: int
    passes: tuple[PassRecord, ...]
    refused: tuple[Change, ...]
    warnings: tuple[str, ...]


def rewrite(
    source: Path, destination: Path, target: Target, passes: Sequence[Pass] = DEFAULT_PASSES
) -> RewriteResult:
    """Rewrites an ONNX file for a target.

    Model-local functions are inlined first where a pass is needed: passes don't look into them,
    and TensorRT 8.6 can't read them. Weights go to ``<destination name>.data`` where the source
    had them outside or they pass 1.5 GiB. Where nothing changes, the destination is a plain
    copy, with its external data under the same names.

    Args:
        source: the ONNX file, with its external data beside it.
        destination: the file to write, in an existing folder; not the source.
        target: decides which passes run.
        passes: in order.

    Raises:
        InputError: the source is not there, is no ONNX model, or is the destination.
        RewriteError: a pass broke the graph or its contract; it and those before it are named.
    """
    if source.resolve() == destination.resolve():
        raise InputError(f"{source}: the rewritten model can't have the same name as the source")
    model, external = load_model(source)
    outside = (destination.parent / f"{destination.name}.data").resolve()
    if outside in {(source.parent / name).resolve() for name in external}:
        raise InputError(f"{destination}: {outside.name} is the source's external data")
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    before = sum(1 for _ in nodes_of(model.graph))
    records = []
    needed = [p for p in passes if p.needed_by(target)]
    if model.functions and (needed or (target.flavour == "tensorrt" and target.version < (10,))):
        model, record = _inline_functions(model)
        records.append(record)
    _name_nodes(model.graph)
    surgeon = Surgeon(model) if needed else None
    done: list[str] = []
    for p in passes:
        changes: tuple[tuple[Change, ...], tuple[Change, ...]] = ((), ())
        if surgeon is not None and p in needed:
            changes = surgeon.run(p, done)
            done.append(p.name)
        needs = tuple(map(str, p.targets))
        records.append(PassRecord(p.name, p in needed, p.summary, needs, p.evidence, *changes))
    changed = any(record.rewritten for record in records)
    if changed:
        save_model(model, destination, external=bool(external))
    else:
        copy_model(source, destination, external)
    tolerable = {p.name for p in passes if p.tolerable}
    warnings = [
        f"{record.name} leaves {change.op} {change.node!r} as it is: {change.detail}"
        for record in records
        for change in record.refused
        if record.name in tolerable
    ]
    if opset > target.max_opset:
        warnings.append(
            f"the model's opset {opset} is above {target.max_opset}, the highest that {target} "
            "is known to read as the standard says"
        )
    return RewriteResult(
        target=target.name,
        opset=opset,
        changed=changed,
        nodes_before=before,
        nodes_after=sum(1 for _ in nodes_of(model.graph)),
        passes=tuple(records),
        refused=tuple(c for r in records if r.name not in tolerable for c in r.refused),
        warnings=tuple(warnings),
    )


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Gives nodes without a name, or with one that came before, a name of their own."""
    taken = {node.name for node in nodes_of(graph)}
    seen = {""}
    for node in nodes_of(graph):
        if node.name in seen:
            base = f"{node.name or node.op_type}_{next(iter(node.output), 'none')}"
            number, name = 1, base
            while name in taken:
                number, name = number + 1, f"{base}_{number}"
            node.name = name
            taken.add(name)
        seen.add(node.name)


def _inline_functions(model: onnx.ModelProto) -> tuple[onnx.ModelProto, PassRecord]:
    changes = tuple(
        Change(f.name, f"{f.domain}::{f.name}", f"function of {len(f.node)} nodes inlined")
        for f in model.functions
    )
    inlined = without_weights(model, onnx.inliner.inline_local_functions)
    assert inlined is not None
    evidence = ("TensorRT 8.6's parser reads no model-local functions",)
    why = "model-local functions -> their nodes"
    return inlined, PassRecord(
        "inline_functions", True, why, ("tensorrt below 10",), evidence, changes
    )
