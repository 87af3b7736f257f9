"""Unique names for the tensors and nodes that a pass created."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues


class KnownNames:
    """The tensors and nodes of a graph, bodies included, as they are now."""

    def __init__(self, graph: gs.Graph) -> None:
        # the objects are kept alive, so that no id is reused
        self._things: dict[int, Any] = {id(t): t for t in all_tensors(graph)}
        self._things |= {id(node): node for node in _nodes(graph)}

    def rename_new(self, graph: gs.Graph, taken: Iterable[str]) -> None:
        """Renames new tensors and nodes whose name is taken.

        graph-surgeon would keep only one of two tensors with one name. ONNX Runtime refuses two
        nodes with one name. The graph's inputs and outputs keep their names.

        Args:
            taken: names of initializers, used or unused.
        """
        kept = {id(t) for t in (*graph.inputs, *graph.outputs)}
        others = set(taken)
        self._rename((t for t in all_tensors(graph) if id(t) not in kept), graph, others)
        names: dict[str, set[int]] = {}
        nodes = list(_nodes(graph))
        for node in nodes:
            names.setdefault(node.name, set()).add(id(node))
        for node in nodes:
            if node.name and id(node) not in self._things and len(names[node.name]) > 1:
                names[node.name].discard(id(node))
                node.name = _free(node.name, names)
                names[node.name] = {id(node)}

    def _rename(self, tensors: Iterator[gs.Tensor], graph: gs.Graph, others: set[str]) -> None:
        owners: dict[str, set[int]] = {}
        for tensor in all_tensors(graph):
            owners.setdefault(tensor.name, set()).add(id(tensor))
        used = {*others, *owners, *(t.name for t in graph.inputs)}
        for tensor in tensors:
            clash = len(owners[tensor.name]) > 1 or tensor.name in others
            if id(tensor) in self._things or not tensor.name or not clash:
                continue
            if isinstance(tensor, gs.Constant) and isinstance(tensor._values, LazyValues):
                continue
            owners[tensor.name].discard(id(tensor))
            tensor.name = _free(tensor.name, used)
            used.add(tensor.name)
            owners[tensor.name] = {id(tensor)}


def all_tensors(graph: gs.Graph) -> Iterator[gs.Tensor]:
    """Every tensor that a node reads or makes, in bodies too; with repetitions."""
    for node in _nodes(graph):
        yield from node.inputs
        yield from node.outputs


def _nodes(graph: gs.Graph) -> Iterator[gs.Node]:
    for inner in (graph, *graph.subgraphs(recursive=True)):
        yield from inner.nodes


def _free(name: str, used: Iterable[str]) -> str:
    number, names = 1, set(used)
    while f"{name}_{number}" in names:
        number += 1
    return f"{name}_{number}"
