"""Memory that is kept and used again, in the order of the streams that use it.

A `Lease` is somebody's hold on a block of memory. When the last holder lets go, the block goes
back to its pool, and is given out again for the same slot (a tensor's name):

- on the same stream at once: what the stream still does with it comes before what it will do;
- on any stream after the GPU was waited for (`settle`), which only happens where memory is short
  or streams come and go;
- everywhere after the events of those who used it on other streams.

A stream's handle is never used after the call that named it: the caller may have destroyed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.errors import OutOfMemory

ALIGN = 512  # bytes; cudaMalloc's own steps, and more than TensorRT asks for (256)
QUIET = 0  # in place of a stream: nothing on the GPU uses the block any more
DIRTY = -1  # somebody may, on a stream that can't be waited for
_MOST_STREAMS = 16


class Memory(Protocol):
    """Where blocks come from; `pipeline._cuda` is one."""

    def allocate(self, nbytes: int, /) -> int: ...

    def free(self, pointer: int, /) -> None: ...

    def memory(self) -> tuple[int, int]: ...

    def synchronise(self) -> None: ...


class Moment(Protocol):
    """What a stream can be made to wait for; `pipeline._cuda.Event` is one."""

    def release(self) -> None:
        """Its user lets go now (called once, when the lease is dropped)."""

    def wait(self, stream: int, /) -> None: ...


@dataclass(eq=False, slots=True)
class Block:
    """A piece of memory: its address, its bytes, and the slot that it is for."""

    pointer: int
    capacity: int
    slot: str


@dataclass(eq=False, slots=True)
class _Free:
    block: Block
    stream: int
    after: list[Moment]


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
        for moment in self.after:
            moment.release()
        self._pool.give_back(self._block, self.stream, self.after)


@dataclass
class Pool:
    """Blocks by slot. Only `give_back` may be called from several threads at a time.

    Args:
        memory: where the blocks come from.
        most: the bytes that a slot ever needs, where that is known.
    """

    memory: Memory
    most: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0  # of all blocks, in use or not
    _free: dict[str, list[_Free]] = field(default_factory=dict)
    _returned: deque[tuple[Block, int, list[Moment]]] = field(default_factory=deque)
    _closed: bool = False

    def take(self, slot: str, nbytes: int, stream: int, what: str = "") -> Lease:
        """A block of at least `nbytes` bytes, to be used on the stream.

        Args:
            what: the use, for the error; the slot's name without it.

        Raises:
            OutOfMemory: not even after everything that is free was given up.
        """
        if self._returned:
            self._sweep()
        found = self._find(slot, nbytes, stream)
        if found is None:
            found = self._grown(slot, nbytes, stream, what or slot)
        for moment in found.after:
            moment.wait(stream)
        return Lease(found.block, stream, self)

    def give_back(self, block: Block, stream: int, after: list[Moment]) -> None:
        """What a lease does when it is dropped: quick, and safe at any moment."""
        self._returned.append((block, stream, after))
        if self._closed:
            self._drain()

    def settle(self) -> None:
        """Waits for the GPU; afterwards every free block can be used by any stream."""
        self._sweep()
        self.memory.synchronise()
        for entries in self._free.values():
            for entry in entries:
                entry.stream, entry.after = QUIET, []

    def trim(self) -> None:
        """Waits for the GPU, and frees all blocks that nobody holds."""
        self.settle()
        for entries in self._free.values():
            for entry in entries:
                self._drop(entry.block)
        self._free.clear()

    def close(self) -> None:
        """Frees all blocks that nobody holds, and from now on each when its holder drops it."""
        self._closed = True
        try:
            self.trim()
        finally:  # where the GPU failed, waiting for it fails
            self._drain()

    def _find(self, slot: str, nbytes: int, stream: int) -> _Free | None:
        entries = self._free.get(slot)
        if not entries:
            return None
        best: _Free | None = None
        for entry in entries:
            fits = entry.block.capacity >= nbytes and entry.stream in (stream, QUIET)
            if fits and (best is None or entry.block.capacity < best.block.capacity):
                best = entry
        if best is not None:
            entries.remove(best)
        return best

    def _grown(self, slot: str, nbytes: int, stream: int, what: str) -> _Free:
        """A new block, in place of a free one that is too small."""
        entries = self._free.setdefault(slot, [])
        streams = {entry.stream for entry in entries}
        if DIRTY in streams or len(streams) > _MOST_STREAMS:
            self.settle()
            found = self._find(slot, nbytes, stream)
            if found is not None:
                return found
            entries = self._free[slot]
        small = next((entry for entry in entries if entry.stream in (stream, QUIET)), None)
        if small is not None:
            self.memory.synchronise()
            entries.remove(small)
            self._drop(small.block)
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
        return _Free(Block(pointer, size, slot), stream, [])

    def _sweep(self) -> None:
        """Takes in what was given back since the last time."""
        while True:
            try:
                block, stream, after = self._returned.popleft()
            except IndexError:
                return
            self._free.setdefault(block.slot, []).append(_Free(block, stream, after))

    def _drain(self) -> None:
        """Once closed: frees what is given back (cudaFree waits for the GPU's use of it)."""
        while True:
            try:
                block = self._returned.popleft()[0]
            except IndexError:
                return
            self._drop(block)

    def _drop(self, block: Block) -> None:
        self.memory.free(block.pointer)
        self.nbytes -= block.capacity
