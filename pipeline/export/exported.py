"""The result of the export stage: a model as ONNX, from torch or from an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from pipeline.spec.interface import Interface
from pipeline.spec.model import ModelSpec
from pipeline.spec.rules import Rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Exported:
    """A model as ONNX, and the torch module that it was exported from.

    Args:
        spec: the spec, its dims narrowed where that was allowed.
        module: the torch module that was exported, without padding; None if the source is an
            ONNX file.
        path: the ONNX file.
        opset: the file's opset.
        output_shapes: each output's shape in terms of the dims.
        refinements: the rules that narrowed the spec.
        free: for each dynamic dim, the ONNX inputs and axes where it is free.
        library_seconds: seconds inside torch or ONNX Runtime, by the name of the call.
        notes: one sentence for each remark: positional inputs, guards of torch.export that were
            checked at a sample of sizes, and wrong declarations in an ONNX file.
    """

    spec: ModelSpec
    module: torch.nn.Module | None
    path: Path
    opset: int
    output_shapes: Mapping[str, Sequence[int | str]]
    refinements: Sequence[Rule] = ()
    free: Mapping[str, str] = field(default_factory=dict)
    library_seconds: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @cached_property
    def interface(self) -> Interface:
        """The interface of the ONNX file: the spec's, with the output shapes and dtypes."""
        graph = onnx.load(self.path, load_external_data=False).graph
        dtypes = {
            value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
            for value in graph.output
        }
        return self.spec.interface.settled(self.output_shapes, dtypes)
