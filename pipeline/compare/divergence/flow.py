"""How values of an ONNX graph depend on each other, and where two runs start to differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

# The usual difference of two float32 runs after a few ops, as a share of a value's largest element.
# Noise grows slowly from node to node. A fault is a jump.
NOISE = 3e-6
_LEVELS = tuple(1e-6 * 3.0**n for n in range(11))  # up to 0.06
_JUMP = 10.0
_CHOOSE = ("TopK", "ArgMax", "ArgMin")  # of equal values, they take one
_SURE = 1e6  # the largest jump: another shape counts as this


@dataclass(frozen=True)
class Parting:
    """The first difference of two runs.

    Args:
        nodes: The nodes that may be wrong, in order. The last node makes `value`. The values of
            the others cannot be compared.
        value: The first value that differs.
        inside: The largest difference of the values that these nodes read; None if none of these
            is known to agree.
        jump: How many times larger the difference of `value` is.
    """

    nodes: tuple[onnx.NodeProto, ...]
    value: str
    inside: float | None
    jump: float


class Flow:
    """The main graph of a model, in its topological order."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.maker = {name: n for n, node in enumerate(self.nodes) for name in node.output if name}
        self.reads = [list(reads(node)) for node in self.nodes]
        self.given = {v.name for v in graph.input} - {t.name for t in graph.initializer}
        self.varies: list[bool] = []  # False: made of constants alone
        for names in self.reads:
            self.varies.append(any(name in self.given or self._varies(name) for name in names))

    def _varies(self, name: str) -> bool:
        place = self.maker.get(name)
        return place is not None and self.varies[place]

    def behind(self, values: Iterable[str], *, numbers: bool = False) -> set[int]:
        """Returns the indices of the nodes that make the values, and of all nodes before them. With
        `numbers`, nodes that count only by their shapes are left out."""
        todo = [self.maker[name] for name in values if name in self.maker]
        found: set[int] = set()
        while todo:
            place = todo.pop()
            if place not in found:
                found.add(place)
                if not (numbers and self.nodes[place].op_type in ("Shape", "Size")):
                    todo += [self.maker[name] for name in self.reads[place] if name in self.maker]
        return found

    def chooser(self, values: Collection[str]) -> onnx.NodeProto | None:
        """Returns the last node that chooses some of several elements, of those whose choice counts
        for these values; None if there is none."""
        before = self.behind(values, numbers=True)
        used = {name for n in before for name in self.reads[n]} | set(values)
        found = [
            n
            for n in before
            if self.nodes[n].op_type in _CHOOSE and self.nodes[n].output[-1] in used
        ]
        return self.nodes[max(found)] if found else None

    def parting(
        self,
        apart: Mapping[str, float],
        ends: Sequence[str],
        comparable: Collection[str],
        noise: float = NOISE,
        poor: Collection[str] = (),
    ) -> Parting | None:
        """Finds where two runs start to differ.

        A value shows the fault if it differs, but its inputs agree, or feed a value that agrees.
        The limit for "agrees" is not known. So every level is tried, and the largest jump decides.
        Among jumps of about the same size, the first value decides.

        Args:
            apart: The difference of each value, as a share of its largest element.
            ends: The values that are known to be wrong.
            comparable: The values that surely exist in the other run. If another value agrees, only
                its inputs count as right.
            noise: Values that differ by less count as equal.
            poor: Values that may agree by chance. They can show a fault, but not that their inputs
                are right.
        """
        found: dict[str, Parting] = {}
        for level in _LEVELS:
            if level >= noise / 3:
                for parting in self._at(level, apart, ends, comparable, noise, poor):
                    known = found.get(parting.value)
                    if known is None or parting.jump > known.jump:
                        found[parting.value] = parting
        likely = [p for p in found.values() if p.jump >= _JUMP]
        if not likely:
            return None
        most = max(p.jump for p in likely)
        return min((p for p in likely if p.jump >= most / 10), key=lambda p: self.maker[p.value])

    def _at(
        self,
        level: float,
        apart: Mapping[str, float],
        ends: Sequence[str],
        comparable: Collection[str],
        noise: float,
        poor: Collection[str],
    ) -> list[Parting]:
        """Returns the first values that differ by more than `level`, on the way to each end."""
        wrong = [name for name in ends if apart.get(name, math.inf) > level]
        alike = (name for name, far in apart.items() if far <= level and name not in poor)
        right = self.behind(alike, numbers=True)
        region = {n for n in self.behind(wrong) - right if self.varies[n]}
        partings = []
        later: set[int] = set()  # nodes after a value that already shows the fault
        for place in sorted(region):
            above = {self.maker[name] for name in self.reads[place] if name in self.maker}
            if above & later:
                later.add(place)
                continue
            shows = [
                name
                for name in self.nodes[place].output
                if name in comparable and apart.get(name, 0.0) > level
            ]
            if not shows:
                continue
            later.add(place)
            stretch = self._within(place, region)
            inputs = {name for n in stretch for name in self.reads[n]}
            near = [apart[name] for name in inputs if apart.get(name, 9.0) <= level]
            near += [0.0 for name in inputs if name in self.given]
            inside = max(near, default=None)
            value = max(shows, key=lambda name: apart[name])
            jump = min(apart[value] / max(inside or 0, noise), _SURE)
            nodes = tuple(self.nodes[n] for n in stretch)
            partings.append(Parting(nodes, value, inside, jump))
        return partings

    def _within(self, place: int, region: Collection[int]) -> list[int]:
        """Returns a node and the nodes before it that are in the region, in order."""
        todo, found = [place], set()
        while todo:
            n = todo.pop()
            if n in region and n not in found:
                found.add(n)
                todo += [self.maker[name] for name in self.reads[n] if name in self.maker]
        return sorted(found)


def reads(node: onnx.NodeProto) -> list[str]:
    """Returns the tensors that a node reads, also from the graph around its bodies."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            for inner in graph.node:
                names += [name for name in reads(inner) if name not in own]
                own.update(inner.output)
    return names
