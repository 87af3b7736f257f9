"""What a case is: a small graph in ONNX text, and what a pass shall do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnx.parser

Kind = Literal["positive", "near miss", "refusal"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A graph, written as ONNX text, and what a pass shall do with it.

    Args:
        kind: for the pass of that name; every other pass only has to keep its contract.
        shapes: input shapes to run at, from the smallest to the largest.
        reason: words that a refusal's reason holds.
        dims: symbolic dims that ONNX text can't write, by value name.
    """

    pass_name: str
    name: str
    kind: Kind
    text: str
    shapes: tuple[Shapes, ...]
    reason: str = ""
    opset: int = 18
    dims: dict[str, tuple[int | str, ...]] | None = None

    def __str__(self) -> str:
        return f"{self.pass_name}-{self.name}".replace(" ", "_")

    def model(self) -> onnx.ModelProto:
        """The graph as a checked model, with a name for every node."""
        head = f'<ir_version: 8, opset_import: ["" : {self.opset}]>'
        model = onnx.parser.parse_model(f"{head} g {self.text}")
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for dim, size in zip(
                value.type.tensor_type.shape.dim,
                (self.dims or {}).get(value.name, ()),
                strict=False,
            ):
                dim.Clear()
                if isinstance(size, int):
                    dim.dim_value = size
                else:
                    dim.dim_param = size
        _name(model.graph, "")
        onnx.checker.check_model(model, full_check=True)
        return model

    def feeds(self, shapes: Shapes, seed: int = 0) -> dict[str, np.ndarray]:
        """Random inputs of these shapes: far from zero mean, so that a wrong mean shows."""
        rng = np.random.default_rng(seed)
        feeds = {}
        for value in self.model().graph.input:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            values = rng.normal(0.5, 1.0, shapes[value.name])
            feeds[value.name] = np.asarray(values > 0 if dtype == np.bool_ else values, dtype)
        return feeds


def _name(graph: onnx.GraphProto, prefix: str) -> None:
    for number, node in enumerate(graph.node):
        node.name = f"{prefix}{node.op_type}_{number}"
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _name(attribute.g, f"{node.name}_{attribute.name}_")
