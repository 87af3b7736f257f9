"""Reads the user's values of inputs, and checks them against the declared inputs."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, solve_sizes
from pipeline.spec.model import ModelSpec
from pipeline.spec.structure import leaves, name_of
from pipeline.spec.tensors import Input
from pipeline.spec.values import Values
from pipeline.spec.weights import read_torch

_BAD_NPZ = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError)
_UNNAMED = re.compile(r"arr_\d+")  # what np.savez calls arrays without a name


def with_values(spec: ModelSpec, given: Any, where: str = "inputs") -> ModelSpec:
    """The spec whose inputs have the user's values.

    Args:
        spec: The spec.
        given: A ``.npz`` or ``.pt`` file. Or arrays or tensors: a dict by the names of inputs, a
            sequence in their order, or one alone. A dict may hold nested values. Inputs that are
            left out keep random values.
        where: What to call `given` in errors, if it is no file.

    Raises:
        InputError: The file can't be read, or the values do not fit the inputs.
    """
    if isinstance(given, (str, Path)):
        where, given = str(given), _read(Path(given))
    arrays = _named(spec, given, where)
    names = [i.name for i in spec.inputs]
    for name in arrays:
        if name not in names:
            raise InputError(
                f"{where}: the model has no input {name!r}. Its inputs: {', '.join(names)}"
            )
    inputs = tuple(_with(i, arrays[i.name], where) if i.name in arrays else i for i in spec.inputs)
    _check_sizes(spec, inputs, where)
    return replace(spec, inputs=inputs)


def _read(path: Path) -> Any:
    """The content of a file, without running code in it."""
    if not path.is_file():
        hint = ""
        if ":" in str(path):
            hint = ". For a shape such as x:1x3x{h}x{w}, use --input"
        raise InputError(f"inputs {path}: no such file{hint}")
    if path.suffix in (".pt", ".pth"):
        return read_torch(path, "inputs")
    if path.suffix != ".npz":
        raise InputError(f"inputs {path}: unknown kind. Use .npz or .pt")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except _BAD_NPZ as error:
        raise InputError(
            f"inputs {path}: damaged, or not a .npz file that holds only arrays",
            detail=str(error),
        ) from error
    return list(found.values()) if found and all(map(_UNNAMED.fullmatch, found)) else found


def _named(spec: ModelSpec, given: Any, where: str) -> dict[str, np.ndarray]:
    """The arrays by the names of inputs."""
    if isinstance(given, Mapping):
        return {name_of(path, "input"): to_array(leaf, where) for path, leaf in leaves(given)}
    every = list(given) if isinstance(given, (tuple, list)) else [given]
    arrays = [to_array(leaf, where) for _, leaf in leaves(every)]
    if len(arrays) != len(spec.inputs):
        names = ", ".join(i.name for i in spec.inputs)
        raise InputError(
            f"{where}: has {len(arrays)} values without names, but the model has "
            f"{len(spec.inputs)} inputs ({names}). Save them by name"
        )
    return {i.name: array for i, array in zip(spec.inputs, arrays, strict=True)}


def to_array(value: Any, where: str) -> np.ndarray:
    """A tensor or an array as an array.

    Raises:
        InputError: It is neither, or numpy lacks its dtype.
    """
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "detach"):
        raise InputError(f"{where}: {type(value).__name__} is neither a tensor nor an array")
    try:
        return np.asarray(value.detach().cpu().numpy())
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"{where}: a tensor of {value.dtype} can't become an array. Save it as float32"
        ) from error


def _with(declared: Input, array: np.ndarray, where: str) -> Input:
    """An input with its values.

    Raises:
        InputError: The values do not fit the input, or contain NaN.
    """
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise InputError(f"{where}: {declared.name} contains NaN, which can't be compared")
    try:
        return replace(declared, values=Values.of(array))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _check_sizes(spec: ModelSpec, inputs: Sequence[Input], where: str) -> None:
    """Raises unless the values' sizes are legal sizes of the dims."""
    given = {i.name: i.values.shape for i in inputs if i.values is not None}
    known = {
        size.name for i in inputs if i.name in given for size in i.shape if isinstance(size, Dim)
    }
    shapes: dict[str, tuple[Size, ...]] = {
        # an expression of dims that these values do not show has any value
        i.name: tuple(
            got if isinstance(size, DimExpr) and not size.names <= known else size
            for size, got in zip(i.shape, given[i.name], strict=True)
        )
        for i in inputs
        if i.name in given
    }
    try:
        solve_sizes(shapes, given, spec.rules, spec.dims)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
