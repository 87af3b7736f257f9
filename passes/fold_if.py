"""``If`` whose condition is the same for every size and input becomes the branch that it takes.

TorchScript exports such an If for choices that Python makes at run time: ``squeeze(1)`` of a dim
that it does not know (``Equal(Gather(Shape(x), 1), 1)``), ``x.dim() == 4``, checks inside scripted
functions. TensorRT folds many of them, but reads both branches first. It fails on the branch that
is never taken if it has an op that TensorRT lacks, or a Reshape that is impossible for these sizes.
If TensorRT cannot fold a condition, both branches must have the same rank and sizes.

The condition is known if it comes from constants, ranks or static dims. It is also known if it
compares sizes whose difference is the same number for all sizes (`lib.known`).

An If whose condition depends on a dynamic size is left to TensorRT, which knows the profile's
range. It is refused if its branches differ in rank: TensorRT accepts it only if every size of the
profile takes the same branch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import drop_unused, is_op, label, values_of
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.known import depends_on_data, known


def run(graph: gs.Graph) -> PassResult:
    """Folds every If that has a known condition, inside other branches and Loops too.

    The branch's nodes and tensors keep their names, unless a name is taken. Its outputs get the
    names of the If's outputs. Nodes that only the other branch or the condition needed are
    dropped.
    """
    rewritten: list[Change] = []
    refused: list[Change] = []
    _fold_all(graph, graph, rewritten, refused)
    return PassResult(tuple(rewritten), tuple(refused))


def _fold_all(
    root: gs.Graph, graph: gs.Graph, rewritten: list[Change], refused: list[Change]
) -> None:
    todo = list(graph.nodes)
    while todo:
        node = todo.pop(0)
        if is_op(node, "If") and node.inputs:
            condition = known(node.inputs[0])
            if condition is not None and condition.size == 1:
                taken = "then" if condition.item() else "else"
                name = label(node)
                todo = [*_inline(root, graph, node, taken), *todo]
                rewritten.append(Change(name, "If", f"the condition is known: {taken}_branch"))
                continue
            why = _unequal_ranks(node)
            if why and not depends_on_data(node.inputs[0]):
                refused.append(Change(label(node), "If", why))
        for inner in _bodies(node):
            _fold_all(root, inner, rewritten, refused)


def _bodies(node: gs.Node) -> Iterator[gs.Graph]:
    yield from (value for value in node.attrs.values() if isinstance(value, gs.Graph))


def _unequal_ranks(node: gs.Node) -> str:
    """The refusal if the branches differ in rank; empty if they do not, or a rank is not known."""
    branches = [node.attrs["then_branch"].outputs, node.attrs["else_branch"].outputs]
    for one, other in zip(*branches, strict=True):
        if one.shape is not None and other.shape is not None and len(one.shape) != len(other.shape):
            return (
                f"its condition {node.inputs[0].name} depends on a dynamic size, and the branches "
                f"have the ranks {len(one.shape)} and {len(other.shape)}. TensorRT builds the If "
                "only if every size of the profile takes the same branch. Make that dim static, or "
                "remove the choice from the model (squeeze and unsqueeze of a dim of size 1)"
            )
    return ""


def _inline(root: gs.Graph, graph: gs.Graph, node: gs.Node, taken: str) -> list[gs.Node]:
    """Replaces the node by the nodes of the branch that it takes, and returns them."""
    name = label(node)
    branch: gs.Graph = node.attrs[f"{taken}_branch"]
    dead: gs.Graph = node.attrs["else_branch" if taken == "then" else "then_branch"]
    reads = _outer_reads(dead)
    for inner in (dead, *dead.subgraphs(recursive=True)):
        for gone in inner.nodes:
            gone.inputs.clear()
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    condition, outputs = node.inputs[0], list(node.outputs)
    node.inputs.clear()
    node.outputs.clear()
    node.attrs.clear()
    _rename(root, branch, name)
    nodes = list(branch.nodes)
    made = {id(output): maker for maker in nodes for output in maker.outputs}
    results = list(branch.outputs)
    for number, (inner, outer) in enumerate(zip(results, outputs, strict=True)):
        first = next(n for n, output in enumerate(results) if output is inner)
        if id(inner) not in made or first < number:
            short = f"{name}/identity" + (f"_{number}" if number else "")
            source = outputs[first] if first < number and id(inner) in made else inner
            nodes.append(gs.Node("Identity", short, {}, [source], [outer]))
            continue
        _take_over(branch, made[id(inner)], inner, outer)
        if not any(outer is output for output in root.outputs):
            outer.dtype, outer.shape = inner.dtype or outer.dtype, inner.shape
    del branch.nodes[:]
    graph.nodes[place : place + 1] = nodes
    for tensor in (condition, *reads):
        drop_unused(root, tensor)
    return [new for new in nodes if any(new is other for other in graph.nodes)]


def _take_over(branch: gs.Graph, maker: gs.Node, inner: gs.Tensor, outer: gs.Tensor) -> None:
    """Replaces `inner` by `outer` wherever the branch makes or reads it."""
    for reader in list(inner.outputs):
        for n, given in enumerate(reader.inputs):
            if given is inner:
                reader.inputs[n] = outer
    for graph in branch.subgraphs(recursive=True):
        graph.outputs[:] = [outer if output is inner else output for output in graph.outputs]
    place = next(n for n, output in enumerate(maker.outputs) if output is inner)
    maker.outputs[place] = outer


def _outer_reads(branch: gs.Graph) -> list[gs.Tensor]:
    """The tensors from outside that a branch reads."""
    graphs = (branch, *branch.subgraphs(recursive=True))
    own = {id(output) for graph in graphs for node in graph.nodes for output in node.outputs}
    own |= {id(tensor) for graph in graphs for tensor in graph.inputs}
    found: dict[int, gs.Tensor] = {}
    for graph in graphs:
        for node in graph.nodes:
            found.update({id(t): t for t in node.inputs if id(t) not in own and t.inputs})
    return list(found.values())


def _rename(root: gs.Graph, branch: gs.Graph, prefix: str) -> None:
    """Makes the branch's names unique outside of the branch.

    Nodes and tensors get a new name if theirs is taken. Constants that only the branch reads
    always get a new name: the file has them inside the branch, so outside they are new.
    """
    inner = (branch, *branch.subgraphs(recursive=True))
    own = {id(node) for graph in inner for node in graph.nodes}
    outside = [
        node
        for graph in (root, *root.subgraphs(recursive=True))
        for node in graph.nodes
        if id(node) not in own
    ]
    nodes_taken = {node.name for node in outside}
    taken = {t.name for node in outside for t in (*node.inputs, *node.outputs)}
    for graph in (root, *root.subgraphs(recursive=True)):
        taken |= {t.name for t in (*graph.inputs, *graph.outputs)}
    constants: dict[int, gs.Constant] = {}
    for node in branch.nodes:
        if node.name in nodes_taken:
            node.name = f"{prefix}/{node.name}"
        for output in node.outputs:
            if output.name in taken:
                output.name = f"{prefix}/{output.name}"
    for graph in inner:
        for node in graph.nodes:
            for n, tensor in enumerate(node.inputs):
                new = constants.get(id(tensor)) or _own_constant(tensor, own, prefix)
                if new is not None:
                    constants[id(tensor)] = new
                    node.inputs[n] = new
        graph.outputs[:] = [
            constants.get(id(output)) or _own_constant(output, own, prefix) or output
            for output in graph.outputs
        ]


def _own_constant(tensor: gs.Tensor, own: set[int], prefix: str) -> gs.Constant | None:
    if not isinstance(tensor, gs.Constant) or any(id(r) not in own for r in tensor.outputs):
        return None
    values = values_of(tensor)
    return None if values is None else gs.Constant(f"{prefix}/{tensor.name}", np.array(values))


PASS = Pass(
    name="fold_if",
    run=run,
    targets=EVERY,
    summary="If with a known condition -> the branch that it takes",
    fault="TensorRT reads both branches, even one that is never taken; if it cannot fold the "
    "condition, both branches must have equal sizes",
    evidence=(
        "https://github.com/NVIDIA/TensorRT/issues/2846",
        "https://github.com/NVIDIA/TensorRT/issues/1731",
        "https://github.com/NVIDIA/TensorRT/issues/4603",
        "tensorrt-rtx 1.7.1 fails on NonZero, and on an impossible Reshape, in a branch that is "
        "never taken",
    ),
    tolerable=True,  # the profile may fix the size that decides
)
