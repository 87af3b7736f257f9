"""The user's values of inputs in an artifact: ``inputs.npz``."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.files import fresh, open_plain
from pipeline.spec.file_names import INPUTS
from pipeline.spec.tensors import Input
from pipeline.spec.values import Values

_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError)


def store_values(folder: Path, inputs: Sequence[Input]) -> None:
    """Writes the values of the inputs that have any."""
    arrays = {i.name: i.values.array for i in inputs if i.values is not None}
    if arrays:
        content = io.BytesIO()  # np.savez takes an input called `file` for its own argument
        with zipfile.ZipFile(content, "w") as archive:
            for name, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        fresh(folder / INPUTS).write_bytes(content.getvalue())


def filled(manifest: Manifest, folder: Path) -> Manifest:
    """The manifest of an artifact, its inputs with the values that `store_values` wrote.

    Raises:
        ArtifactError: The file is missing or damaged, or has other values.
    """
    inputs = manifest.interface.inputs
    if all(i.values is None for i in inputs):
        return manifest
    path = folder / INPUTS
    found = []
    try:
        with open_plain(path, links=False) as file, np.load(file, allow_pickle=False) as arrays:
            for i in inputs:
                values = Values.of(arrays[i.name]) if i.values is not None else None
                if values != i.values:
                    raise ArtifactError(
                        f"{path}: has other values of {i.name} than the manifest states. "
                        "Convert again"
                    )
                found.append(replace(i, values=values))
    except InputError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except _UNREADABLE as error:
        raise ArtifactError(f"{path}: can't be read. Convert again") from error
    return replace(manifest, interface=replace(manifest.interface, inputs=tuple(found)))
