"""How values depend on each other in an ONNX graph, and where along that way two runs part."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

# Float32 runs of the same arithmetic are this far apart after a few ops, in parts of a value's
# largest element. Noise grows slowly from node to node; a fault is a jump.
NOISE = 3e-6
_LEVELS = tuple(1e-6 * 3.0**n for n in range(11))  # up to 0.06
_JUMP = 10.0
_SURE = 1e6  # no jump counts for more: another shape is no number


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Args:
        nodes: those to blame, in order: the last one makes the value that shows it, those before
            it are what it is made of as far as that can't be compared.
        value: that value.
        inside: how far apart what these nodes read is, at most.
        jump: how much further apart the value is.
    """

    nodes: tuple[onnx.NodeProto, ...]
    value: str
    inside: float
    jump: float


class Flow:
    """The main graph of a model, in its order, which is topological."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.maker = {name: n for n, node in enumerate(self.nodes) for name in node.output if name}
        self.reads = [list(reads(node)) for node in self.nodes]
        given = {value.name for value in graph.input} - {t.name for t in graph.initializer}
        self.varies: list[bool] = []  # False: made of constants alone
        for names in self.reads:
            self.varies.append(any(name in given or self._varies(name) for name in names))

    def _varies(self, name: str) -> bool:
        place = self.maker.get(name)
        return place is not None and self.varies[place]

    def behind(self, values: Iterable[str], *, numbers: bool = False) -> set[int]:
        """The places of the nodes that make the values, and of all before them; with `numbers`,
        only of those whose numbers count, not just their shapes."""
        todo = [self.maker[name] for name in values if name in self.maker]
        found: set[int] = set()
        while todo:
            place = todo.pop()
            if place not in found:
                found.add(place)
                if not (numbers and self.nodes[place].op_type in ("Shape", "Size")):
                    todo += [self.maker[name] for name in self.reads[place] if name in self.maker]
        return found

    def parting(
        self,
        apart: Mapping[str, float],
        ends: Sequence[str],
        comparable: Collection[str],
        noise: float = NOISE,
        poor: Collection[str] = (),
    ) -> Parting | None:
        """Where two runs part.

        A value shows the fault if it is apart though all that it is made of is near, or feeds
        something that is near. How near is near enough is not known: every level is tried, and
        the largest jump decides, the first such value if several are about as large.

        Args:
            apart: how far apart the values are, in parts of their largest element.
            ends: the values that are known to be wrong.
            comparable: values of which the other run surely has a counterpart; the others only
                say that what they are made of is right, if they are found there.
            noise: below it, values are as good as equal.
            poor: values that may agree by chance: they can show a fault, but no innocence.
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
        """The first values that are apart by more than `level` on the way to each end."""
        wrong = [name for name in ends if apart.get(name, math.inf) > level]
        near = (name for name, far in apart.items() if far <= level and name not in poor)
        right = self.behind(near, numbers=True)
        region = {n for n in self.behind(wrong) - right if self.varies[n]}
        partings = []
        later: set[int] = set()  # nodes behind which a value has shown the fault already
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
            inside = max(
                (apart[name] for name in inputs if apart.get(name, 9.0) <= level), default=0
            )
            value = max(shows, key=lambda name: apart[name])
            jump = min(apart[value] / max(inside, noise), _SURE)
            nodes = tuple(self.nodes[n] for n in stretch)
            partings.append(Parting(nodes, value, inside, jump))
        return partings

    def _within(self, place: int, region: Collection[int]) -> list[int]:
        """The place and those before it, as far as they are in the region, in order."""
        todo, found = [place], set()
        while todo:
            n = todo.pop()
            if n in region and n not in found:
                found.add(n)
                todo += [self.maker[name] for name in self.reads[n] if name in self.maker]
        return sorted(found)


def reads(node: onnx.NodeProto) -> list[str]:
    """The tensors that a node reads, those of the graph around its bodies too."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            for inner in graph.node:
                names += [name for name in reads(inner) if name not in own]
                own.update(inner.output)
    return names
