"""Finds parts of an output whose values are so small that the tolerance could hide a fault.

An output has one tolerance. Some outputs have numbers of several kinds, such as boxes in pixels and
scores. Then a tolerance for the large numbers is too wide for the small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.spec.findings import Note, note
from pipeline.spec.noise_parts import part_axes, root_mean_square
from pipeline.spec.tensors import Feed, Tolerance

_SHARE = 0.1  # an atol above this share of a part's root mean square could hide a fault
_SHOWN = 5  # indices that a note lists


def weak_parts(
    outputs: Sequence[Feed], tolerances: Tolerance | Mapping[str, Tolerance]
) -> list[Note]:
    """Returns one note for each output with such parts.

    A part is one index of axis 1 (channels), or of the last axis of an output with up to three
    axes. The axis must have the same size at all points. If the whole output is small,
    `pipeline.compare.verdict` fails it.

    Args:
        outputs: The reference's outputs, by point.
        tolerances: One tolerance for all outputs, or by output name.
    """
    found = []
    for name in dict.fromkeys(name for feed in outputs for name in feed):
        tolerance = tolerances if isinstance(tolerances, Tolerance) else tolerances.get(name)
        arrays = [o[name] for o in outputs if name in o and o[name].size]
        if not arrays or arrays[0].dtype.kind != "f" or tolerance is None or not tolerance.atol:
            continue
        rank = arrays[0].ndim
        for axis in part_axes(rank):
            if len({a.shape[axis] for a in arrays}) > 1:
                continue
            size = root_mean_square(arrays, axis)
            atol = np.full(len(size), tolerance.atol)
            if tolerance.axis == axis and len(tolerance.parts) == len(size):
                atol = np.array(tolerance.parts)
            weak = np.flatnonzero(size * _SHARE < atol)
            if 0 < len(weak) < len(size):
                found.append(_note(name, axis, weak, len(size), atol, size[weak].max()))
                break
    return found


def _note(
    name: str, axis: int, weak: np.ndarray, of: int, atol: np.ndarray, largest: float
) -> Note:
    shown = tuple(int(index) for index in weak[:_SHOWN])
    more = ("...",) if len(weak) > _SHOWN else ()
    return note(
        "weak-parts",
        output=name,
        count=len(weak),
        of=of,
        axis=axis,
        names=(*shown, *more),
        rms=float(largest),
        atol=float(atol[weak].max()),
    )
