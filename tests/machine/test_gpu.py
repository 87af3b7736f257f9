"""Finding the GPU, and whether it runs a target's engines."""

from __future__ import annotations

import pytest
from on_gpu import runnable

from pipeline.errors import InputError
from pipeline.machine import gpu
from pipeline.machine.gpu import (
    Gpu,
    check_capabilities,
    find_gpu,
    parse_capabilities,
    why_not,
)
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
        "7.5 needs an engine built for it with --gpu sm75"
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


def test_kinds_of_gpu_as_text() -> None:
    assert parse_capabilities(["sm86,sm_89", "12.0", " 8.6"]) == ((8, 6), (8, 9), (12, 0))
    assert parse_capabilities(["sm120"]) == ((12, 0),)
    for wrong in ("rtx4090", "sm8", "8,6", "", "8.60"):
        with pytest.raises(InputError, match=r"is no compute capability\. Write it as sm86"):
            parse_capabilities([wrong])


def test_gpus_that_a_target_builds_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rtx, classic = TARGETS["rtx-1.7"], TARGETS["tensorrt-8.6"]
    check_capabilities(((7, 5), (8, 6), (12, 1)), rtx)
    with pytest.raises(InputError, match=r"gpu 9\.0: rtx-1\.7 builds for 7\.5, 8\.0, 8\.6, 8\.9"):
        check_capabilities(((8, 6), (9, 0)), rtx)
    monkeypatch.setattr(gpu, "find_gpu", lambda: Gpu("H100", (9, 0)))
    check_capabilities((), classic)
    check_capabilities(((9, 0),), classic)
    with pytest.raises(
        InputError, match=r"gpu 8\.6: tensorrt-8\.6 builds for the GPU of this mach"
    ):
        check_capabilities(((8, 6),), classic)
    monkeypatch.setattr(gpu, "find_gpu", lambda: "no GPU")
    with pytest.raises(InputError, match="this machine only, and no GPU"):
        check_capabilities(((9, 0),), classic)


def test_an_engine_for_some_gpus() -> None:
    rtx, turing = TARGETS["rtx-1.7"], Gpu("some GPU", (7, 5))
    assert why_not(rtx, turing, ("7.5", "8.6")) == ""
    need = "the engine needs compute capability 8.6 or 8.9, some GPU has 7.5"
    assert why_not(rtx, turing, ("8.6", "8.9")) == need
