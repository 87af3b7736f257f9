"""The flags of a plan: what each target has, and which go together."""

from __future__ import annotations

import pytest

from pipeline.errors import InputError
from pipeline.machine.gpu import Gpu
from pipeline.machine.target import TARGETS
from pipeline.spec import plan_flags
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags, check_flags

RTX, CLASSIC = TARGETS["rtx-1.7"], TARGETS["tensorrt-8.6"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (PlanFlags(version_compatible=True), "Leave out --version-compatible"),
        (PlanFlags(hardware_compatible=True), "or choose the GPUs with --gpu"),
        (PlanFlags(refit=True), "Leave out --refit, and convert again for new weights"),
    ],
)
def test_tensorrt_rtx_has_none(flags: PlanFlags, text: str) -> None:
    with pytest.raises(InputError, match=text) as error:
        check_flags(flags, RTX)
    assert str(error.value).startswith("target rtx-1.7: ")
    check_flags(NO_FLAGS, RTX)


def test_the_lean_runtime_does_not_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_flags, "find_gpu", lambda: Gpu("H100", (9, 0)))
    check_flags(PlanFlags(hardware_compatible=True, refit=True), CLASSIC)
    check_flags(PlanFlags(hardware_compatible=True, version_compatible=True), CLASSIC)
    with pytest.raises(InputError, match="Leave out --refit or --version-compatible"):
        check_flags(PlanFlags(version_compatible=True, refit=True), CLASSIC)


def test_hardware_compatible_from_ampere_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_flags, "find_gpu", lambda: Gpu("T4", (7, 5)))
    with pytest.raises(InputError, match=r"here is the T4 \(compute capability 7\.5\)"):
        check_flags(PlanFlags(hardware_compatible=True), CLASSIC)
    check_flags(PlanFlags(refit=True), CLASSIC)


def test_names() -> None:
    assert NO_FLAGS.names == ()
    assert PlanFlags(True, True, True).names == (
        "version-compatible", "hardware-compatible", "refit",
    )  # fmt: skip
