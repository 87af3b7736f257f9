"""A model's outputs in torch in float32, which other runners are compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.spec.dims import sizes_text

# Options of the zoo's models that change the form of the export. The values belong to the model as
# its authors wrote it. Every engine of the model is compared with that form.
_AS_WRITTEN: Mapping[str, Mapping[str, object]] = {
    name: {"update": "torchvision", "correlation": "volume"} for name in ("raft", "raft_small")
}


def as_written(model: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of the torch model that is compared with an engine of these options."""
    written = _AS_WRITTEN.get(model, {})
    return {name: written.get(name, value) for name, value in options.items()}


def option_texts(options: Mapping[str, object]) -> list[str]:
    """``updates=12``, as in --option, sorted by name."""
    return sorted(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())


def reference_file(
    folder: Path, model: str, options: Sequence[str], sizes: Mapping[str, int]
) -> Path:
    """The file of a model's outputs at some sizes."""
    name = "-".join([model, *sorted(options), *sizes_text(sizes).split(",")]).replace("/", "_")
    return folder / f"{name}.npz"


def keep(outputs: Sequence[np.ndarray], place: Path) -> None:
    """Stores outputs in their order."""
    place.parent.mkdir(parents=True, exist_ok=True)
    np.savez(place, *outputs)


def held_against(outputs: Sequence[np.ndarray], place: Path) -> dict[str, float | str | None]:
    """``error``: the largest ||out - ref|| / ||ref|| of an output; None if no outputs are stored.

    If ``error`` is not a number, there is also ``error_why``.
    """
    if not place.is_file():
        return {"error": None}
    with np.load(place) as file:
        reference = [file[f"arr_{n}"].astype(np.float64) for n in range(len(file.files))]
    if [o.shape for o in outputs] != [r.shape for r in reference]:
        got, want = ([list(a.shape) for a in arrays] for arrays in (outputs, reference))
        return {"error": None, "error_why": f"shapes {got}, torch gives {want}"}
    mine = [o.astype(np.float64) for o in outputs]
    for whose, arrays in (("", mine), ("torch's are ", reference)):
        if not all(np.isfinite(a).all() for a in arrays):
            return {"error": None, "error_why": f"{whose}not finite"}
    pairs = [(o, r) for o, r in zip(mine, reference, strict=True) if not np.array_equal(o, r)]
    if not all(r.any() for _, r in pairs):
        return {"error": None, "error_why": "torch gives zeros"}
    return {"error": max((_norm(o - r) / _norm(r) for o, r in pairs), default=0.0)}


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.ravel()))
