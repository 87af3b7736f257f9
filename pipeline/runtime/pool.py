"""A pool that reuses memory blocks in the order of the streams that use them.

A `Lease` keeps a block of memory in use. When its last user drops it, the block returns to the
pool. The pool hands it out again for the same slot (a tensor's name):

- at once on the same stream: the old work on it runs before the new work;
- on any stream after a wait for the GPU (`settle`), which happens only if memory is short or there
  are many streams;
- in each case after the events of users on other streams.

A stream's handle is never used after the call that passed it: the caller may have destroyed it.
But handles are compared. If a stream is destroyed with work pending, and a new one gets its handle,
both count as one stream. So callers have to keep a stream until its work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.errors import OutOfMemory

ALIGN = 512  # bytes; cudaMalloc's granularity, and more than TensorRT requires (256)
QUIET = 0  # in place of a stream: nothing on the GPU uses the block any more
DIRTY = -1  # in place of a stream: an unknown stream may still use the block
_MOST_STREAMS = 16


class Memory(Protocol):
    """The source of blocks; `pipeline.runtime.cuda` is one."""

    def allocate(self, nbytes: int, /) -> int: ...

    def free(self, pointer: int, /) -> None: ...

    def memory(self) -> tuple[int, int]: ...

    def synchronise(self) -> None: ...


class Moment(Protocol):
    """Something that a stream can wait for; `pipeline.runtime.cuda.Event` is one."""

    def release(self) -> None:
        """Called once, when the lease is dropped: its user's work so far is the moment."""

    def wait(self, stream: int, /) -> None: ...


@dataclass(eq=False, slots=True)
class Block:
    """A piece of memory: its address, its bytes, and its slot.

    After it returned to the pool, `stream` and `after` are those of its last lease.
    """

    pointer: int
    capacity: int
    slot: str
    stream: int = QUIET
    after: Sequence[Moment] = ()


def block_size(nbytes: int, most: int | None) -> int:
    """How many bytes to allocate for a need of `nbytes`, so that growing sizes need few blocks.

    The block sizes are `most`, its half, its quarter and so on. So all needs between half of `most`
    and `most` share one block. Powers of two are used if `most` is unknown or too small.
    """
    need = max(nbytes, 1)
    if most is None or need > most:
        size = 1 << (need - 1).bit_length()
    else:
        size = most
        while (size + 1) // 2 >= need and size > ALIGN:
            size = (size + 1) // 2
    return -(-max(size, need) // ALIGN) * ALIGN


class Lease:
    """Keeps a block in use; the block returns to the pool when the lease is dropped.

    Attributes:
        pointer: the address.
        stream: the stream that uses it, or `QUIET` or `DIRTY`.
        after: moments on other streams that the next user has to wait for.
    """

    __slots__ = ("_block", "_pool", "after", "pointer", "stream")

    def __init__(self, block: Block, stream: int, pool: Pool) -> None:
        self._block, self._pool = block, pool
        self.pointer, self.stream = block.pointer, stream
        self.after: list[Moment] = []

    @property
    def capacity(self) -> int:
        return self._block.capacity

    def __del__(self) -> None:  # may run in any thread, in the middle of anything
        block, pool = self._block, self._pool
        block.stream, block.after = self.stream, self.after
        for moment in self.after:
            moment.release()
        pool.returned.append(block)
        if pool.closed:
            pool.drain()


@dataclass
class Pool:
    """Blocks by slot. Several threads may drop leases at once; all else needs a lock.

    Args:
        memory: the source of the blocks.
        most: the most bytes that a slot ever needs, if known.
        returned: blocks from dropped leases that `take` has not collected yet.
        closed: whether a returned block is freed at once, by `drain`.
    """

    memory: Memory
    most: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0  # of all blocks, in use or not
    returned: deque[Block] = field(default_factory=deque)
    closed: bool = False
    _free: dict[str, list[Block]] = field(default_factory=dict)

    def take(self, slot: str, nbytes: int, stream: int, what: str = "") -> Lease:
        """Leases a block of at least `nbytes` bytes for use on the stream.

        Args:
            what: the block's name in the error message; by default the slot's name.

        Raises:
            OutOfMemory: memory is short even after all free blocks were freed.
        """
        if self.returned:
            self._sweep()
        found = self._find(slot, nbytes, stream)
        if found is None:
            found = self._grown(slot, nbytes, stream, what or slot)
        for moment in found.after:
            moment.wait(stream)
        return Lease(found, stream, self)

    def settle(self) -> None:
        """Waits for the GPU; afterwards any stream can use every free block."""
        self._sweep()
        self.memory.synchronise()
        for blocks in self._free.values():
            for block in blocks:
                block.stream, block.after = QUIET, ()

    def trim(self) -> None:
        """Waits for the GPU, and frees all blocks that nobody holds."""
        self.settle()
        for blocks in self._free.values():
            for block in blocks:
                self._drop(block)
        self._free.clear()

    def close(self) -> None:
        """Frees all unused blocks; from now on, each other one when its lease is dropped."""
        self.closed = True
        try:
            self.trim()
        finally:  # if the GPU failed, waiting for it fails too
            self.drain()

    def _find(self, slot: str, nbytes: int, stream: int) -> Block | None:
        """Takes out the smallest free block that fits; None if there is none."""
        blocks = self._free.get(slot)
        if not blocks:
            return None
        best: Block | None = None
        for block in blocks:
            at = block.stream
            if (
                at in (stream, QUIET)
                and block.capacity >= nbytes
                and (best is None or block.capacity < best.capacity)
            ):
                best = block
        if best is not None:
            blocks.remove(best)
        return best

    def _grown(self, slot: str, nbytes: int, stream: int, what: str) -> Block:
        """Allocates a block; first frees one free block that is too small."""
        blocks = self._free.setdefault(slot, [])
        streams = {block.stream for block in blocks}
        if DIRTY in streams or len(streams) > _MOST_STREAMS:
            self.settle()
            found = self._find(slot, nbytes, stream)
            if found is not None:
                return found
            blocks = self._free[slot]
        small = next((block for block in blocks if block.stream in (stream, QUIET)), None)
        if small is not None:
            self.memory.synchronise()
            blocks.remove(small)
            self._drop(small)
        size = block_size(nbytes, self.most.get(slot))
        pointer = self.memory.allocate(size)
        if not pointer:
            self.settle()
            found = self._find(slot, nbytes, stream)
            if found is not None:
                return found
            self.trim()
            pointer = self.memory.allocate(size)
        if not pointer and size > nbytes + ALIGN:
            size = block_size(nbytes, nbytes)
            pointer = self.memory.allocate(size)
        if not pointer:
            left, total = self.memory.memory()
            raise OutOfMemory(
                f"{what} needs {nbytes} bytes of GPU memory, but only {left} of {total} are free",
                wanted=nbytes,
                free=left,
            )
        self.nbytes += size
        return Block(pointer, size, slot)

    def _sweep(self) -> None:
        """Collects the blocks that were returned since the last time."""
        returned, free = self.returned, self._free
        while returned:
            try:
                block = returned.popleft()
            except IndexError:  # the pool was closed meanwhile: another thread took it
                return
            if block.slot in free:
                free[block.slot].append(block)
            else:
                free[block.slot] = [block]

    def drain(self) -> None:
        """Frees returned blocks of a closed pool; cudaFree waits for work that uses them."""
        while self.returned:
            try:
                block = self.returned.popleft()
            except IndexError:  # another thread took it
                return
            self._drop(block)

    def _drop(self, block: Block) -> None:
        self.memory.free(block.pointer)
        self.nbytes -= block.capacity
