"""Finding the GPU, and whether it runs a target's engines."""

from __future__ import annotations

import pytest
from on_gpu import runnable

from pipeline.machine import gpu
from pipeline.machine.gpu import Gpu, find_gpu, why_not
from pipeline.machine.target import TARGETS


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 0), False),
        ((8, 0), True),
        ((8, 6), True),
        ((8, 9), True),
        ((9, 0), False),
        ((12, 0), True),
        ((12, 1), True),
    ],
)
def test_gpus_that_rtx_runs_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(gpu, "find_gpu", lambda: Gpu("some GPU", capability))
    why = why_not(TARGETS["rtx-1.7"])
    assert (why == "") is runs
    if not runs:
        major, minor = capability
        assert why == (
            f"TensorRT-RTX does not run on some GPU (compute capability {major}.{minor})"
        )
    assert why_not(TARGETS["tensorrt-8.6"]) == ""


def test_the_portable_rtx_engine_does_not_run_on_turing() -> None:
    turing = Gpu("some GPU", (7, 5))
    assert why_not(TARGETS["rtx-1.7"], turing) == (
        "the portable TensorRT-RTX engine does not run on some GPU (compute capability 7.5): "
        "7.5 needs a build made for it, which this pipeline does not make"
    )
    assert why_not(TARGETS["tensorrt-8.6"], turing) == ""


def test_no_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(_: str) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(gpu.ctypes, "CDLL", no_library)
    assert find_gpu() == "no NVIDIA driver is installed here"
    for target in TARGETS.values():
        assert why_not(target) == "no NVIDIA driver is installed here"


def test_a_reason_is_given_where_no_engine_runs() -> None:
    target, why = runnable()
    assert (target is None) is bool(why)
    assert target is None or why_not(target) == ""
