"""Builds the nodes that replace one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import constant, label


class Chain:
    """New nodes in topological order, all named ``<name of the old node>/<short>``.

    `op` returns the new node's only output, so that calls nest:
    ``c.op("Mul", c.op("Sub", x, mean), gain)``. `finish` replaces the old node by the new nodes.
    `insert` keeps the old node, after the new ones.

    Args:
        graph: the graph (or body of If, Loop, Scan) that holds the node.
        node: the node to replace.
    """

    def __init__(self, graph: gs.Graph, node: gs.Node) -> None:
        self.graph, self.node, self.name = graph, node, label(node)
        self.nodes: list[gs.Node] = []
        self._taken: dict[str, int] = {}

    def op(
        self,
        op: str,
        *inputs: gs.Tensor | np.ndarray,
        short: str = "",
        dtype: Any = None,
        shape: Sequence[int | str | None] | None = None,
        outputs: int = 1,
        **attrs: Any,
    ) -> Any:
        """Adds a node. Inputs that are arrays become constants.

        Args:
            dtype, shape: of the output, if they are known (numpy dtype).

        Returns:
            The output, or a list of outputs if `outputs` is more than one.
        """
        name = self._unique(short or op.lower())
        made = [
            gs.Variable(
                name if n == 0 else f"{name}.{n}", dtype, None if shape is None else [*shape]
            )
            for n in range(outputs)
        ]
        given = [i if isinstance(i, gs.Tensor) else self.constant(i) for i in inputs]
        self.nodes.append(gs.Node(op, name, attrs, given, made))
        return made[0] if outputs == 1 else made

    def constant(self, values: Any, short: str = "constant") -> gs.Constant:
        """A new initializer; Python ints become int64, floats float32."""
        array = np.asarray(values)
        if not isinstance(values, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        return constant(self._unique(short), array)

    def cast(self, tensor: gs.Tensor, dtype: Any, short: str = "cast") -> gs.Variable:
        """A Cast to a numpy dtype (or ONNX's number for a dtype that numpy lacks)."""
        to = (
            dtype
            if isinstance(dtype, int)
            else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        )
        return self.op("Cast", tensor, short=short, dtype=dtype, shape=tensor.shape, to=int(to))

    def size(self, tensor: gs.Tensor, axis: int) -> gs.Variable:
        """The size of one axis (not negative) as int64 of shape ``(1,)``."""
        shape = self.op("Shape", tensor, short="shape", dtype=np.int64)
        return self.op(
            "Slice", shape, np.array([axis]), np.array([axis + 1]), np.array([0]),
            short="size", dtype=np.int64, shape=[1],
        )  # fmt: skip

    def finish(self, *results: gs.Tensor) -> None:
        """Replaces the old node by the new nodes. `results` take over the old node's outputs.

        Results are different outputs of the new nodes. The default is the last node's outputs.
        """
        wanted = results or tuple(self.nodes[-1].outputs)
        places = []
        for result in wanted:
            (maker,) = (n for n in self.nodes if any(o is result for o in n.outputs))
            places.append((maker, next(i for i, o in enumerate(maker.outputs) if o is result)))
        old = list(self.node.outputs)
        index = next(i for i, other in enumerate(self.graph.nodes) if other is self.node)
        self.node.outputs.clear()
        self.node.inputs.clear()
        for output, result in zip(old, wanted, strict=False):
            for reader in list(result.outputs):
                for n, given in enumerate(reader.inputs):
                    if given is result:
                        reader.inputs[n] = output
        for (maker, n), output in zip(places, old, strict=False):
            maker.outputs[n] = output
        self.graph.nodes[index : index + 1] = self.nodes

    def insert(self) -> None:
        """Puts the new nodes before the node, which stays."""
        index = next(i for i, other in enumerate(self.graph.nodes) if other is self.node)
        self.graph.nodes[index:index] = self.nodes

    def _unique(self, short: str) -> str:
        count = self._taken[short] = self._taken.get(short, -1) + 1
        return f"{self.name}/{short}" + (f"_{count}" if count else "")
