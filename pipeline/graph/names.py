"""Fixes the names and inputs of a model for the passes. The model's results stay the same."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from pipeline.graph.files import nodes_of


def fix_defaults(model: onnx.ModelProto) -> tuple[str, ...]:
    """Removes inputs that have an initializer of the same name, as TensorRT does.

    Returns:
        A warning if a caller may replace these defaults: from IR version 4 on. Before version 4,
        every initializer was also listed as an input.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    places = [n for n, value in enumerate(model.graph.input) if value.name in constants]
    names = [model.graph.input[n].name for n in places]
    for n in reversed(places):
        del model.graph.input[n]
    old, model.ir_version = model.ir_version, max(model.ir_version, 4)
    if not names or old < 4:
        return ()
    return (
        f"{', '.join(names)}: the file has a default for each of these inputs. TensorRT treats a "
        "default as a constant, so the rewrite removed these inputs",
    )


def name_apart(graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Renames initializers in bodies of If, Loop and Scan that hide an outer tensor."""
    own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    own |= {name for node in graph.node for name in node.output}
    taken = set(outer | own)
    for tensor in graph.initializer:
        if tensor.name not in outer:
            continue
        number, old = 1, tensor.name
        while f"{old}_{number}" in taken:
            number += 1
        tensor.name = f"{old}_{number}"
        taken.add(tensor.name)
        _rename(graph, old, tensor.name)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                name_apart(inner, frozenset(taken))


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Makes a graph and its bodies read `new`, except bodies that define `old`."""
    for value in (*graph.output, *graph.value_info):
        if value.name == old:
            value.name = new
    for node in graph.node:
        for n, name in enumerate(node.input):
            if name == old:
                node.input[n] = new
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                own = {t.name for t in inner.initializer} | {v.name for v in inner.input}
                if old not in own | {name for n in inner.node for name in n.output}:
                    _rename(inner, old, new)


def name_nodes(graph: onnx.GraphProto) -> None:
    """Gives a unique name to each node without a name or with a repeated one."""
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


def values_of(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Every value of a graph and its subgraphs that has a type."""
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                if inner.node:
                    yield from values_of(inner)
