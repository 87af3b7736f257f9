"""Memory that is kept and used again, in the order of the streams that use it.

A `Lease` is somebody's hold on a block of memory. When the last holder lets go, the block goes
back to its pool, and is given out again for the same slot (a tensor's name):

- on the same stream at once: what the stream still does with it comes before what it will do;
- on any stream after the GPU was waited for (`settle`), which only happens where memory is short
  or streams come and go;
- everywhere after the events of those who used it on other streams.

A stream's handle is never used after the call that named it: the caller may have destroyed it. It
is compared, though: a stream that was destroyed with work pending, and whose handle was given out
again, would count as the same one, so that callers keep streams until they are through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.errors import OutOfMemory

ALIGN = 512  # bytes; cudaMalloc's own steps, and more than TensorRT asks for (256)
QUIET = 0  # in place of a stream: nothing on the GPU uses the block any more
DIRTY = -1  # somebody may, on a stream that can't be waited for
_MOST_STREAMS = 16


class Memory(Protocol):
    """Where blocks come from; `pipeline.runtime.cuda` is one."""

    def allocate(self, nbytes: int, /) -> int: ...

    def free(self, pointer: int, /) -> None: ...

    def memory(self) -> tuple[int, int]: ...

    def synchronise(self) -> None: ...


class Moment(Protocol):
    """What a stream can be made to wait for; `pipeline.runtime.cuda.Event` is one."""

    def release(self) -> None:
        """Its user lets go now (called once, when the lease is dropped)."""

    def wait(self, stream: int, /) -> None: ...


@dataclass(eq=False, slots=True)
class Block:
    """A piece of memory: its address, its bytes, and the slot that it is for.

    Once given back: `stream` and `after` of its last lease.
    """

    pointer: int
    capacity: int
    slot: str
    stream: int = QUIET
    after: Sequence[Moment] = ()


def block_size(nbytes: int, most: int | None) -> int:
    """How many bytes to take where `nbytes` are needed, so that growing sizes need few blocks.

    The classes are `most`, its half, its quarter and so on (powers of two where nothing is known
    or more is needed): sizes between half of the most and the most share one block.
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
    """A hold on a block; letting go of it (by dropping it) gives the block back.

    Attributes:
        pointer: the address.
        stream: the one that it is used on, or `QUIET` or `DIRTY`.
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
    """Blocks by slot. Only leases may be dropped in several threads at a time.

    Args:
        memory: where the blocks come from.
        most: the bytes that a slot ever needs, where that is known.
        returned: what dropped leases gave back, and nobody took in yet.
        closed: what is given back is freed at once, by `drain`.
    """

    memory: Memory
    most: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0  # of all blocks, in use or not
    returned: deque[Block] = field(default_factory=deque)
    closed: bool = False
    _free: dict[str, list[Block]] = field(default_factory=dict)

    def take(self, slot: str, nbytes: int, stream: int, what: str = "") -> Lease:
        """A block of at least `nbytes` bytes, to be used on the stream.

        Args:
            what: the use, for the error; the slot's name without it.

        Raises:
            OutOfMemory: not even after everything that is free was given up.
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
        """Waits for the GPU; afterwards every free block can be used by any stream."""
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
        """Frees all blocks that nobody holds, and from now on each when its holder drops it."""
        self.closed = True
        try:
            self.trim()
        finally:  # where the GPU failed, waiting for it fails
            self.drain()

    def _find(self, slot: str, nbytes: int, stream: int) -> Block | None:
        """The smallest free block that fits, taken out; None where there is none."""
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
        """A new block, in place of a free one that is too small."""
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
                f"{what} needs {nbytes} bytes of GPU memory, of which {left} of {total} are free",
                wanted=nbytes,
                free=left,
            )
        self.nbytes += size
        return Block(pointer, size, slot)

    def _sweep(self) -> None:
        """Takes in what was given back since the last time."""
        returned, free = self.returned, self._free
        while returned:
            try:
                block = returned.popleft()
            except IndexError:  # closed meanwhile: another thread was faster
                return
            if block.slot in free:
                free[block.slot].append(block)
            else:
                free[block.slot] = [block]

    def drain(self) -> None:
        """Once closed: frees what is given back (cudaFree waits for the GPU's use of it)."""
        while self.returned:
            try:
                block = self.returned.popleft()
            except IndexError:  # another thread was faster
                return
            self._drop(block)

    def _drop(self, block: Block) -> None:
        self.memory.free(block.pointer)
        self.nbytes -= block.capacity
