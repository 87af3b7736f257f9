"""An ONNX file as the source of a conversion, in place of torch's export.

`onnx_spec` makes a spec of the file: its inputs, and its dims with your ranges. `import_onnx`
copies the file into an artifact. The graph stays the same, except the names of its dims, the sizes
of its outputs, and the location of its weights.

A file does not state ranges of values. An integer index into a table may be every row of the table.
An integer or bool input with "mask" in its name is all ones. uint8 is 0..255, other integers are 0
and 1, and floating-point inputs are -1..1. For other ranges, replace the spec's `Input` objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import onnx
from onnx import TensorProto

from pipeline.errors import InputError
from pipeline.source.onnx.dims import (
    inputs_of,
    named_dims,
    with_expressions,
    with_ranges,
)
from pipeline.source.onnx.opening import open_onnx
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec, Output


def onnx_spec(
    path: Path,
    dims: Mapping[str, Dim],
    *,
    name: str | None = None,
    expressions: Mapping[str, str] | None = None,
) -> ModelSpec:
    """The spec of an ONNX file.

    Args:
        path: The file, with its external data beside it.
        dims: A range for each dim of the file, by name.
        name: The model's name; by default the file's name without its suffix.
        expressions: The expression of other dims, for each dim that is declared without a range:
            ``{"t": "past + seq"}``.

    Raises:
        InputError: The file is not usable (see `open_onnx`), or `dims` are not its dims. The
            message lists the file's dims.
    """
    file = open_onnx(path)
    expressions = expressions or {}
    named = with_expressions(path, named_dims(file.model.graph), expressions, dims)
    ready = with_ranges(path, named, dims)

    def build(weights: Path | None) -> NoReturn:
        del weights
        raise InputError(f"{path}: an ONNX file has no torch model to run")

    return ModelSpec(
        name=name or re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem).lstrip(".-") or "model",
        build=build,
        inputs=inputs_of(file.model.graph, named, ready),
        outputs=tuple(Output(value.name) for value in file.model.graph.output),
        libraries=("onnx", "onnxruntime"),
        onnx=path,
        expressions=expressions,
    )


def with_reference(spec: ModelSpec, path: Path) -> ModelSpec:
    """The spec, with another ONNX file whose outputs are the reference.

    Raises:
        InputError: The source is no ONNX file, or the other file is not usable. Or its inputs or
            outputs have other names or dtypes.
    """
    spec = replace(spec, reference=path)
    assert spec.onnx is not None  # the spec refuses a reference otherwise
    own, other = (_ends(open_onnx(file).model.graph) for file in (spec.onnx, path))
    for mine, theirs, what in zip(own, other, ("inputs", "outputs"), strict=True):
        if mine != theirs:
            raise InputError(
                f"reference {path}: its {what} are {_listed(theirs)}, but those of {spec.onnx} are "
                f"{_listed(mine)}. Both files need the same names and dtypes"
            )
    return spec


def _ends(graph: onnx.GraphProto) -> list[dict[str, str]]:
    """The dtypes of the inputs, and of the outputs, by name."""
    constants = {tensor.name for tensor in graph.initializer}
    return [
        {
            value.name: TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
            for value in values
            if value.name not in constants
        }
        for values in (graph.input, graph.output)
    ]


def _listed(ends: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in ends.items())


def source_files(path: Path) -> list[Path]:
    """The ONNX file and the files of its external data."""
    return [path, *sorted(set(open_onnx(path).outside.values()))]
