"""An ONNX file as the source of a conversion, where otherwise torch's export stands.

`onnx_spec` makes a spec of the file: its inputs, its dims with the ranges that the caller gives.
`import_onnx` brings the file into an artifact. The graph stays as it is: only the names of its
dims, the sizes of its outputs, and the place of its weights are written anew.

Ranges of values are not in a file: an integer input that picks rows of a table is tried over the
whole table, an integer or bool input with "mask" in its name with ones, uint8 with 0..255, other
integers with 0 and 1, floating-point inputs with -1..1. Replace the spec's `Input`s for others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from pipeline.errors import InputError
from pipeline.source.onnx.dims import (
    inputs_of,
    named_dims,
    with_expressions,
    with_ranges,
)
from pipeline.source.onnx.opening import open_onnx
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec, Output, Tolerance


def onnx_spec(
    path: Path,
    dims: Mapping[str, Dim],
    *,
    name: str | None = None,
    tolerance: Tolerance | None = None,
    expressions: Mapping[str, str] | None = None,
) -> ModelSpec:
    """The spec of an ONNX file.

    Args:
        path: the file, its external data beside it.
        dims: a range for each dim of the file, by name; a wrong name says which there are.
        name: of the model; the file's without its suffix where it is left out.
        tolerance: for every comparison; None means that it is measured.
        expressions: in place of a range, what a dim of the file is in terms of others, where it
            has a name of its own for it: ``{"t": "past + seq"}``.

    Raises:
        InputError: the file is no good (see `open_onnx`), or `dims` are not those that it has.
    """
    file = open_onnx(path)
    expressions = expressions or {}
    named = with_expressions(path, named_dims(file.model.graph), expressions, dims)
    ready = with_ranges(path, named, dims)

    def build(weights: Path | None) -> NoReturn:
        del weights
        raise InputError(f"{path}: there is no torch model behind an ONNX file")

    return ModelSpec(
        name=name or re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem).lstrip(".-") or "model",
        build=build,
        inputs=inputs_of(file.model.graph, named, ready),
        outputs=tuple(Output(value.name) for value in file.model.graph.output),
        tolerance=tolerance,
        libraries=("onnx", "onnxruntime"),
        onnx=path,
        expressions=expressions,
    )


def source_files(path: Path) -> list[Path]:
    """The ONNX file and the files of its external data."""
    return [path, *sorted(set(open_onnx(path).outside.values()))]
