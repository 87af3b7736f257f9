"""Finds the custom nodes of a model and the plugin for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx.inliner

from pipeline.errors import BuildError
from pipeline.graph.files import nodes_of
from pipeline.graph.origin import DOMAINS, called, origin_of
from pipeline.machine.target import Target
from pipeline.plugins import PLUGINS
from pipeline.plugins.base import DOMAIN
from pipeline.plugins.loading import Key, creators, find_plugin, registered_nothing

_STANDARD = ("", "ai.onnx")


_LIBRARY = "pass the library that has the plugin: --plugin libfoo.so"


@dataclass(frozen=True)
class ParsableModel:
    """A model that can be parsed.

    Args:
        model: The file to parse: the model itself, or a changed copy in the same folder.
        plugins: The given plugins that the nodes need, as the user wrote them.
        warnings: One sentence each.
    """

    model: Path
    plugins: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def prepare(
    trt: Any,
    model: Path,
    spare: Path,
    target: Target,
    brought: Mapping[str, set[Key]],
    reads: Callable[[str], bool],
) -> ParsableModel:
    """Finds the plugin of every custom node, and writes a changed copy of the model if needed.

    Args:
        trt: The target's TensorRT.
        model: The ONNX file.
        spare: The path of a changed copy, in the same folder because of the external data.
        target: The TensorRT that parses the model.
        brought: The result of `load_plugins`.
        reads: Returns True if TensorRT's parser has an op of that name
            (`OnnxParser.supports_operator`).

    Raises:
        BuildError: A custom node has no plugin. The message names the node and the plugin.
    """
    proto = onnx.load(model, load_external_data=False)
    registry = creators(trt)
    wanted = {key[0] for keys in brought.values() for key in keys}
    given = len(proto.functions)
    for place in reversed(range(given)):
        if proto.functions[place].name in wanted:
            del proto.functions[place]
    changed = len(proto.functions) < given
    names = Counter(function.name for function in proto.functions)
    misread = [(f.domain, f.name) for f in proto.functions if names[f.name] > 1 or reads(f.name)]
    if misread:
        proto = onnx.inliner.inline_selected_functions(proto, misread)
        changed = True
    functions = {(function.domain, function.name) for function in proto.functions}
    used: set[Key] = set()
    for node in (*nodes_of(proto.graph), *(n for f in proto.functions for n in f.node)):
        if node.domain in _STANDARD or (node.domain, node.op_type) in functions:
            continue
        key = _key(node)
        if key in registry and not reads(node.op_type):
            used.add(key)
        elif not reads(node.op_type):
            raise BuildError(_missing(node, target, key, registry))
        elif onnx.defs.has(node.op_type):  # else TensorRT defines the op, such as TRT_FP8...
            raise BuildError(
                f"target {target} would parse the {called(node)}{origin_of(node)} as the standard "
                f"{node.op_type} of another domain: {DOMAINS.get(node.domain, 'rename the op')}"
            )
    if changed:
        onnx.save(proto, spare)
    # another library may need a library that registered nothing
    needed = tuple(
        name for name, keys in brought.items() if keys & used or registered_nothing(name, keys)
    )
    return ParsableModel(spare if changed else model, needed)


def _key(node: onnx.NodeProto) -> Key:
    """Returns the key by which TensorRT's parser finds the plugin of a node."""
    words = {a.name: a.s.decode(errors="replace") for a in node.attribute if a.type == a.STRING}
    return node.op_type, words.get("plugin_version", "1"), words.get("plugin_namespace", "")


def _missing(node: onnx.NodeProto, target: Target, key: Key, registry: set[Key]) -> str:
    what = f"target {target} has no plugin for the {called(node)}{origin_of(node)}"
    others = sorted(k for k in registry if k[0] == key[0])
    if others:
        there = ", ".join(f"version {v!r} namespace {n!r}" for _, v, n in others)
        return (
            f"{what} with version {key[1]!r} and namespace {key[2]!r}; it has {there}. Set the "
            "node's attributes plugin_version and plugin_namespace"
        )
    if node.domain == DOMAIN:
        for name in PLUGINS:
            plugin = find_plugin(name)
            if plugin.name == node.op_type:
                here = plugin.runs_on(target)
                where = f"pass --plugin {name}" if here else "but not for this target"
                return f"{what}: the op comes with pipeline, {where}"
    return f"{what}: {DOMAINS.get(node.domain, _LIBRARY)}"
