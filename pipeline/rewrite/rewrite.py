"""The rewrite stage: rewrites an ONNX file so that the target's parser reads it correctly.

It runs the passes that the target needs, in order, on one onnx-graphsurgeon graph. It checks the
graph after each pass that changed something. Graph-surgeon loses metadata and attribute types that
it does not know, so its result is written back into the source's model. A node that no pass changed
stays identical. A new node ``<name>/<short>`` inherits the metadata of ``<name>``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from pipeline.errors import InputError, RewriteError
from pipeline.graph.external_data import load_model
from pipeline.graph.files import check_source, copy_model, nodes_of, opset_of, save_model
from pipeline.graph.names import fix_defaults, name_apart, name_nodes
from pipeline.graph.origin import source_of
from pipeline.machine.target import Target
from pipeline.passes import DEFAULT_PASSES, Change, Pass, inline_functions
from pipeline.rewrite.record import PassRecord
from pipeline.rewrite.surgeon import Surgeon


@dataclass(frozen=True)
class Rewritten:
    """What the stage did; plain data, for the manifest.

    Args:
        target: the target's name.
        opset: opset of the standard ONNX domain in the result.
        changed: False if the destination is a byte-identical copy of the source.
        nodes_before, nodes_after: numbers of nodes, with the bodies of If, Loop and Scan.
        passes: one record per pass, in order, also for passes that the target does not need.
        refused: the nodes that the target cannot run correctly and that no pass fixes.
            (Refusals of `Pass.tolerable` passes are warnings instead.)
        warnings: warnings for the user.
        library_seconds: seconds inside libraries, by name.
        lines: the names of the refused nodes, with the module and the line that each comes from.
    """

    target: str
    opset: int
    changed: bool
    nodes_before: int
    nodes_after: int
    passes: tuple[PassRecord, ...]
    refused: tuple[Change, ...]
    warnings: tuple[str, ...]
    library_seconds: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)


def rewrite(
    source: Path,
    destination: Path | None,
    target: Target,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    *,
    skip: Collection[str] = (),
    keep_functions: Collection[str] = (),
    diff: bool = False,
) -> Rewritten:
    """Rewrites an ONNX file for a target.

    Weights go to ``<destination name>.data`` if the source has them in an external file, or if they
    exceed 1.5 GiB. If nothing changes, the destination is a plain copy, with external data of the
    same names.

    Args:
        source: the ONNX file, with its external data beside it.
        destination: the file to write, in an existing folder; not the source. None writes
            nothing.
        target: decides which passes run.
        passes: the passes, in order.
        skip: names of passes that do not run, even if the target needs them.
        keep_functions: names of model-local functions that stay, since the target has plugins for
            them.
        diff: fill in `PassRecord.diff`.

    Raises:
        InputError: the source does not exist, is not a valid ONNX model, has an opset that no pass
            was tried on, or is the destination.
        RewriteError: a pass broke the graph or its contract. The message names the pass and the
            passes before it.
    """
    model, external = load_model(source)
    if destination is not None:
        _check_places(source, destination, external)
    opset = check_source(model, source)
    before = sum(1 for _ in nodes_of(model.graph))
    name_nodes(model.graph)
    name_apart(model.graph)
    fixed = fix_defaults(model)
    own_inline = inline_functions.keeping(frozenset(keep_functions))
    passes = [own_inline if p.name == own_inline.name else p for p in passes]
    surgeon: Surgeon | None = None
    done: list[str] = []
    records = []
    for p in passes:
        needed, skipped = p.needed_by(target), p.name in skip
        changes: tuple[tuple[Change, ...], tuple[Change, ...]] = ((), ())
        lines: tuple[str, ...] = ()
        if needed and not skipped:
            surgeon = surgeon or Surgeon(model)
            old = _texts(surgeon.model) if diff else {}
            changes = surgeon.run(p, done)
            lines = _diff(old, _texts(surgeon.model)) if diff else ()
            done.append(p.name)
        records.append(
            PassRecord(
                p.name, needed, p.summary, tuple(map(str, p.targets)), p.evidence, p.fault,
                p.clean_up, needed and skipped, *changes, lines,
            )
        )  # fmt: skip
    model = model if surgeon is None else surgeon.model
    changed = any(record.rewritten for record in records)
    if destination is not None and changed:
        save_model(model, destination, external=bool(external))
    elif destination is not None:
        copy_model(source, destination, external)
    opset = opset_of(model)
    refused = _final(records, passes)
    names = {change.node for change in refused}
    return Rewritten(
        target=target.name,
        opset=opset,
        changed=changed,
        nodes_before=before,
        nodes_after=sum(1 for _ in nodes_of(model.graph)),
        passes=tuple(records),
        refused=refused,
        warnings=(*fixed, *_warnings(records, passes, opset, target), *_narrowed(model, target)),
        lines={n.name: source_of(n) for n in nodes_of(model.graph) if n.name in names},
    )


def raise_refused(result: Rewritten) -> None:
    """Raises `RewriteError` if the target cannot run a node and no pass fixes it."""
    if result.refused:
        first: dict[tuple[str, str], str] = {}  # one node of each op and line
        for c in result.refused:
            line = result.lines.get(c.node, "")
            place = f" ({line})" if line else ""
            first.setdefault((c.op, line or c.node), f"{c.op} {c.node!r}{place}: {c.detail}")
        shown = [*first.values()][:3]
        words, left = "; ".join(shown), len(result.refused) - len(shown)
        more = f" (and {left} more)" if left else ""
        raise RewriteError(
            f"target {result.target} cannot run this graph correctly: {words}{more}",
            detail="\n".join(f"{c.op} {c.node!r}: {c.detail}" for c in result.refused),
        )


def _check_places(source: Path, destination: Path, external: Collection[str]) -> None:
    if source.resolve() == destination.resolve():
        raise InputError(
            f"{source}: the rewritten model cannot have the same name as the source. "
            "Give it another name"
        )
    outside = (destination.parent / f"{destination.name}.data").resolve()
    if outside in {(source.parent / name).resolve() for name in external}:
        raise InputError(
            f"{destination}: its weights would overwrite {outside.name}, the source's external "
            "data. Give the rewritten model another name"
        )


def _final(records: Sequence[PassRecord], passes: Sequence[Pass]) -> tuple[Change, ...]:
    tolerable = {p.name for p in passes if p.tolerable}
    return tuple(c for r in records if r.name not in tolerable for c in r.refused)


def _warnings(
    records: Sequence[PassRecord], passes: Sequence[Pass], opset: int, target: Target
) -> tuple[str, ...]:
    tolerable = {p.name for p in passes if p.tolerable}
    warnings = [
        f"{record.name} did not rewrite {change.op} {change.node!r}: {change.detail}"
        for record in records
        for change in record.refused
        if record.name in tolerable
    ]
    if opset > target.max_opset:
        warnings.append(
            f"the model's opset {opset} is above {target.max_opset}, the highest opset that "
            f"{target} is known to read correctly"
        )
    return tuple(warnings)


def _narrowed(model: onnx.ModelProto, target: Target) -> tuple[str, ...]:
    """Warnings if the target computes with a smaller dtype than the model's."""
    constants = {tensor.name for tensor in model.graph.initializer}
    ins = [value for value in model.graph.input if value.name not in constants]

    def of(kind: int, values: Iterable[onnx.ValueInfoProto]) -> str:
        return ", ".join(v.name for v in values if v.type.tensor_type.elem_type == kind)

    warnings = []
    wide = of(onnx.TensorProto.INT64, ins)
    if wide and target.flavour == "tensorrt" and target.version < (10,):
        warnings.append(
            f"{wide}: {target} computes int64 as int32. Values beyond 2**31 - 1 are wrong "
            "without an error"
        )
    wide = of(onnx.TensorProto.DOUBLE, [*ins, *model.graph.output])
    if wide:
        warnings.append(
            f"{wide}: {target} computes float64 as float32. Digits beyond the seventh are wrong "
            "without an error, and ONNX Runtime does not show it"
        )
    return tuple(warnings)


def _texts(model: onnx.ModelProto) -> Mapping[str, str]:
    """Every node as one line of ONNX text, by name. Bodies are omitted."""
    texts = {}
    for node in nodes_of(model.graph):
        bare = onnx.NodeProto()
        bare.CopyFrom(node)
        del bare.metadata_props[:]
        bare.doc_string = ""
        for place in reversed(range(len(bare.attribute))):
            if bare.attribute[place].HasField("g"):
                del bare.attribute[place]
        texts[node.name] = " ".join(onnx.printer.to_text(bare).split())
    return texts


def _diff(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    gone = {name for name, text in before.items() if after.get(name) != text}
    new = {name for name, text in after.items() if before.get(name) != text}
    lines = [f"- {before[name]}" for name in before if name in gone]
    return (*lines, *(f"+ {after[name]}" for name in after if name in new))
