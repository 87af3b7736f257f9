"""``out=``: memory of the caller's that outputs are written into."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.runtime.array_interface import Known, view_of

if TYPE_CHECKING:
    from pipeline.runtime.sizes import Sized


def caller_memory(
    sized: Sized, out: Mapping[str, Any], inputs: Sequence[int], known: Known, stream: int
) -> dict[str, int]:
    """The addresses of the caller's arrays, by output; the stream waits for their producers.

    An empty array's address may be 0.

    Args:
        inputs: the inputs' addresses.

    Raises:
        InputError: an unknown name, another dtype or shape, memory that is read-only, on the host,
            or shared with an input or another output.
    """
    outputs = {output.port.name: output for output in sized.outputs}
    taken = [
        (f"input {name}", pointer, nbytes)
        for (name, _), pointer, nbytes in zip(sized.inputs, inputs, sized.input_bytes, strict=True)
    ]
    found = {}
    for name, value in out.items():
        if name not in outputs:
            raise InputError(f"out: no output {name!r}; the outputs are: {', '.join(outputs)}")
        output = outputs[name]
        if output.shape is None:
            raise InputError(f"out: the shape of {name} depends on the data; leave it out")
        try:
            view = view_of(output.port, value, known, stream)
        except InputError as error:
            raise InputError(f"out: {error}") from error
        if view.shape != output.shape:
            raise InputError(
                f"out: {name}: shape {list(view.shape)}, expected {list(output.shape)}"
            )
        if view.readonly:
            raise InputError(f"out: {name}: is read-only")
        nbytes = math.prod(view.shape) * output.port.dtype.itemsize
        for other, pointer, size in taken:
            if (
                nbytes
                and size
                and view.pointer < pointer + size
                and pointer < view.pointer + nbytes
            ):
                raise InputError(f"out: {name}: shares memory with {other}; give other memory")
        taken.append((f"output {name}", view.pointer, nbytes))
        found[name] = view.pointer
    return found
