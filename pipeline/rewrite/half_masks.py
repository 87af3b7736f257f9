"""Gives attention masks a number that half precision can hold.

Exporters write a boolean mask as ``x + Where(mask, 0, -3.4e38)``, and passes as
``Where(mask, x, x - 3.4e38)``. Half precision cannot hold -3.4e38, so such attention would stay
float32. Only a Softmax reads the sum, and for every score that half precision can hold,
``x - 3.4e38`` is -3.4e38 exactly. So ``Where(mask, x, lowest)`` gives the same weights: 0 for
masked keys, and equal weights in a row where all keys are masked. The lowest float16 is -65504.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.graph.files import inner_nodes

_LOW = -1e30  # a mask is at most this; adding a score does not change it
_LONGEST = 8  # nodes between a mask and its Softmax


def fit_masks(
    graph: onnx.GraphProto, value_of: Callable[[str], np.ndarray | None], lowest: float
) -> int:
    """Changes masks of float32 scores in place, on the top level of a graph.

    Left alone: masks that something else than a Softmax reads, masks of several values, and a mask
    that is added to another one.

    Args:
        value_of: the value of a constant of one element by its name; None for other tensors.
        lowest: the lowest number of the half precision.

    Returns:
        How many masks were changed.
    """
    return _Masks(graph, value_of, lowest).fit()


class _Masks:
    def __init__(
        self,
        graph: onnx.GraphProto,
        value_of: Callable[[str], np.ndarray | None],
        lowest: float,
    ) -> None:
        self._graph, self._value_of, self._low = graph, value_of, lowest
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._kept = {value.name for value in graph.output}
        self._kept |= {n for node in graph.node for each in inner_nodes(node) for n in each.input}

    def fit(self) -> int:
        changed = 0
        for node in list(self._graph.node):
            if node.op_type == "Where":
                changed += self._selected(node)
            elif node.op_type == "Add":
                changed += self._added(node)
        if changed:
            self._drop_unused()
        return changed

    def _selected(self, node: onnx.NodeProto) -> bool:
        """``Where(mask, x, x + low)`` and ``Where(mask, x, low)``, either way round."""
        for place, other in ((2, 1), (1, 2)):
            scores, low = node.input[other], node.input[place]
            added = self._makers.get(low)
            terms = list(added.input) if added is not None and added.op_type == "Add" else []
            is_sum = scores in terms and any(self._is_low(term) for term in terms)
            found = is_sum or self._is_low(low, self._low)
            if found and self._is_score(scores) and self._ends(node):
                node.input[place] = self._lowest(node)
                return True
        return False

    def _added(self, node: onnx.NodeProto) -> bool:
        """``x + Where(mask, 0, low)``, either way round."""
        for scores, mask in (node.input, reversed(node.input)):
            made = self._makers.get(mask)
            if made is None or made.op_type != "Where" or not self._is_score(scores):
                continue
            zeros = [self._is_zero(name) for name in made.input[1:]]
            lows = [self._is_low(name) for name in made.input[1:]]
            if (zeros, lows) in (([True, False], [False, True]), ([False, True], [True, False])):
                if not self._ends(node):
                    return False
                lowest = self._lowest(node)
                branches = (scores, lowest) if zeros[0] else (lowest, scores)
                node.op_type = "Where"
                node.input[:] = [made.input[0], *branches]
                return True
        return False

    def _is_low(self, name: str, most: float = _LOW) -> bool:
        value = self._number(name)
        return value is not None and -np.inf < value <= most and value != self._low

    def _is_zero(self, name: str) -> bool:
        return self._number(name) == 0

    def _number(self, name: str) -> float | None:
        """The value of a constant that changes no shape."""
        value = self._value_of(name)
        return float(value.item()) if value is not None and value.ndim < 2 else None

    def _is_score(self, name: str) -> bool:
        """False for a constant, and for a sum with another mask."""
        made = self._makers.get(name)
        masked = made is not None and any(self._is_low(term) for term in made.input)
        return self._value_of(name) is None and not masked

    def _ends(self, node: onnx.NodeProto, depth: int = 0) -> bool:
        """True if only Softmaxes read the result, perhaps after views or further selections."""
        readers = self._readers.get(node.output[0], [])
        if node.output[0] in self._kept or not readers or depth > _LONGEST:
            return False
        return all(
            reader.op_type == "Softmax"
            or (
                reader.op_type in ("Where", "Reshape", "Identity", "Squeeze", "Unsqueeze")
                and self._ends(reader, depth + 1)
            )
            for reader in readers
        )

    def _lowest(self, node: onnx.NodeProto) -> str:
        """The name of a new constant. Its rank is 0, so that it changes no shape."""
        taken = {t.name for t in self._graph.initializer} | self._makers.keys()
        name = f"{node.name or node.output[0]}/lowest"
        while name in taken:
            name += "_"
        value = np.array(self._low, np.float32)
        self._graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _drop_unused(self) -> None:
        """Removes the sums and masks that nothing reads any more."""
        while True:
            read = {name for node in self._graph.node for name in node.input} | self._kept
            unused = [
                place
                for place, node in enumerate(self._graph.node)
                if node.op_type in ("Add", "Where") and read.isdisjoint(node.output)
            ]
            if not unused:
                return
            for place in reversed(unused):
                del self._graph.node[place]
