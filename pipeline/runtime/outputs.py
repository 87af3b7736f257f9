"""The memory of outputs: the caller's (``out=``), or memory whose size TensorRT asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import EngineError, InputError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.array_interface import KnownArrays, view_of
from pipeline.runtime.arrays import Port
from pipeline.runtime.pool import QUIET, Lease, Pool
from pipeline.runtime.sizes import EngineSizes, Shape, Sized

if TYPE_CHECKING:
    from pipeline.runtime.sizes import Sized


def caller_memory(
    sized: Sized, out: Mapping[str, Any], inputs: Sequence[int], known: KnownArrays, stream: int
) -> dict[str, int]:
    """Returns the addresses of the caller's arrays by output, and makes the stream wait for them.

    An empty array's address may be 0.

    Args:
        inputs: the inputs' addresses.

    Raises:
        InputError: a name is unknown, or a dtype or shape differs. Or the memory is read-only, on
            the host, or shared with an input or another output.
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
            raise InputError(f"out: {name}: is read-only; pass writable memory")
        nbytes = math.prod(view.shape) * output.port.dtype.itemsize
        for other, pointer, size in taken:
            if (
                nbytes
                and size
                and view.pointer < pointer + size
                and pointer < view.pointer + nbytes
            ):
                raise InputError(f"out: {name}: shares memory with {other}; pass other memory")
        taken.append((f"output {name}", view.pointer, nbytes))
        found[name] = view.pointer
    return found


# A run's output, with its block; None in place of the block if it is in the caller's memory.
Result = tuple[Port, Shape, Lease | None]


@dataclass(eq=False, slots=True)
class Done:
    """A `Result` whose shape and block are not known yet."""

    port: Port
    shape: Shape
    lease: Lease | None


def prepare(allocator: Any, name: str, pool: Pool, stream: int, poison: int | None) -> None:
    """Prepares an output's allocator (`bindings.Context.allocator`) for one run.

    Args:
        poison: the byte to fill the memory with; None for no filling.
    """

    def give(nbytes: int) -> int:
        lease = allocator.lease = pool.take(name, nbytes, stream, f"output {name}")
        if poison is not None:
            _cuda.fill(lease.pointer, poison, lease.capacity, stream)
        return lease.pointer

    def idle(nbytes: int) -> Lease:
        pool.settle()  # the next run's stream is not known yet
        return pool.take(name, nbytes, QUIET, f"output {name}")

    allocator.prepare(give)
    allocator.idle = idle
    if allocator.spare is not None and poison is not None:
        _cuda.fill(allocator.spare.pointer, poison, allocator.spare.capacity, stream)


def take_over(item: Done, allocator: Any, stream: int) -> None:
    """Stores the shape and memory of a run's output in `item`.

    Raises:
        EngineError: TensorRT did not report the shape, or asked for too little memory for it.
    """
    name, shape, lease = item.port.name, allocator.shape, allocator.lease
    if lease is None and allocator.spare is not None:  # TensorRT asked for it between the runs
        lease, allocator.spare = allocator.spare, None
        lease.stream = stream
    allocator.prepare(None)
    if shape is None or any(size < 0 for size in shape):
        raise EngineError(f"output {name}: TensorRT does not report its shape")
    nbytes = math.prod(shape) * item.port.dtype.itemsize
    if lease is None or lease.capacity < nbytes:
        raise EngineError(
            f"output {name}: TensorRT reports the shape {list(shape)} but asked for less memory"
        )
    item.shape, item.lease = shape, lease


def finish(result: Result, allocator: Any, sized: Sized, sizes: EngineSizes, stream: int) -> Result:
    """Completes a run's output (see `take_over`) and compares its shape with the manifest.

    Raises:
        EngineError: as for `take_over`; or the shape differs from the manifest's.
    """
    item = Done(*result)
    take_over(item, allocator, stream)
    sizes.check_output(item.port.name, item.shape, sized.sizes)
    return item.port, item.shape, item.lease
