"""A short form of benchmarks/store/stress.py: kills while processes push, pull and remove."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fsspec")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stress() -> ModuleType:
    path = ROOT / "benchmarks" / "store" / "stress.py"
    spec = importlib.util.spec_from_file_location("store_stress", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["store_stress"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("collects", [False, True])
def test_no_lookup_is_torn_or_wrong(stress: ModuleType, collects: bool) -> None:
    counts = stress.phase(200, 4, 7, False, collects)
    assert stress.is_good(counts, collects), counts
    assert counts["lookups"] >= 200 and counts["kills"] >= 3
    assert counts["hits"] >= 20 and counts["pushes"] >= 10


def test_it_notices_blobs_that_are_written_in_place(stress: ModuleType) -> None:
    """A kill has to meet a write, so a short attack can miss it. Five in a row do not."""
    for seed in range(7, 12):
        counts = stress.phase(200, 4, seed, True, False)
        if not stress.is_good(counts, False):
            break
    else:
        raise AssertionError(counts)
    assert counts["torn"] + counts["unreadable entries"] + counts["damaged blobs"] > 0
