"""A pretended GPU for the tests of the runtime."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from fake_tensorrt import Installer, Pretend


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Installs a pretended GPU.

    The garbage collector is off, so that one seed gives one order. At the end, no engine may have
    left anything.
    """
    installer = Installer(monkeypatch)
    gc.disable()
    try:
        yield installer
        installer.end()
    finally:
        gc.enable()
