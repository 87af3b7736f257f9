"""Nodes that are computed from constants become constants; unused nodes are dropped.

onnx-graphsurgeon's ``fold_constants`` does it. It evaluates nodes in ONNX Runtime, and also folds
``Shape`` of static dims. Exporters that do not fold (TorchScript without constant folding,
tf2onnx) leave hundreds of such nodes. Some of them hide a constant that a parser needs.

Left alone: quantisation (a folded DequantizeLinear is no longer a quantised weight), random ops,
outputs of the graph, and results above 1 MiB (an Expand of a constant).

graph-surgeon 0.6.1 folds some nodes wrongly, so this pass hides them from it. It reads ``Shape``
with start or end as the whole shape. It reads a Constant's ``value_float`` as a double. Its "cast
elision" turns ``int(float(h) * 0.5)`` into ``h * int(0.5)``, which is 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import constant, is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult

_LIMIT = 1 << 20  # bytes
_KEPT = (
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Bernoulli", "Dropout",
    "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
_HIDDEN = "Cast while folding"
_WARNING, _FATAL = 2, 4  # ONNX Runtime's severities; its default is the first


def run(graph: gs.Graph) -> PassResult:
    """Folds and drops; refuses nothing. `fold_if` folds an If with a constant condition."""
    nodes = [node for _, node in walk(graph)]  # kept alive, so that no id is reused
    before = {id(node): (label(node), node.op) for node in nodes}
    left = len(nodes) + 1
    while len(nodes) < left:  # a Cast of a folded node can be folded in the next round
        left = len(nodes)
        _fold(graph)
        graph.cleanup(remove_unused_node_outputs=False, remove_unused_graph_inputs=False)
        nodes = [node for _, node in walk(graph)]
    after = {id(node) for node in nodes}
    return PassResult(
        tuple(
            Change(name, op, "folded into a constant, or unused")
            for key, (name, op) in before.items()
            if key not in after
        )
    )


def _fold(graph: gs.Graph) -> None:
    outputs = {o.name for inner in (graph, *graph.subgraphs(True)) for o in inner.outputs}
    hidden = []
    try:
        for _, node in list(walk(graph)):
            made = any(o.name in outputs for o in node.outputs)
            if is_op(node, "Shape") and not made and _part_of_shape(node):
                continue
            if made or _misread(node) or not _spelt_out(node):
                hidden.append((node, node.op))
                node.op = _HIDDEN
        with _silenced():
            graph.fold_constants(
                size_threshold=_LIMIT,
                flatten_subgraphs=False,
                partitioning="recursive",
                recurse_functions=False,
                should_exclude_node=lambda node: node.op in (*_KEPT, _HIDDEN),
            )
    finally:
        for node, op in hidden:
            node.op = op


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppresses warnings about nodes that cannot be evaluated: they are left alone.

    ONNX Runtime writes these warnings past Python. It has no way to read the current severity, so
    the default is restored."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(_FATAL)
    try:
        with G_LOGGER.suppress():
            yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)


def _spelt_out(node: gs.Node) -> bool:
    """Rewrites a Constant's numbers as a tensor of the dtype that the standard gives them.

    Returns False for a Constant of text, else True."""
    if not is_op(node, "Constant") or "value" in node.attrs:
        return True
    values = values_of(node.outputs[0])
    if values is None:
        return False
    node.attrs.clear()
    node.attrs["value"] = constant(f"{label(node)}/value", values)
    return True


def _misread(node: gs.Node) -> bool:
    """True for a node that graph-surgeon 0.6.1 folds wrongly. It ignores ``start`` and ``end`` of
    Shape and a node's domain, and removes Casts of sizes."""
    if node.domain not in (None, "", "ai.onnx"):
        return True
    if node.op == "Shape":
        return node.attrs.get("start", 0) != 0 or "end" in node.attrs
    return bool(node.op == "Cast") and values_of(node.inputs[0]) is None


def _part_of_shape(node: gs.Node) -> bool:
    """Folds a Shape with start or end whose sizes are numbers. Returns whether it did."""
    shape = node.inputs[0].shape
    if shape is None or not ("start" in node.attrs or "end" in node.attrs):
        return False
    sizes = list(shape)[node.attrs.get("start", 0) : node.attrs.get("end")]
    if not all(isinstance(size, (int, np.integer)) for size in sizes):
        return False
    output = node.outputs[0]
    node.outputs.clear()
    output.to_constant(np.array(sizes, np.int64))
    return True


PASS = Pass(
    name="fold_constants",
    run=run,
    targets=EVERY,
    clean_up=True,
    summary="nodes computed from constants or static shapes -> constants (onnx-graphsurgeon)",
    fault="more layers to build; TensorRT 8.6 needs inputs such as axes and pads as initializers",
    evidence=(
        "polygraphy surgeon sanitize --fold-constants is NVIDIA's own advice before a build",
        "a module of view, pad and mean through the TorchScript exporter: tests/passes",
    ),
)
