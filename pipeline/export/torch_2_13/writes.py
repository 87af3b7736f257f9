"""Ops that give a new tensor, in place of ops that change one, such as ``relu_``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

# ops whose result has the type of a floating-point input; `gt_` writes floats, and `gt` gives bools
_SAME_TYPE = frozenset(
    {
        "abs", "add", "as_strided", "clamp", "clamp_max", "clamp_min", "div", "elu", "exp",
        "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "mul", "neg", "relu", "relu6",
        "selu", "sigmoid", "silu", "sqrt", "square", "squeeze", "sub", "tanh", "unsqueeze",
    }
)  # fmt: skip


class NotSimpleError(Exception):
    """The program has to go torch's own way."""


def without_writes(graph: Graph) -> tuple[dict[Node, Any], dict[Node, dict[Node, Node]]]:
    """Ops that give a new tensor, in place of ops that change one.

    Returns:
        The op for each node that changes a tensor, and for each node the nodes that it has to read
        in place of those that it names.

    Raises:
        NotSimpleError: A changed tensor is an input, a weight or a part of another tensor.
    """
    targets: dict[Node, Any] = {}
    instead: dict[Node, dict[Node, Node]] = {}
    shown = _Storages(graph)
    place = {node: n for n, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "call_function" or not writes(node.target):
            continue
        targets[node] = _giving(node)
        if node not in shown.of(node.args[0]):
            raise NotSimpleError  # a loaded program does not tell who shares memory
        whole = {node, *shown.whole(node.args[0], targets)}
        for other in shown.of(node.args[0]):
            later = [user for user in other.users if place[user] > place[node]]
            if other in whole:
                for user in later:
                    if other is not node:
                        instead.setdefault(user, {})[other] = node
            elif place[other] < place[node] and later:
                raise NotSimpleError  # a view shows the change
    return targets, instead


class _Storages:
    """Which nodes show the same memory."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[StorageWeakRef, list[Node]] = {}
        for node in graph.nodes:
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor):
                    self._nodes.setdefault(_storage(value), []).append(node)

    def of(self, node: Node) -> list[Node]:
        return self._nodes[_storage(node.meta["val"])]

    def whole(self, node: Node, targets: Mapping[Node, Any]) -> list[Node]:
        """The names of the same whole tensor: the node that made it, and all that changed it."""
        first, *others = self.of(node)
        if first.op != "call_function" or not isinstance(first.meta["val"], torch.Tensor):
            raise NotSimpleError
        found = [first, *(other for other in others if other in targets)]
        if node not in found:
            raise NotSimpleError
        return found


def _storage(value: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _giving(node: Node) -> Any:
    """The op that gives the result of an op such as ``add_`` as a new tensor.

    Raises:
        NotSimpleError: There is none, or its result could have another type.
    """
    target: Any = node.target
    full = target._schema.name
    name = full.removeprefix("aten::").removesuffix("_")
    first = node.args[0] if node.args else None
    if name not in _SAME_TYPE or not isinstance(first, Node):
        raise NotSimpleError
    overload = getattr(getattr(torch.ops.aten, name), target._overloadname, None)
    if overload is None or overload._schema.is_mutable or not full.endswith("_"):
        raise NotSimpleError
    own, other = ([a.name for a in op._schema.arguments] for op in (target, overload))
    values = [a.meta.get("val") for a in node.all_input_nodes]
    types = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    if own != other or len(types) != 1 or not types.pop().is_floating_point:
        raise NotSimpleError
    return overload
