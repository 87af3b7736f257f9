"""torch says nothing while a module is tried, and does no work for records that nobody reads."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from pipeline.probe.eager import quiet

TRACED = """
import torch
from torch._logging._internal import trace_log
from pipeline.probe.eager import quiet

with quiet():
    torch.export.export(torch.nn.Tanh(), (torch.rand(3),))
print(trace_log.handlers)
"""


def test_nothing_is_said_and_the_levels_are_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.a_test")
    logger.addHandler(handler := logging.StreamHandler())  # to sys.stderr
    handler.setLevel(logging.INFO)
    try:
        with quiet(), quiet():
            logger.error("an error")
            print("a print")
            warnings.warn("a warning", stacklevel=1)
        assert capfd.readouterr() == ("", "")
        assert handler.level == logging.INFO
        logger.error("an error")
        assert capfd.readouterr().err == "an error\n"
    finally:
        logger.removeHandler(handler)


def test_torch_makes_no_records_for_a_trace_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without TORCH_TRACE its handler leaves at the first record, if it gets one."""
    monkeypatch.delenv("TORCH_TRACE", raising=False)
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
