"""Checks that the rows of a batch are independent, in torch, ONNX Runtime and the engine.

Some models make rows depend on each other on purpose. If the reference does the same, the check
reports the dependence, but does not fail.
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

Part = tuple[RowChangeKind, str]  # the kind of dependence, and the output
ROWS: Final = "batch rows"


class RowSizes(NamedTuple):
    """The sizes for a check of rows.

    Args:
        sizes: The size of every dim, with at least two rows.
        smaller: A smaller legal batch size, or None.
    """

    sizes: Mapping[str, int]
    smaller: int | None


@dataclass(frozen=True)
class Batch:
    """The batch dim of a model, and the tensors with one row for each sample.

    Args:
        dim: The batch dim.
        interface: The interface of the model.
        rows: The names of the inputs and outputs whose first axis is the batch. No other input or
            output uses the dim.
    """

    dim: Dim
    interface: Interface
    rows: frozenset[str]

    def at(self, sizes: Mapping[str, int], low: int, near: int, high: int) -> RowSizes | None:
        """Returns sizes with at least two rows, and a smaller legal batch if there is one. Returns
        None if no such sizes are legal.

        Args:
            sizes: Legal sizes of all dims.
            low, high: The smallest and the largest batch to choose; `low` is legal.
            near: The wanted batch.
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
    """Finds the dim that is only the first axis of inputs and outputs; None if there is none.

    Tensors without the dim do not matter (a position, a mask for all rows). A dim that bounds the
    integers of an input counts no batch: they are positions on that axis, as in a graph.
    """
    whole = [i for i in interface.inputs if "int" in i.dtype]
    bounds = [size for i in whole for size in (i.low, i.high)]
    ends = [(end,) for end in bounds if isinstance(end, Dim | DimExpr)]
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
        if not any(_uses(shape, dim) for shape in (*others, *ends)) and rows & outputs.keys():
            return Batch(dim, interface, frozenset(rows))
    return None


def _uses(shape: Sequence[Size | str], dim: Dim) -> bool:
    return any(dim.name in DimExpr(size_text(size)).names for size in shape)


def cheap_sizes(batch: Batch, points: Sequence[PointInfo], memory_limit: int) -> RowSizes | None:
    """Returns the sizes with the least memory for a check of rows, based on the points that ran.
    Returns None if all are over the memory limit."""
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
    """Returns why no rows are checked: no batch, or `cheap_sizes` found nothing."""
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
    """The check, and the difference of each failed part of an output, also if forgiven."""

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
    """Checks that each row of a batch is independent of the others, within the tolerance.

    The same sample in every row must give the same rows. A row must not change with the samples in
    the other rows, with its position, or with the batch size.

    Args:
        runner: Computes the outputs.
        batch: The result of `find_batch`.
        at: The sizes.
        tolerance: Tolerance by output name.
        forgiven: Parts that the reference also fails, in the same output. They are reported, but
            do not fail the check.
        seed: The seed of the inputs' values.

    Raises:
        OutOfMemory: The sizes do not fit into the GPU's memory.
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
    except OutOfMemory:  # the rows stay unknown
        raise
    except Exception as error:  # any library error
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
    """Returns each part with the output that differs most, and the number of other outputs."""
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
    """Checks the rows of the ONNX files, and finds dependences that the model has on purpose.

    A dependence is on purpose if torch has it too. Without torch, every dependence of the exported
    model counts as on purpose.

    Args:
        batch, at, tolerance, seed: See `check_rows`.
        models: The ONNX files; the first is the exported model.
        torch_runner: The torch module, if any.

    Returns:
        One check for each model, and the parts that an engine may fail too.
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
