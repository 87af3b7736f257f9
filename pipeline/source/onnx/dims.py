"""The inputs of an ONNX file: their named dims, and ranges for random values.

An axis has a number, a name (``dim_param``), an expression of names (``past + seq``), or nothing.
Each name becomes a dim, with a legal name. An axis without a name is named after its input.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, Size
from pipeline.spec.expressions import DimExpr
from pipeline.spec.model import Input

_NAMELESS = {"", "?", "-1", "None", "none", "unk", "unknown", "dynamic"}
_MULTIPLE = re.compile(r"(\d+)\s*\*\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*\*\s*(\d+)")
# ops whose output has the same indices as their input
_SAME = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand",
    "Slice", "Concat", "Gather",
}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """The dims of a file, before they have ranges.

    Args:
        shapes: The shape of each input, with numbers, names and expressions of names.
        places: The axes of each dim, as text.
        multiples: For each dim that the file states as a multiple of a number: that number.
        texts: The name or expression that replaces each ``dim_param`` of the file.
    """

    shapes: Mapping[str, tuple[int | str, ...]]
    places: Mapping[str, str]
    multiples: Mapping[str, int]
    texts: Mapping[str, str]


def graph_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The graph's inputs that are not initializers."""
    constants = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def named_dims(graph: onnx.GraphProto) -> Named:
    """Names every axis of every input that has no fixed size."""
    axes = list(_axes(graph))
    texts = list(dict.fromkeys(text for _, _, text in axes if isinstance(text, str) and text))
    alone = {text for text in texts if re.fullmatch(r"[A-Za-z_]\w*", text)}
    names = _LegalNames()
    new: dict[str, str] = {}
    multiples: dict[str, int] = {}
    for text in texts:
        match = _MULTIPLE.fullmatch(text)
        if text in alone:
            new[text] = names.add(text)
        elif match and (match[2] or match[3]) not in alone:  # no axis has the name alone
            name = names.add(match[2] or match[3])
            new[text], multiples[name] = name, int(match[1] or match[4])
    for text in texts:
        if text not in new:
            known = _parts(text, alone)
            for part in known - new.keys():
                new[part] = names.add(part)
            new[text] = in_terms(text, new) if known else names.add(text)
    shapes: dict[str, list[int | str]] = {v.name: [] for v in graph_inputs(graph)}
    for name, axis, size in axes:
        if size == "":
            size = names.add(f"{name}_{axis}")  # noqa: PLW2901
        elif isinstance(size, str):
            size = new[size]  # noqa: PLW2901
        shapes[name].append(size)
    fixed = {name: tuple(shape) for name, shape in shapes.items()}
    return Named(fixed, _places(fixed), multiples, new)


def with_expressions(
    path: object, named: Named, expressions: Mapping[str, str], given: Collection[str]
) -> Named:
    """Replaces some dims by expressions of the others.

    Args:
        path: The file's path, for errors.
        named: The file's dims.
        expressions: The expression by the name of the dim: ``{"t": "past + seq"}``.
        given: Names of the dims with a range. An expression may use them even if no axis has them.

    Raises:
        InputError: A dim is not in the file, or an expression uses an unknown dim or a dim that is
            an expression itself.
    """
    known = ", ".join(named.places) or "none"
    for name, text in expressions.items():
        if name not in named.places:
            raise InputError(f"{path}: no dim {name}; the file's dims are {known}")
        for part in sorted(DimExpr(text).names):
            if part in expressions:
                raise InputError(
                    f"{path}: dim {name}={text}: {part} is itself an expression; "
                    "use only dims that have a range"
                )
            if part not in named.places and part not in given:
                raise InputError(
                    f"{path}: dim {name}={text}: no dim {part}; the file's dims are {known}"
                )

    def put(size: int | str) -> int | str:
        if not isinstance(size, str) or size in expressions:
            return expressions.get(str(size), size)
        return in_terms(size, expressions)

    shapes = {name: tuple(map(put, shape)) for name, shape in named.shapes.items()}
    texts = {text: str(put(size)) for text, size in named.texts.items()}
    multiples = {n: step for n, step in named.multiples.items() if n not in expressions}
    return Named(shapes, _places(shapes), multiples, texts)


def in_terms(text: str, names: Mapping[str, str]) -> str:
    """Replaces the names in a text."""

    def put(match: re.Match[str]) -> str:
        new = names.get(match[0], match[0])
        return new if re.fullmatch(r"\w+", new) else f"({new})"

    return re.sub(r"[A-Za-z_]\w*", put, text)


def _places(shapes: Mapping[str, Sequence[int | str]]) -> dict[str, str]:
    """The axes of each dim, as text."""
    places: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            for part in sorted(DimExpr(size).names) if isinstance(size, str) else ():
                places.setdefault(part, []).append(f"{name} axis {axis}")
    return {name: ", ".join(where) for name, where in places.items()}


def _axes(graph: onnx.GraphProto) -> Iterator[tuple[str, int, int | str]]:
    """Input, axis and size. The size is a number, a name, an expression, or an empty text."""
    for value in graph_inputs(graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            text = dim.dim_param.strip()
            if dim.dim_value > 0:
                yield value.name, axis, dim.dim_value
            elif re.fullmatch(r"[1-9]\d*", text):
                yield value.name, axis, int(text)
            else:  # older exporters write 0 or -1 for a free size
                yield value.name, axis, "" if text in _NAMELESS else text


def _parts(text: str, alone: set[str]) -> set[str]:
    """The names in an expression; none if the text is one name.

    ``batch-size`` is one name, unless the file has dims ``batch`` and ``size``.
    """
    try:
        names = set(DimExpr(text).names)
    except InputError:
        return set()
    if names <= alone or (names & alone and re.fullmatch(r"[\w\s+*]+", text)):
        return names
    return set()


class _LegalNames:
    """Makes legal, unique names for dims."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def add(self, text: str) -> str:
        base = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
        if not base or not base[0].isalpha():
            base = f"d_{base}".rstrip("_")
        if keyword.iskeyword(base) or base in ("min", "max"):
            base += "_"
        name, number = base, 2
        while name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name


def with_ranges(path: object, named: Named, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """The file's dims with their ranges.

    Raises:
        InputError: Dims have no range (the message lists all of them), or a range has no dim.
    """
    known = list(named.places)
    problems = []
    unknown = [name for name in dims if name not in named.places]
    if unknown and known:
        problems.append(f"no dim {', '.join(unknown)}; the file's dims are {', '.join(known)}")
    elif unknown:
        shapes = ", ".join(f"{n}:{'x'.join(map(str, s))}" for n, s in named.shapes.items())
        problems.append(f"no dim {', '.join(unknown)}: the file's sizes are all fixed ({shapes})")
    missing = [name for name in known if name not in dims]
    if missing:
        where = "; ".join(
            f"{n} is {named.places[n]}"
            + (f", a multiple of {named.multiples[n]}" if n in named.multiples else "")
            for n in missing
        )
        asked = " ".join(f"--dim {name}=MIN:OPT:MAX" for name in missing)
        problems.append(f"dims without a range ({where}). Pass {asked}")
    if problems:
        raise InputError(f"{path}: {'; '.join(problems)}")
    ready = {}
    for name in known:
        dim = dims[name] if dims[name].name == name else replace(dims[name], name=name)
        step = named.multiples.get(name, 1)
        if dim.multiple_of % step:
            dim = replace(dim, multiple_of=math.lcm(dim.multiple_of, step))
        ready[name] = dim
    return ready


def inputs_of(graph: onnx.GraphProto, named: Named, dims: Mapping[str, Dim]) -> tuple[Input, ...]:
    """The inputs in the file's order, each with dims in its shape and a range of values."""
    inputs = []
    for value in graph_inputs(graph):
        element = value.type.tensor_type.elem_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(element))
        shape = tuple(_size(size, dims) for size in named.shapes[value.name])
        low, high = _range(graph, value.name, element)
        inputs.append(Input(value.name, shape, dtype.name, low, high))
    return tuple(inputs)


def _size(size: int | str, dims: Mapping[str, Dim]) -> Size:
    if isinstance(size, int):
        return size
    if size in dims:
        return dims[size]
    names = sorted(DimExpr(size).names)
    return DimExpr(size, tuple(dims[name] for name in names))


def _range(graph: onnx.GraphProto, name: str, element: int) -> tuple[float, float]:
    """The range of an input's random values, without the upper end.

    A file does not state ranges. An integer index into a table may be every row of the table. An
    integer or bool whose name has "mask" is all ones, because many models have no valid result for
    a row of zeros. uint8 is a picture's 0..255, other integers are 0 or 1, and the rest is -1..1.
    """
    if element in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16):
        return -1.0, 1.0
    if re.search(r"mask", name, re.IGNORECASE):
        return 1, 2
    if element == TensorProto.BOOL:
        return -1.0, 1.0
    rows = list(_tables(graph, name))
    if rows:
        most = 127 if element == TensorProto.INT8 else 255 if element == TensorProto.UINT8 else 0
        return 0, min([*rows, most] if most else rows)
    return (0, 256) if element == TensorProto.UINT8 else (0, 2)


def _tables(graph: onnx.GraphProto, name: str) -> Iterator[int]:
    """The lengths of the tables that an integer input indexes; 1 for an unknown length."""
    shapes: dict[str, Sequence[int]] = {t.name: list(t.dims) for t in graph.initializer}
    for value in (*graph.value_info, *graph.input):
        sizes = value.type.tensor_type.shape.dim
        shapes.setdefault(value.name, [d.dim_value for d in sizes])
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                shapes[node.output[0]] = list(attribute.t.dims)
    same = {name}
    for node in graph.node:
        if node.op_type in ("Gather", "GatherElements") and node.input[1] in same:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            sizes = shapes.get(node.input[0], [])
            yield max(sizes[axis], 1) if -len(sizes) <= axis < len(sizes) else 1
        if node.op_type in _SAME and node.input and node.input[0] in same:
            same.update(node.output)
