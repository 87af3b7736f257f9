"""The user's values of an input, and how they become values at other sizes.

Fixed axes keep their size. Along a dynamic axis, the values are cropped, or repeated. Equal copies
would hide a fault that mixes them up, such as two rows of a batch. So each further copy differs:
floating-point values are multiplied by a factor between 0.5 and 1, and other values are shifted
along the other dynamic axes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.errors import InputError

_GOLDEN = (5**0.5 - 1) / 2  # its multiples spread evenly over 0..1


@dataclass(frozen=True)
class Values:
    """The user's values of one input. `Values.of` makes them from an array.

    A manifest stores the fields alone. A file of the artifact has the array.

    Args:
        sha256: The hash of the dtype, the shape and the content.
        shape: The shape of the array.
    """

    sha256: str
    shape: tuple[int, ...]

    @staticmethod
    def of(array: np.ndarray) -> Values:
        """The values of an array, which is copied."""
        array = np.array(array, order="C")
        digest = hashlib.sha256(f"{array.dtype.name}{array.shape}".encode())
        digest.update(array.tobytes())
        values = Values(digest.hexdigest(), array.shape)
        object.__setattr__(values, "_array", array)
        return values

    @property
    def array(self) -> np.ndarray:
        """The values.

        Raises:
            InputError: The values were read from a manifest, without their file.
        """
        array: np.ndarray | None = getattr(self, "_array", None)
        if array is None:
            raise InputError("the input's values are in inputs.npz, which was not read")
        return array

    @property
    def dtype(self) -> np.dtype | None:
        """The array's dtype; None without the array."""
        array: np.ndarray | None = getattr(self, "_array", None)
        return None if array is None else array.dtype

    def at(self, shape: Sequence[int], dynamic: Sequence[bool], turn: int = 0) -> np.ndarray:
        """The values at another size.

        Args:
            shape: The new shape. It differs from the array's along dynamic axes only.
            dynamic: For each axis, whether it is dynamic.
            turn: 0 for the values as they are. Another number gives the values of that copy, for
                checks that need other values.
        """
        array = self.array
        places = np.ogrid[tuple(slice(0, size) for size in shape)] if shape else []
        copies = [
            place // size if free and size else np.zeros_like(place)
            for place, size, free in zip(places, array.shape, dynamic, strict=True)
        ]
        if array.dtype.kind == "f":
            index = [place % max(size, 1) for place, size in zip(places, array.shape, strict=True)]
            number = sum(((2 * axis + 1) * copy for axis, copy in enumerate(copies)), turn)
            factor = 1 - 0.5 * (np.asarray(number) * _GOLDEN % 1)
            found = array[tuple(index)] * factor.astype(array.dtype)
            return np.asarray(found, array.dtype)
        index = []
        for axis, (place, size) in enumerate(zip(places, array.shape, strict=True)):
            if not dynamic[axis]:
                index.append(place)
                continue
            others = [copy for other, copy in enumerate(copies) if other != axis]
            shift = sum(others, start=np.asarray(turn))
            index.append((place + shift) % max(shape[axis], 1) % max(size, 1))
        return np.array(array[tuple(np.broadcast_arrays(*index))] if index else array)
