"""``NonZero`` and its readers become ``Where``, masked reductions or ``Range``, if that is exact.

TensorRT-RTX has no layer whose output size depends on data. Its parser refuses NonZero and Unique,
and NonMaxSuppression fails in its builder (NVIDIA/TensorRT-RTX#32 shows the same for NonZero in
1.4). TensorRT has both from 8.5 on. But 8.6.0 does not build a GatherND or ScatterND with a
NonZero's result as indices, so it needs the rewrites too. There, only a NonZero that a GatherND or
ScatterND still reads is refused, as a warning.

Three patterns of the exporters need no such size. Below, ``mask`` is NonZero's input. ``rows`` is
a GatherND of x with the transposed NonZero of the mask, or elementwise arithmetic f on it:

- ``x[mask] = rows`` (ScatterND): ``Where(mask, f(x), x)``, with f computed on every element.
- ``sum(rows)`` and other reductions to one number: over ``Where(mask, f(x), neutral element)``.
- ``len(rows)`` (Shape): a sum over the mask.

NonZero of a constant becomes a constant. NonZero of ``ConstantOfShape`` (the TorchScript exporter's
arange) becomes a Range. Everything else is refused. The pass does not write a form with a fixed
capacity (TopK of the mask and a count). Its output would differ in size, and every reader would
have to ignore the padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from pipeline.machine.target import BELOW_10, RTX
from pipeline.passes.graph_ops import drop_unused, is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult, Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.lift import Selection, identity_perm, selection_of
from pipeline.passes.lib.sizes import dims_of

_NO_LAYER = "and TensorRT-RTX has no layer for that"
_NO_INDEXING = "and TensorRT 8.6 builds no GatherND or ScatterND with such indices"
_ADVICE = (
    "In the model, compute on every element and choose with torch.where, or take a fixed number "
    "of elements with topk"
)
_REDUCTIONS = {
    "ReduceSum": 0.0,
    "ReduceMean": 0.0,
    "ReduceL1": 0.0,
    "ReduceL2": 0.0,
    "ReduceSumSquare": 0.0,
    "ReduceMax": -np.inf,
    "ReduceMin": np.inf,
}
_ACCUMULATE = {"none": "", "add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}


def run(graph: gs.Graph) -> PassResult:
    """Rewrites the readers of NonZero whose results have sizes that do not depend on data.

    Masks may have fewer axes than the data, and any dtype that NonZero accepts. The mask's dims
    must be provably equal to the data's first dims. Refused: a NonZero that a reader still needs,
    NonMaxSuppression and Unique.
    """
    return _run(graph, has_layer=False)


def run_below_10(graph: gs.Graph) -> PassResult:
    """As `run`; refuses only a NonZero that a GatherND or ScatterND still reads."""
    return _run(graph, has_layer=True)


def _run(graph: gs.Graph, *, has_layer: bool) -> PassResult:
    rewritten, reasons = _rewrite_readers(graph)
    refused = []
    for inner, node in walk(graph):
        if not node.outputs:
            continue
        name = label(node)
        if is_op(node, "NonZero"):
            change = _nonzero(graph, inner, node)
            rewritten += change
            if not change and not (has_layer and not _selects(node)):
                why = f" (not rewritten: {reasons[id(node)]})" if id(node) in reasons else ""
                size = f"the size of its result depends on the data of {node.inputs[0].name},"
                lacks = _NO_INDEXING if has_layer else _NO_LAYER
                refused.append(Change(name, node.op, f"{size} {lacks}. {_ADVICE}{why}"))
        elif not has_layer and (is_op(node, "Unique") or is_op(node, "NonMaxSuppression")):
            what = "boxes it keeps" if node.op == "NonMaxSuppression" else "values it returns"
            refused.append(
                Change(
                    name,
                    node.op,
                    f"how many {what} depends on the data, {_NO_LAYER}. End the "
                    "model before this node, and do this step on the engine's outputs",
                )
            )
    return PassResult(tuple(rewritten), tuple(refused))


def _rewrite_readers(graph: gs.Graph) -> tuple[list[Change], dict[int, str]]:
    """The rewritten ScatterNDs and reductions; and by the id of a NonZero, why one was not."""
    rewritten: list[Change] = []
    reasons: dict[int, str] = {}
    for inner, node in walk(graph):
        if not node.outputs or not (
            is_op(node, "ScatterND") or (node.op in _REDUCTIONS and is_op(node, node.op))
        ):
            continue
        selection = _selection_read_by(node)
        if selection is None:
            continue
        name, op, old = label(node), node.op, list(node.inputs)
        try:
            detail = (_scatter if op == "ScatterND" else _reduce)(inner, node, selection)
        except Refused as reason:
            reasons[id(selection.node)] = f"{op} {name!r}: {reason}"
            continue
        rewritten.append(Change(name, op, detail))
        for tensor in old:
            if tensor.inputs and not tensor.outputs:
                drop_unused(graph, tensor)
    return rewritten, reasons


def _selects(node: gs.Node) -> bool:
    """True if a GatherND or ScatterND reads the NonZero's result as its indices."""
    columns = [r.outputs[0] for r in node.outputs[0].outputs if identity_perm(r)]
    return any(
        (is_op(r, "GatherND") or is_op(r, "ScatterND")) and r.inputs[1] is tensor
        for tensor in (node.outputs[0], *columns)
        for r in tensor.outputs
    )


def _selection_read_by(node: gs.Node) -> Selection | None:
    if node.op == "ScatterND":
        return selection_of(node.inputs[1])
    todo, seen = [node.inputs[0]], 0
    while todo and seen < 64:
        seen += 1
        maker = todo.pop()
        if len(maker.inputs) == 1:
            if is_op(maker.inputs[0], "GatherND"):
                found = selection_of(maker.inputs[0].inputs[1])
                if found is not None:
                    return found
            todo += [t for t in maker.inputs[0].inputs if t.name]
    return None


def _scatter(graph: gs.Graph, node: gs.Node, selection: Selection) -> str:
    data, _, updates = node.inputs
    how = node.attrs.get("reduction", "none")
    if how not in _ACCUMULATE:
        raise Refused(f"reduction {how!r} is not known")
    c = Chain(graph, node)
    lift = selection.over(data, c)
    full = lift.full(updates, written_back=True)
    if _ACCUMULATE[how]:
        full = c.op(_ACCUMULATE[how], data, full, dtype=data.dtype, shape=data.shape)
    condition = lift.condition()
    c.op("Where", condition, full, data, short="where", dtype=data.dtype, shape=data.shape)
    c.finish()
    return f"Where with the mask {selection.mask.name}"


def _reduce(graph: gs.Graph, node: gs.Node, selection: Selection) -> str:
    rows = node.inputs[0]
    c = Chain(graph, node)
    lift = selection.over(selection.source_of(rows), c)
    _hold_all_axes(node, lift.row_rank)
    dtype = rows.dtype
    if dtype is None or isinstance(dtype, int):
        raise Refused(f"the dtype of {rows.name} is not known")
    fill = _REDUCTIONS[node.op]
    if np.dtype(dtype).kind != "f" and (node.op == "ReduceMean" or not np.isfinite(fill)):
        raise Refused(f"{node.op} of integers is not rewritten")
    full = lift.full(rows)
    shape = lift.data.shape
    masked = c.op(
        "Where", lift.condition(), full, np.array(fill, dtype),
        short="masked", dtype=dtype, shape=shape,
    )  # fmt: skip
    if node.op == "ReduceMean":
        work = np.float32 if dtype == np.float16 else dtype
        wide = c.cast(masked, work) if work != dtype else masked
        total = c.op("ReduceSum", wide, short="total", dtype=work, shape=[], keepdims=0)
        found = c.op("Div", total, c.cast(lift.count(), work), short="mean", dtype=work, shape=[])
        found = c.cast(found, dtype) if work != dtype else found
    else:
        found = c.op(node.op, masked, short="total", dtype=dtype, shape=[], keepdims=0)
    shape = [1] * lift.row_rank if node.attrs.get("keepdims", 1) else []
    c.op("Reshape", found, np.array(shape, np.int64), short="reshape", dtype=dtype, shape=shape)
    c.finish()
    return f"computed over every element, with {fill:g} outside {selection.mask.name}"


def _hold_all_axes(node: gs.Node, rank: int) -> None:
    axes = node.attrs.get("axes")
    if len(node.inputs) > 1 and node.inputs[1].name:
        values = values_of(node.inputs[1])
        if values is None:
            raise Refused("its axes are computed")
        axes = values.tolist()
    if not axes:
        if node.attrs.get("noop_with_empty_axes", 0):
            raise Refused("it reduces nothing")
    elif sorted(axis % rank for axis in axes) != list(range(rank)):
        raise Refused("it does not reduce all axes of the selection")


def _nonzero(root: gs.Graph, graph: gs.Graph, node: gs.Node) -> list[Change]:
    """Rewrites a NonZero that does not depend on data, or of which only the Shape is read."""
    name, data = label(node), node.inputs[0]
    values = values_of(data)
    maker = data.inputs[0] if len(data.inputs) == 1 else None
    c = Chain(graph, node)
    if values is not None and values.ndim > 0:
        c.op("Identity", c.constant(np.array(np.nonzero(values), np.int64)), dtype=np.int64)
        _finish_constant(root, c)
        return [Change(name, "NonZero", f"the constant that follows from {data.name}")]
    if maker is not None and is_op(maker, "ConstantOfShape"):
        value = values_of(maker.attrs["value"]) if "value" in maker.attrs else None
        size = maker.inputs[0]
        if value is not None and value.all() and dims_of(size) == [sympy.Integer(1)]:
            # the size as a scalar
            count = c.op("Squeeze", size, short="count", dtype=np.int64, shape=[])
            # gs.Constant, since `constant` turns rank 0 into rank 1
            zero, one = (gs.Constant(f"{name}/{n}", np.array(n, np.int64)) for n in (0, 1))
            places = c.op(
                "Range", zero, count, one, short="range", dtype=np.int64, shape=[None]
            )  # fmt: skip
            c.op("Reshape", places, np.array([1, -1]), dtype=np.int64, shape=[1, None])
            c.finish()
            drop_unused(root, data)
            return [Change(name, "NonZero", "Range up to the size of ConstantOfShape")]
    return _shapes(root, node)


def _finish_constant(root: gs.Graph, c: Chain) -> None:
    """Readers get the initializer directly; only a graph's output needs the Identity."""
    output = c.node.outputs[0]
    graphs = (root, *root.subgraphs(recursive=True))
    if any(output is o for graph in graphs for o in graph.outputs):
        c.finish()
        return
    (found,) = c.nodes[0].inputs
    c.nodes[0].inputs.clear()
    for reader in list(output.outputs):
        for n, given in enumerate(reader.inputs):
            if given is output:
                reader.inputs[n] = found
    for n, other in enumerate(c.graph.nodes):
        if other is c.node:
            del c.graph.nodes[n]
            break
    c.node.inputs.clear()
    c.node.outputs.clear()


def _shapes(root: gs.Graph, node: gs.Node) -> list[Change]:
    mask = node.inputs[0]
    output = node.outputs[0]
    outputs = {id(o) for g in (root, *root.subgraphs(recursive=True)) for o in g.outputs}
    columns = [r for r in output.outputs if identity_perm(r)]
    tensors = [output, *(r.outputs[0] for r in columns)]
    readers = [r for t in tensors for r in t.outputs if not any(r is k for k in columns)]
    if not readers or mask.shape is None or {id(t) for t in tensors} & outputs:
        return []
    rank = len(mask.shape)
    if not all(is_op(r, "Shape") and _part(r, [0, 1]) for r in readers):
        return []
    name, holders = label(node), {id(n): g for g, n in walk(root)}
    for reader in readers:
        c = Chain(holders[id(reader)], reader)
        ones = c.cast(c.cast(mask, np.bool_), np.int64)
        count = c.op("ReduceSum", ones, short="count", dtype=np.int64, shape=[], keepdims=0)
        column = c.op("Reshape", count, np.array([1]), dtype=np.int64, shape=[1])
        both = [c.constant(np.array([rank], np.int64)), column]
        parts = _part(reader, both if reader.inputs[0] is output else both[::-1])
        c.op("Concat", *parts, dtype=np.int64, shape=[len(parts)], axis=0)
        c.finish()
    for tensor in tensors:
        drop_unused(root, tensor)
    return [Change(name, "NonZero", "a sum over the mask")]


def _part(shape: gs.Node, sizes: list[Any]) -> list[Any]:
    return sizes[shape.attrs.get("start", 0) : shape.attrs.get("end")]


PASS = Pass(
    name="replace_nonzero",
    run=run,
    targets=(RTX,),
    summary="NonZero whose size does not matter -> Where, a masked reduction or Range",
    fault="NonZero and Unique do not parse, NonMaxSuppression does not build",
    evidence=("https://github.com/NVIDIA/TensorRT-RTX/issues/32",),
)
PASS_BELOW_10 = Pass(
    name="replace_nonzero_below_10",
    run=run_below_10,
    targets=(BELOW_10,),
    summary=f"{PASS.summary}, for TensorRT that has NonZero",
    fault="GatherND and ScatterND with a NonZero's result as indices do not build",
    evidence=(
        "TensorRT 8.6.0: 'Assertion mChunkTypeOfVertex[head] == ChunkType::kMYELIN failed' in "
        "cases of replace_nonzero; NonZero as a result and NonMaxSuppression are right",
    ),
    tolerable=True,  # a GatherND or ScatterND failed in tests, but may build in other graphs
)
