"""Seconds by name, and the peak memory of a stretch of the process's life."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path


class Stopwatch:
    """Adds up wall-clock seconds by name: ``with watch("torch.export"): ...``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def reset_peak_memory() -> None:
    """Starts a new measurement for `peak_memory` (Linux; elsewhere nothing happens).

    Source: proc(5), /proc/pid/clear_refs, value 5.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Peak resident memory of this process since `reset_peak_memory`, bytes; None if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def release_memory() -> None:
    """Gives back what is not used any more: torch's and onnx's graphs are cycles of objects, and
    the allocator keeps what they leave (of an exported model about as much as its weights)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def default_limit() -> int:
    """Half of the memory that is free here, at most 6 GiB: a comparison must not choke a laptop."""
    return min(available_memory() // 2, 6 * 2**30)


def available_memory() -> int:
    """Bytes that can be allocated here without swapping, as far as the system says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 * 2**30
