"""Measures the tolerance for an ONNX file whose spec states none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.errors import InputError
from pipeline.graph.files import bad_weight
from pipeline.graph.session import run_onnx
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import kept_rules, sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.noise import EQUAL, Noise
from pipeline.spec.noise_parts import MOST, measured
from pipeline.spec.tensors import Feed

_HOW = "rounding of the inputs"
_NOTHING = "no input can be rounded, and a few units in the last place are assumed: rounding"
_ASSUMED = 4  # units in the last place of the root mean square


def with_onnx_tolerance(
    spec: ModelSpec, path: Path, seed: int, shapes: Mapping[str, Sequence[int | str]]
) -> ModelSpec:
    """The spec with a tolerance for every output, measured if it states none.

    Two runs in ONNX Runtime differ by a rounding error in the floating-point inputs. The difference
    of the outputs gives the tolerance.

    Args:
        spec: The spec of an ONNX file.
        path: The file in the artifact.
        seed: The seed of the inputs' values.
        shapes: The shape of each output by name: numbers, and formulas of dims.

    Raises:
        InputError: No tolerance can be measured, or the spec has a reference and no tolerance.
    """
    if spec.tolerance is not None:
        return spec
    sizes = _sizes(spec)
    feed = spec.sample(sizes, seed)
    if spec.reference is not None and not all(output.tolerance for output in spec.outputs):
        raise InputError(_untold(spec, spec.reference, path, sizes, feed))
    rounded = any(array.dtype.kind == "f" for array in feed.values())
    plain, moved = run_onnx(path, [feed, _moved(feed)])
    outputs = []
    for output in spec.outputs:
        a, b = plain[output.name], moved[output.name]
        where = f"model {spec.name}: output {output.name}"
        real = a.dtype.kind == "f"
        tolerance = EQUAL
        if output.tolerance is not None:
            outputs.append(output)
            continue
        if real and not np.isfinite(a).all():
            do = "Pass a range for the inputs' values: --range NAME=LOW..HIGH"
            if weight := bad_weight(path):
                do = f"The weight {weight} itself has NaN: correct the weights"
            raise InputError(
                f"{where} is NaN or infinite at {sizes_text(sizes)}, so it can't be compared. {do}"
            )
        if real:
            noise = Noise.between(b, a, float(np.finfo(a.dtype).eps))
            if not rounded:
                noise = replace(noise, off=max(noise.off, _ASSUMED * noise.eps * noise.rms))
            how = _HOW if rounded else _NOTHING
            samples = [(b, a, noise.eps)] if rounded and a.size <= MOST else []
            axes = [n for n, size in enumerate(shapes[output.name]) if isinstance(size, int)]
            tolerance = measured(noise, samples, where, how, axes)
        outputs.append(replace(output, tolerance=tolerance))
    widest = max((o.tolerance for o in outputs if o.tolerance), key=lambda t: t.atol)
    widest = replace(widest, axis=None, parts=())
    return replace(spec, outputs=tuple(outputs), tolerance=widest)


def _untold(
    spec: ModelSpec, reference: Path, path: Path, sizes: Mapping[str, int], feed: Feed
) -> str:
    """The error for a reference without a tolerance: how far the two files differ."""
    (want,), (got,) = run_onnx(reference, [feed]), run_onnx(path, [feed])
    found = []
    for name, array in want.items():
        if array.dtype.kind == "f" and array.shape == got[name].shape and array.size:
            far = Difference(array, got[name]).largest
            found.append(f"{name} by {far:.2g} (its largest value: {np.abs(array).max():.2g})")
    differs = f". At {sizes_text(sizes)} they differ in {', '.join(found)}" if found else ""
    return (
        f"model {spec.name}: state how far it may be from {reference.name} with --tolerance "
        f"RTOL,ATOL, because it can't be measured{differs}"
    )


def _sizes(spec: ModelSpec) -> Mapping[str, int]:
    """The smallest sizes, 2 or more if possible. If these break a rule: the opts."""
    small = {name: dim.legal(max(dim.min, 2)) for name, dim in spec.dims.items()}
    for sizes in (small, {name: dim.opt for name, dim in spec.dims.items()}):
        if kept_rules(spec.rules, sizes):
            return sizes
    raise InputError(f"model {spec.name}: neither the smallest sizes nor the opts keep its rules")


def _moved(feed: Feed) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (array * (1 + np.finfo(array.dtype).eps * rng.standard_normal(array.shape))).astype(
            array.dtype
        )
        if array.dtype.kind == "f"
        else array
        for name, array in feed.items()
    }
