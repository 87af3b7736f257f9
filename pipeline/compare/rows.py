"""Whether each row of a batch is independent of the others, in torch, ONNX Runtime and the engine.

Some models make rows depend on each other on purpose. What the reference does, too, is reported and
is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from pipeline.artifact.manifest import PointInfo
from pipeline.errors import OutOfMemory, first_line
from pipeline.spec.closeness import apart
from pipeline.spec.dims import Dim, Size, kept_rules, size_text
from pipeline.spec.expressions import DimExpr
from pipeline.spec.findings import Note, note
from pipeline.spec.interface import Interface
from pipeline.spec.runner import Runner
from pipeline.spec.tensors import Feed, Tolerance
from pipeline.spec.verdicts import Check, CheckKind, RowChange, RowChangeKind, finite

Part = tuple[RowChangeKind, str]  # what is wrong, and in which output
ROWS: Final = "batch rows"


class RowSizes(NamedTuple):
    """Where rows are checked.

    Args:
        sizes: of all dims, with at least two rows.
        smaller: another legal size of the batch, or None.
    """

    sizes: Mapping[str, int]
    smaller: int | None


@dataclass(frozen=True)
class Batch:
    """Which dim counts the rows of a batch, and which tensors have a row for each.

    Args:
        dim: the batch.
        interface: of the model that has it.
        rows: names of the inputs and outputs that have the batch as their first axis; the others
            have nothing to do with it.
    """

    dim: Dim
    interface: Interface
    rows: frozenset[str]

    def at(self, sizes: Mapping[str, int], low: int, near: int, high: int) -> RowSizes | None:
        """Sizes with at least two rows, and a smaller batch that is legal, too, if there is one;
        None where there are no such sizes.

        Args:
            sizes: legal ones, of all dims.
            low, high: the batches to choose from; `low` is a legal one.
            near: the one that is wanted.
        """
        rules = self.interface.rules
        least = low if low > 0 else low + self.dim.multiple_of
        few = {**sizes, self.dim.name: least}
        for rows in (near, least + self.dim.multiple_of):
            found = {**sizes, self.dim.name: rows}
            if least < rows <= high and kept_rules(rules, found):
                return RowSizes(found, least if kept_rules(rules, few) else None)
        return RowSizes(few, None) if 1 < least <= high and kept_rules(rules, few) else None


def find_batch(interface: Interface) -> Batch | None:
    """The dim that is the first axis, and no other, of inputs and outputs; None without one.

    Tensors without the dim are left alone (a position, a mask for all rows).
    """
    outputs = interface.output_shapes
    shapes = {**interface.input_shapes, **outputs}
    first = [i.shape[0] for i in interface.inputs if i.shape]
    for dim in dict.fromkeys(size for size in first if isinstance(size, Dim)):
        rows = {
            name
            for name, shape in shapes.items()
            if shape and size_text(shape[0]) == dim.name and not _uses(shape[1:], dim)
        }
        others = [shape for name, shape in shapes.items() if name not in rows]
        if not any(_uses(shape, dim) for shape in others) and rows & outputs.keys():
            return Batch(dim, interface, frozenset(rows))
    return None


def _uses(shape: Sequence[Size | str], dim: Dim) -> bool:
    return any(dim.name in DimExpr(size_text(size)).names for size in shape)


def cheap_sizes(batch: Batch, points: Sequence[PointInfo], memory_limit: int) -> RowSizes | None:
    """The cheapest sizes to check the rows at, made from those of the points that were run, and
    the smaller batch; None where all are over the memory limit."""
    name = batch.dim.name
    for info in sorted((p for p in points if p.compared), key=lambda p: p.estimate_bytes):
        found = batch.at(info.sizes, batch.dim.min, batch.dim.min, batch.dim.max)
        if found is None:
            continue
        grows = max(found.sizes[name] / max(info.sizes[name], 1), 1.0)
        if info.estimate_bytes * grows <= memory_limit:
            return found
    return None


def why_no_rows(batch: Batch | None, points: Sequence[PointInfo]) -> Note:
    """Why no rows are checked where there is no batch, or `cheap_sizes` finds nothing."""
    if batch is None:
        return note("no-batch-dim")
    ran = [info.sizes for info in points if info.compared]
    if not ran:
        return note("rows-nothing-compared")
    if any(batch.at(sizes, batch.dim.min, batch.dim.min, batch.dim.max) for sizes in ran):
        return note("rows-too-large")
    return note("no-two-rows", name=batch.dim.name)


@dataclass(frozen=True)
class RowsFound:
    """The check, and how far each part of each output is off; also where that is forgiven."""

    info: Check
    against: Mapping[Part, float]


def check_rows(
    runner: Runner,
    batch: Batch,
    at: RowSizes,
    tolerance: Mapping[str, Tolerance],
    *,
    forgiven: Collection[Part] = (),
    seed: int = 0,
) -> RowsFound:
    """Whether each row of a batch is independent of the others, within the tolerance.

    The same sample in every row must give the same rows. A row must not change with the samples in
    the other rows, with its position, or with the batch size.

    Args:
        runner: computes the outputs.
        batch: see `find_batch`.
        at: the sizes.
        tolerance: by output name.
        forgiven: parts that the reference fails, too, in the same output: reported, no fault.
        seed: for the inputs' values.

    Raises:
        OutOfMemory: an engine's sizes do not fit into the GPU's memory.
    """
    name, (sizes, smaller) = runner.name, at
    feed = batch.interface.sample(sizes, seed)
    feeds = [
        feed,
        _with_rows(feed, batch, lambda a: np.repeat(a[:1], len(a), axis=0)),
        _with_rows(feed, batch, lambda a: a[::-1]),
    ]
    feeds += [] if smaller is None else [_with_rows(feed, batch, lambda a: a[:smaller])]
    try:
        plain, same, reverse, *less = [dict(outputs) for outputs in runner.run(feeds)]
    except OutOfMemory:  # no finding about the rows
        raise
    except Exception as error:  # every library has its own
        first = first_line(error)
        return RowsFound(Check(ROWS, name, "run-failed", dict(sizes), {"reason": first}), {})
    against: dict[Part, float] = {}
    for key in sorted(batch.rows & plain.keys()):
        a, b, c = plain[key], same[key], reverse[key]
        parts: list[tuple[RowChangeKind, np.ndarray, np.ndarray]] = [
            ("same-sample", np.repeat(b[:1], len(b), 0), b),
            ("other-samples", b[:1], a[:1]),
            ("position", a, c[::-1]),
        ]
        for outputs in less:
            parts.append(("batch-size", a[:smaller], outputs[key]))
        for part, want, got in parts:
            far, within = apart(want, got, tolerance[key])
            if not within:
                against[part, key] = far
    return RowsFound(_info(name, sizes, against, forgiven), against)


def _info(
    name: str, sizes: Mapping[str, int], against: Mapping[Part, float], forgiven: Collection[Part]
) -> Check:
    faults = _changes({p: far for p, far in against.items() if p not in forgiven}, False)
    meant = _changes({p: far for p, far in against.items() if p in forgiven}, True)
    kind: CheckKind = "rows-independent"
    if faults or meant:
        kind = "rows-depend" if faults else "rows-as-in-model"
    return Check(ROWS, name, kind, dict(sizes), rows=(*faults, *meant))


def _changes(against: Mapping[Part, float], in_model: bool) -> list[RowChange]:
    """Each part with the output that is the furthest off, and how many others there are."""
    parts: dict[RowChangeKind, list[tuple[float, str]]] = {}
    for (part, key), far in against.items():
        parts.setdefault(part, []).append((far, key))
    changes = []
    for part, found in parts.items():
        far, key = max(found, key=lambda pair: pair[0])
        changes.append(RowChange(part, key, finite(far), len(found) - 1, in_model))
    return changes


def _with_rows(
    feed: Feed, batch: Batch, change: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    return {k: np.ascontiguousarray(change(v)) if k in batch.rows else v for k, v in feed.items()}


def check_models(
    batch: Batch,
    at: RowSizes,
    models: Sequence[Runner],
    torch_runner: Runner | None,
    tolerance: Mapping[str, Tolerance],
    seed: int = 0,
) -> tuple[list[Check], frozenset[Part]]:
    """The rows of the ONNX files, and what of them the model means.

    Args:
        batch, at, tolerance, seed: see `check_rows`.
        models: the first is the exported model. Where rows depend on each other in it, torch is
            asked whether that is meant, if it is there; without torch it is.
        torch_runner: the torch module.

    Returns:
        One check a model, and what is forgiven to an engine: parts, each in one output.
    """
    checks: list[Check] = []
    forgiven: frozenset[Part] = frozenset()
    for runner in models:
        found = check_rows(runner, batch, at, tolerance, forgiven=forgiven, seed=seed)
        if not checks and found.against:
            meant = found.against
            if torch_runner is not None:
                judge = check_rows(torch_runner, batch, at, tolerance, seed=seed)
                meant = judge.against
            forgiven = frozenset(meant)
            found = RowsFound(_info(runner.name, at.sizes, found.against, forgiven), found.against)
        checks.append(found.info)
    return checks, forgiven
