"""What a run gives, and outputs whose shape depends on data: TensorRT asks for their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipeline.errors import EngineError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.arrays import Port
from pipeline.runtime.pool import QUIET, Lease, Pool
from pipeline.runtime.sizes import Shape, Sized, Sizes

# An output of a run: its block, or None where the caller's memory was written.
Result = tuple[Port, Shape, Lease | None]


@dataclass(eq=False, slots=True)
class Done:
    """The same while it is not known yet."""

    port: Port
    shape: Shape
    lease: Lease | None


def prepare(allocator: Any, name: str, pool: Pool, stream: int, poison: int | None) -> None:
    """Makes an output's allocator (`bindings.Context.allocator`) ready for one run.

    Args:
        poison: the byte to fill the memory with; None leaves it as it is.
    """

    def give(nbytes: int) -> int:
        lease = allocator.lease = pool.take(name, nbytes, stream, f"output {name}")
        if poison is not None:
            _cuda.fill(lease.pointer, poison, lease.capacity, stream)
        return lease.pointer

    def idle(nbytes: int) -> Lease:
        pool.settle()  # which stream the next run is on is not known yet
        return pool.take(name, nbytes, QUIET, f"output {name}")

    allocator.prepare(give)
    allocator.idle = idle
    if allocator.spare is not None and poison is not None:
        _cuda.fill(allocator.spare.pointer, poison, allocator.spare.capacity, stream)


def take_over(item: Done, allocator: Any, stream: int) -> None:
    """Puts what the run on the stream gave into `item`.

    Raises:
        EngineError: TensorRT did not say the shape, or asked for too little memory for it.
    """
    name, shape, lease = item.port.name, allocator.shape, allocator.lease
    if lease is None and allocator.spare is not None:  # given between the runs, not asked for again
        lease, allocator.spare = allocator.spare, None
        lease.stream = stream
    allocator.prepare(None)
    if shape is None or any(size < 0 for size in shape):
        raise EngineError(f"output {name}: TensorRT does not say which shape it has")
    nbytes = math.prod(shape) * item.port.dtype.itemsize
    if lease is None or lease.capacity < nbytes:
        raise EngineError(f"output {name}: TensorRT says {list(shape)} but asked for less")
    item.shape, item.lease = shape, lease


def finish(result: Result, allocator: Any, sized: Sized, sizes: Sizes, stream: int) -> Result:
    """What the run on the stream gave (see `take_over`), held against the manifest.

    Raises:
        EngineError: as `take_over`; or another shape than the manifest says.
    """
    item = Done(*result)
    take_over(item, allocator, stream)
    sizes.check_output(item.port.name, item.shape, sized.sizes)
    return item.port, item.shape, item.lease
