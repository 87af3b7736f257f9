"""The interface in a manifest: each dim once, and sizes in shapes as numbers or text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

from pipeline.artifact.records import Readers, decode, decode_members, encode, fail
from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, SizeRule, read_size, size_text
from pipeline.spec.interface import Interface
from pipeline.spec.precision import PRECISIONS
from pipeline.spec.profiles import check_names
from pipeline.spec.tensors import End

# `auto` is not stored, because no dim is narrowed after the export
DIM_HINTS = {name: hint for name, hint in get_type_hints(Dim).items() if name != "auto"}
HINTS = {"dims": tuple[Dim, ...], **get_type_hints(Interface)}


def write_interface(interface: Interface) -> dict[str, Any]:
    """The interface in JSON's types."""
    sizes = {Dim: size_text, DimExpr: size_text}
    parts = {part.name: encode(getattr(interface, part.name), sizes) for part in fields(interface)}
    dims = [
        {name: encode(getattr(dim, name)) for name in DIM_HINTS} for dim in interface.dims.values()
    ]
    return {"dims": dims, **parts}


def read_interface(value: Any, where: str, at: str) -> Interface:
    """Reads an interface from `write_interface`; all uses of a dim share one object.

    Raises:
        ArtifactError: A part is not valid (see `decode`), or parts contradict each other.
    """
    dims: dict[str, Dim] = {}
    readers: Readers = {
        Dim: partial(_read_dim, dims),
        Size: partial(_read_size, dims),
        End: partial(_read_end, dims),
    }
    parts = decode_members(value, HINTS, where, at, readers)
    parts.pop("dims")
    interface = Interface(**parts)
    _check_sizes(interface, dims, where, at)
    _check_ranges(interface, dims, where, at)
    return interface


def _read_dim(dims: dict[str, Dim], value: Any, where: str, at: str) -> Dim:
    """Reads a dim and adds it to `dims`."""
    found = decode_members(value, DIM_HINTS, where, at, {})
    defaulted = found.pop("defaulted")
    try:
        dim = Dim(**found).settled(defaulted)
    except InputError as error:
        fail(where, at, str(error))
    if dim.name in dims:
        fail(where, f"{at}.name", f"two dims are called {dim.name}")
    dims[dim.name] = dim
    return dim


def _read_size(dims: Mapping[str, Dim], value: Any, where: str, at: str) -> Size:
    try:
        return read_size(decode(value, int | str, where, at), dims)
    except InputError as error:
        fail(where, at, str(error))


def _read_end(dims: Mapping[str, Dim], value: Any, where: str, at: str) -> End:
    """Reads an end of a range of values."""
    if not isinstance(value, str):
        number: float = decode(value, float, where, at)
        return number
    return _read_size(dims, value, where, at)


def _check_sizes(interface: Interface, dims: Mapping[str, Dim], where: str, at: str) -> None:
    """Checks the dims in shapes, and that every tensor has a name and every output a shape."""
    names = [tensor.name for tensor in interface.tensors]
    for name in names:
        if not name or names.count(name) > 1:
            fail(where, at, f"two tensors are called {name!r}" if name else "a tensor has no name")
    for precision in interface.engine_tolerance.keys() - set(PRECISIONS):
        fail(where, f"{at}.engine_tolerance", f"{precision!r} is not a precision")
    for n, input_ in enumerate(interface.inputs):
        places: list[tuple[str, Size]] = [
            (f"shape[{axis}]", size) for axis, size in enumerate(input_.shape)
        ]
        for word, end in (("low", input_.low), ("high", input_.high)):
            places += [(word, end)] if isinstance(end, (Dim, DimExpr)) else []
        for place, size in places:
            for name in DimExpr(size_text(size)).names - dims.keys():
                fail(where, f"{at}.inputs[{n}].{place}", f"no dim is called {name}")
    for n, name in enumerate(dims):
        if name not in interface.dims:
            fail(where, f"{at}.dims[{n}]", f"no input has the dim {name}")
    for n, output in enumerate(interface.outputs):
        if output.shape is None:
            fail(where, f"{at}.outputs[{n}].shape", "expected a list")
        if output.dtype is None:
            fail(where, f"{at}.outputs[{n}].dtype", "expected a string")


def _check_ranges(interface: Interface, dims: Mapping[str, Dim], where: str, at: str) -> None:
    """Checks the dims in rules, padding and profiles, and the profiles' names and ranges."""
    try:
        check_names(interface.profiles)
    except InputError as error:
        fail(where, f"{at}.profiles", str(error))
    for n, text in enumerate(interface.rules):
        try:
            unknown = SizeRule(text).names - dims.keys()
        except InputError as error:
            fail(where, f"{at}.rules[{n}]", str(error))
        for name in sorted(unknown):
            fail(where, f"{at}.rules[{n}]", f"no dim is called {name}")
    for name in interface.padding.multiples if interface.padding else ():
        if name not in dims:
            fail(where, f"{at}.padding.multiples", f"no dim is called {name}")
    for n, profile in enumerate(interface.profiles):
        try:
            profile.resolve(dims)
        except InputError as error:
            fail(where, f"{at}.profiles[{n}]", str(error))
