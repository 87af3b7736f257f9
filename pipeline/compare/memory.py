"""Keeps results for the next comparison of the same files and inputs, in this process.

`pipeline tune` compares many engines of one model. What ONNX Runtime and TensorRT's shape inference
say of the model does not depend on the engine. So it is asked once for each file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from pipeline.graph.external_data import outside_files
from pipeline.machine.files import hash_file

T = TypeVar("T")

# the hash of everything that a result depends on -> the result, which nobody changes
Memory = dict[str, Any]


def once(memory: Memory | None, make: Callable[[], T], model: Path, *values: object) -> T:
    """Returns what `make` returned for an equal file and equal values, or calls it.

    Args:
        memory: The results so far; None to call `make` each time.
        make: Computes the result.
        model: The ONNX file. It counts by its content and that of its external data.
        values: All else that the result depends on. Arrays count by dtype, shape and bytes; other
            values by their text.
    """
    if memory is None:
        return make()
    digest = hashlib.sha256()
    files = {model.name: model, **outside_files(model, onnx.load(model, load_external_data=False))}
    _add(digest, {name: hash_file(file).sha256 for name, file in files.items()})
    _add(digest, values)
    key = digest.hexdigest()
    if key not in memory:
        memory[key] = make()
    result: T = memory[key]
    return result


def _add(digest: Any, value: object) -> None:
    """Adds a value to a hash."""
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}".encode())
        for name in sorted(value):
            _add(digest, name)
            _add(digest, value[name])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"sequence {len(value)}".encode())
        for one in value:
            _add(digest, one)
    else:
        text = repr(value)
        digest.update(f"{len(text)} {text}".encode())
