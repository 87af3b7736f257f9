"""Follows a tensor through reshapes and transposes, and writes the same layout in fewer nodes.

Exporters write the heads of attention as long chains of views. A `Layout` says where every factor
of the sizes came from: a base tensor ``[s, b, 2304]`` may end as ``[b, 12, s, 64]``, with the
factor 3 of 2304 fixed at 1. All sizes are proven for every size of the dynamic dims
(`pipeline.passes.lib.sizes`); a step that cannot be proven ends the layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from pipeline.passes.graph_ops import values_of
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.sizes import ChainSizes, Dims
from pipeline.passes.lib.views import factor_of, is_linear, rank_of_constant


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of a size. Each is one object, so that equal sizes stay apart."""

    size: sympy.Expr


Axis = list[Factor]


@dataclass(frozen=True)
class Step:
    """A node to write: its op, and its inputs after the first or its ``perm``.

    ``Linear`` is a MatMul with a weight, and an Add if there is a bias.
    """

    op: str
    values: tuple[Any, ...]

    @property
    def nodes(self) -> int:
        return len(self.values) if self.op == "Linear" else 1


class Layout:
    """The axes of a tensor, each as the factors of the base tensor's axes that it holds.

    Args:
        dims: the sizes of the base tensor, where the chain begins.

    Attributes:
        before, axes: the factors of each axis of the base, and of the tensor.
        picked: the factors of the base of which one index is left.
        scale: the product of the numbers that the values were multiplied by.
    """

    def __init__(self, dims: Dims) -> None:
        self.sizes = ChainSizes()
        self.before: list[Axis] = [[] if size == 1 else [Factor(size)] for size in dims]
        self.axes = [list(axis) for axis in self.before]
        self.picked: dict[Factor, int] = {}
        self.scale = 1.0
        self.weight: np.ndarray | None = None
        self.bias: np.ndarray | None = None

    def dims(self) -> Dims:
        """The sizes of the tensor."""
        return [product(axis) for axis in self.axes]

    def follow(self, node: gs.Node, output: gs.Tensor) -> bool:
        """Applies a node of a chain. False if its effect is not proven."""
        if is_linear(node):
            done = self._linear(node)
        elif node.op == "Add":
            done = self._add(node)
        elif node.op in ("Mul", "Div"):
            number = factor_of(node)
            done = number is not None
            self.scale *= number or 1.0
        elif node.op == "Cast":
            done = True
        else:
            moves = {
                "Gather": self._gather, "Identity": self._identity, "Reshape": self._reshape,
                "Slice": self._slice, "Split": self._split_node, "Squeeze": self._squeeze,
                "Transpose": self._transpose, "Unsqueeze": self._unsqueeze,
            }  # fmt: skip
            done = moves[node.op](node, output)
        if done:
            self.sizes.learn(output, self.dims())
        return done

    def steps(self, target: Sequence[Axis]) -> list[Step] | None:
        """The nodes that make axes of these factors from the base, without the scale; None if the
        sizes of a Reshape would have to be computed."""
        steps: list[Step] = []
        before = [list(axis) for axis in self.before]
        picked = [f for axis in before for f in axis if f in self.picked]
        if self.weight is not None:
            steps.append(self._weights(before[-1], picked))
            before[-1] = [f for f in before[-1] if f not in picked]
            picked = [f for f in picked if any(f in axis for axis in before)]
        for factor in picked:
            n, axis = next((n, axis) for n, axis in enumerate(before) if factor in axis)
            length = product(axis[1:])
            if axis[0] is not factor or not length.is_Integer:
                return None
            start = self.picked[factor] * int(length)
            steps.append(Step("Slice", ([start], [start + int(length)], [n])))
            before[n] = axis[1:]
        moved = _moves(before, target)
        return None if moved is None else steps + moved

    def _weights(self, axis: Axis, picked: Sequence[Factor]) -> Step:
        """The linear layer, with only the outputs that are picked."""
        assert self.weight is not None
        index: list[Any] = [slice(None)]
        index += [self.picked[f] if f in picked else slice(None) for f in axis]
        shape = [int(f.size) for f in axis]

        def part(values: np.ndarray) -> np.ndarray:
            rows = values.reshape(-1, *shape)[tuple(index)]
            return np.ascontiguousarray(rows.reshape(len(rows), -1))

        weight = part(self.weight)
        return Step("Linear", (weight,) if self.bias is None else (weight, part(self.bias)[0]))

    def _split(self, factor: Factor, outer: sympy.Expr, inner: sympy.Expr) -> Axis:
        """Replaces a factor by two, in the base and in the axes."""
        made = [Factor(outer), Factor(inner)]
        for axes in (self.before, self.axes):
            for axis in axes:
                if factor in axis:
                    place = axis.index(factor)
                    axis[place : place + 1] = made
        return made

    def split_last(self, axis: int, inner: sympy.Expr) -> bool:
        """Makes the last factor of an axis have this size. False if that is not proven."""
        if not self.axes[axis]:
            return False
        last = self.axes[axis][-1]
        if _same(last.size, inner):
            return True
        ratio = sympy.cancel(last.size / inner)
        if not ratio.is_integer:
            return False
        self._split(last, ratio, inner)
        return True

    def _identity(self, *_: Any) -> bool:
        return True

    def _transpose(self, node: gs.Node, _: gs.Tensor) -> bool:
        perm = node.attrs.get("perm", range(len(self.axes))[::-1])
        self.axes = [self.axes[axis] for axis in perm]
        return True

    def _reshape(self, node: gs.Node, _: gs.Tensor) -> bool:
        wanted = self.sizes.reshaped(node, self.dims())
        if wanted is None:
            return False
        rest = [factor for axis in self.axes for factor in axis]
        made: list[Axis] = []
        for size in wanted:
            axis: Axis = []
            while size != 1:
                if not rest:
                    return False
                ratio = sympy.cancel(size / rest[0].size)
                if not ratio.is_integer:
                    inner = sympy.cancel(rest[0].size / size)
                    if not inner.is_integer:
                        return False
                    rest[:1] = self._split(rest[0], size, inner)
                    ratio = sympy.Integer(1)
                axis.append(rest.pop(0))
                size = ratio  # noqa: PLW2901
            made.append(axis)
        self.axes = made
        return not rest

    def _squeeze(self, node: gs.Node, _: gs.Tensor) -> bool:
        axes = _axes(node)
        if axes is None:
            return False
        gone = {axis % len(self.axes) for axis in axes}
        if any(self.axes[axis] for axis in gone):
            return False
        self.axes = [axis for n, axis in enumerate(self.axes) if n not in gone]
        return True

    def _unsqueeze(self, node: gs.Node, _: gs.Tensor) -> bool:
        axes = _axes(node)
        if axes is None:
            return False
        for axis in sorted(axis % (len(self.axes) + len(axes)) for axis in axes):
            self.axes.insert(axis, [])
        return True

    def _gather(self, node: gs.Node, _: gs.Tensor) -> bool:
        index = values_of(node.inputs[1])
        axis = int(node.attrs.get("axis", 0)) % len(self.axes)
        if index is None or index.ndim:
            return False
        if not self._pick(axis, int(index), 1):
            return False
        del self.axes[axis]
        return True

    def _slice(self, node: gs.Node, _: gs.Tensor) -> bool:
        numbers = [values_of(tensor) for tensor in node.inputs[1:]]
        if len(numbers) < 3 or any(n is None or n.size != 1 for n in numbers):
            return False
        start, end, axis, *steps = (int(n.item()) for n in numbers if n is not None)
        axis %= len(self.axes)
        size = product(self.axes[axis])
        if steps not in ([], [1]) or not size.is_Integer:
            return False
        start, end, _step = slice(start, end).indices(int(size))
        return end > start and self._pick(axis, start, end - start)

    def _split_node(self, node: gs.Node, output: gs.Tensor) -> bool:
        place = next(n for n, made in enumerate(node.outputs) if made is output)
        axis = int(node.attrs.get("axis", 0)) % len(self.axes)
        size, parts = product(self.axes[axis]), len(node.outputs)
        lengths = values_of(node.inputs[1]) if len(node.inputs) > 1 else None
        if not size.is_Integer or int(size) % parts:
            return False
        length = int(size) // parts
        if len(node.inputs) > 1 and (lengths is None or set(lengths.tolist()) != {length}):
            return False
        return self._pick(axis, place * length, length)

    def _pick(self, axis: int, start: int, length: int) -> bool:
        """Keeps a part of an axis: all of it, or one of several equal parts."""
        size = product(self.axes[axis])
        if not size.is_Integer:
            return False
        start %= int(size)
        if length == int(size):
            return True
        if len(self.axes[axis]) != 1 or int(size) % length or start % length:
            return False
        outer = self.axes[axis][0]
        if length > 1:
            outer, _ = self._split(outer, size / length, sympy.Integer(length))
        self.picked[outer] = start // length
        self.axes[axis].remove(outer)
        return True

    def _linear(self, node: gs.Node) -> bool:
        """A product with a weight, as long as the base's last axis is whole."""
        if self.weight is not None or self.picked or self.axes[-1] != self.before[-1]:
            return False
        weight = values_of(node.inputs[1])
        assert weight is not None
        self.weight = weight.T if node.attrs.get("transB", 0) else weight
        self.bias = values_of(node.inputs[2]) if len(node.inputs) > 2 else None
        self.before[-1] = [Factor(sympy.Integer(self.weight.shape[1]))]
        self.axes[-1] = list(self.before[-1])
        return True

    def _add(self, node: gs.Node) -> bool:
        """The bias right after the product."""
        bias = next(values_of(t) for t in node.inputs if rank_of_constant(t) == 1)
        if self.weight is None or self.bias is not None or bias is None:
            return False
        if bias.shape != (self.weight.shape[1],) or self.axes[-1] != self.before[-1]:
            return False
        self.bias = bias
        return True


def product(axis: Sequence[Factor]) -> sympy.Expr:
    """The size of an axis."""
    return sympy.Mul(*(factor.size for factor in axis))


def write(c: Chain, data: gs.Tensor, steps: Sequence[Step], dtype: Any) -> gs.Tensor:
    """Adds the nodes of `Layout.steps` to a chain, and returns their result."""
    for step in steps:
        if step.op == "Linear":
            weight, *bias = step.values
            data = c.op("MatMul", data, weight, dtype=dtype)
            if bias:
                data = c.op("Add", data, bias[0], short="bias", dtype=dtype)
        elif step.op == "Transpose":
            data = c.op("Transpose", data, dtype=dtype, perm=list(step.values))
        else:
            inputs = [np.array(values, np.int64) for values in step.values]
            data = c.op(step.op, data, *inputs, dtype=dtype)
    return data


def _moves(before: Sequence[Axis], target: Sequence[Axis]) -> list[Step] | None:
    """Reshape, Transpose, Reshape, as far as they are needed."""
    before, target = _with_ones(before, target)
    order = [factor for axis in before for factor in axis]
    follower = dict(itertools.pairwise(order))
    parts: list[Axis] = []  # the target's axes, cut where the base's order is interrupted
    for axis in target:
        for n, factor in enumerate(axis):
            if n and follower.get(axis[n - 1]) is factor:
                parts[-1].append(factor)
            else:
                parts.append([factor])
    if sorted(map(id, order)) != sorted(id(f) for part in parts for f in part):
        return None
    cut = sorted(parts, key=lambda part: order.index(part[0]))
    perm = [next(n for n, part in enumerate(cut) if part is p) for p in parts]
    steps: list[Step] = []
    for op in ("first", "transpose", "last"):
        if op == "transpose":
            if perm != sorted(perm):
                steps.append(Step("Transpose", tuple(perm)))
            continue
        one, other = (before, cut) if op == "first" else (parts, target)
        if op == "first" and perm == sorted(perm):
            other = target  # one Reshape is enough
        elif op == "last" and perm == sorted(perm):
            continue
        if [list(axis) for axis in one] != [list(axis) for axis in other]:
            sizes = _sizes(one, other)
            if sizes is None:
                return None
            steps.append(Step("Reshape", (sizes,)))
    return steps


def _with_ones(before: Sequence[Axis], target: Sequence[Axis]) -> tuple[list[Axis], list[Axis]]:
    """Axes of size 1 in both get a factor, so that they move like other axes."""
    made = [list(map(list, axes)) for axes in (before, target)]
    empty = [[axis for axis in axes if not axis] for axes in made]
    for pair in zip(*empty, strict=False):
        one = Factor(sympy.Integer(1))
        for axis in pair:
            axis.append(one)
    return made[0], made[1]


def _sizes(before: Sequence[Axis], after: Sequence[Axis]) -> list[int] | None:
    """The sizes of a Reshape: numbers, 0 for an axis in its place, and -1 once."""
    sizes = []
    for n, axis in enumerate(after):
        size = product(axis)
        if n < len(before) and list(before[n]) == list(axis) and not size.is_Integer:
            sizes.append(0)
        else:
            sizes.append(int(size) if size.is_Integer else -1)
    return sizes if sizes.count(-1) <= 1 else None


def _same(one: sympy.Expr, other: sympy.Expr) -> bool:
    return bool(sympy.cancel(one - other) == 0)


def _axes(node: gs.Node) -> list[int] | None:
    given = node.attrs.get("axes") if len(node.inputs) < 2 else values_of(node.inputs[1])
    return None if given is None else [int(axis) for axis in np.ravel(given)]
