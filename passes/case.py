"""A case: a small graph in ONNX text, and what a pass does with it.

The cases ship with the pipeline: `pipeline passes --still-needed` runs them on the installed
TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser

from pipeline.spec.tensors import Precision

Kind = Literal["positive", "near miss", "refusal"]
Failure = Literal["parse", "build", "crash", "sizes", "layers", "numbers", "none"]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A graph, written as ONNX text, and what a pass does with it.

    Args:
        pass_name: the pass that the case belongs to. Every other pass must keep its contract on
            the case.
        name: a few words, unique among the pass's cases.
        kind: ``positive`` is rewritten, a ``near miss`` left alone, a ``refusal`` refused.
        text: the graph after its name: ``(float[n,3,h,w] x) => (float[n,3,h,w] y) { ... }``.
            Functions may follow.
        shapes: input shapes to run at, from the smallest to the largest. A dynamic axis needs at
            least two.
        reason: words in the text of the refusal.
        opset: version of the standard domain.
        imports: further domains and their versions.
        dims: symbolic dims that ONNX text cannot express, by value name.
        ranges: inclusive low and exclusive high of an input's random values. By default floats
            are normal with mean 0.5, booleans take both values, and integers are in 0..9.
        fails: by target name, the measured failure of the unchanged graph. ``sizes``: the sizes
            are wrong. ``layers``: a layer has another meaning. ``numbers``: they differ from ONNX
            Runtime's. ``none``: the result is right. Failures on a GPU are in
            `pipeline.passes.cases.measured`.
        precision: precision of the trials on weakly typed targets (8.6). The other targets run
            fp32.
        not_for: by target name, why the case cannot become right with the passes, in TensorRT's
            words if it has any. Trials on this target omit the case.
    """

    pass_name: str
    name: str
    kind: Kind
    text: str
    shapes: tuple[Shapes, ...]
    reason: str = ""
    opset: int = 18
    imports: Mapping[str, int] = field(default_factory=dict)
    dims: Mapping[str, tuple[int | str, ...]] | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    fails: Mapping[str, Failure] = field(default_factory=dict)
    precision: Precision = "fp32"
    not_for: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.pass_name}-{self.name}".replace(" ", "_")

    def model(self) -> onnx.ModelProto:
        """The graph as a checked model, with a name for every node.

        Raises:
            onnx.checker.ValidationError, onnx.parser.ParseError: the case is not a valid model.
        """
        imports = ", ".join(
            f'"{name}" : {version}' for name, version in {"": self.opset, **self.imports}.items()
        )
        model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> g {self.text}")
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

    def feeds(self, shapes: Shapes, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
        """Random inputs of these shapes. Their mean is far from 0, so that a wrong mean shows."""
        rng = np.random.default_rng(seed)
        feeds = {}
        for value in self.model().graph.input:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            shape = shapes[value.name]
            values: Any
            if value.name in self.ranges and dtype.kind in "iu":
                low, high = self.ranges[value.name]
                values = rng.integers(int(low), int(high), shape)
            elif value.name in self.ranges:
                values = rng.uniform(*self.ranges[value.name], shape)
            elif dtype.kind in "iu":
                values = rng.integers(0, 10, shape)
            else:
                values = rng.normal(0.5, 1.0, shape)
            feeds[value.name] = np.asarray(values > 0 if dtype == np.bool_ else values, dtype)
        return feeds


def _name(graph: onnx.GraphProto, prefix: str) -> None:
    for number, node in enumerate(graph.node):
        node.name = f"{prefix}{node.op_type}_{number}"
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _name(attribute.g, f"{node.name}_{attribute.name}_")
