"""Measures seconds by name, and the process's peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.machine.progress import Announce, silent


class Stopwatch:
    """Adds up wall-clock seconds by name: ``with watch("torch.export"): ...``.

    Args:
        announce: Called with each name when it is timed for the first time. Call it for steps
            that are not timed.
    """

    def __init__(self, announce: Announce = silent) -> None:
        self.seconds: dict[str, float] = {}
        self.announce = announce

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name not in self.seconds:
            self.announce(name)
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
        Path("/proc/self/clear_refs").write_bytes(b"5")


def peak_memory() -> int | None:
    """Peak resident memory of this process since `reset_peak_memory`, bytes; None if unknown."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def release_memory() -> None:
    """Returns unused memory to the system.

    The graphs of torch and onnx are cycles of objects, so they need the garbage collector. After
    that, the allocator still keeps their memory: about a model's weights for an export.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def default_limit() -> int:
    """Half of the free memory, at most 6 GiB, so that a comparison leaves a laptop usable."""
    return min(available_memory() // 2, 6 * 2**30)


def available_memory() -> int:
    """Bytes that can be allocated here without swapping, by what the system reports."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform != "win32":
        with contextlib.suppress(ValueError, OSError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 * 2**30
