"""A tolerance measured on an ONNX file, for a source that states none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.compare import run_onnx
from pipeline.dims import kept_rules
from pipeline.errors import InputError
from pipeline.noise import EQUAL, Noise
from pipeline.spec import ModelSpec
from pipeline.stored import Feed

_HOW = "rounding of the inputs"
_ULP = 2.0**-23


def with_onnx_tolerance(spec: ModelSpec, path: Path, seed: int) -> ModelSpec:
    """The spec with a tolerance for every output, if it states none: what ONNX Runtime's outputs
    move by where its floating-point inputs move by their rounding.

    Args:
        spec: the spec of an ONNX file.
        path: the file, as it is in the artifact.
        seed: for the inputs' values.

    Raises:
        InputError: no tolerance can be measured.
    """
    if spec.tolerance is not None:
        return spec
    sizes = _sizes(spec)
    feed = spec.sample(sizes, seed)
    plain, moved = run_onnx(path, [feed, _moved(feed)])
    outputs = []
    for output in spec.outputs:
        a, b = plain[output.name], moved[output.name]
        where = f"model {spec.name}: output {output.name}"
        real = a.dtype.kind == "f"
        measured = Noise.between(b, a).tolerance(where, _HOW) if real else EQUAL
        outputs.append(replace(output, tolerance=output.tolerance or measured))
    widest = max((o.tolerance for o in outputs if o.tolerance), key=lambda t: t.atol)
    return replace(spec, outputs=tuple(outputs), tolerance=widest)


def _sizes(spec: ModelSpec) -> Mapping[str, int]:
    """The smallest sizes or the opts, whatever keeps the rules; not 1 where there are others."""
    small = {name: dim.legal(max(dim.min, 2)) for name, dim in spec.dims.items()}
    for sizes in (small, {name: dim.opt for name, dim in spec.dims.items()}):
        if kept_rules(spec.rules, sizes):
            return sizes
    raise InputError(f"model {spec.name}: neither its smallest sizes nor its opts keep its rules")


def _moved(feed: Feed) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (array * (1 + _ULP * rng.standard_normal(array.shape))).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in feed.items()
    }
