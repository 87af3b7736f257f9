"""Polygraphy without its messages on the terminal, and without an import of torch."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Messages:
    """Warnings and errors, each in order of arrival."""

    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def collected() -> Iterator[Messages]:
    """Collects the messages of everything that Polygraphy runs inside the block."""
    from polygraphy.logger import G_LOGGER

    messages = Messages()
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        (messages.errors if record.levelno >= logging.ERROR else messages.warnings).append(text)

    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("Polygraphy")
    saved = (logger.handlers, logger.propagate, logger.level)
    was = G_LOGGER.use_python_logging_system
    G_LOGGER.colors = False  # else it asks for the package `colored` on stdout
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    G_LOGGER.use_python_logging_system = True
    try:
        with G_LOGGER.verbosity(G_LOGGER.WARNING):
            yield messages
    finally:
        logger.handlers, logger.propagate = saved[:2]
        logger.setLevel(saved[2])
        G_LOGGER.use_python_logging_system = was


def without_torch() -> None:
    """Keeps Polygraphy from importing torch where the program has not imported it.

    Polygraphy imports torch, which takes seconds, only to see whether an array is a tensor of
    torch. It can't be one before torch is imported.
    """
    for name in ("polygraphy.util.array", "polygraphy.json.serde"):
        # each lazily imported module has a class of its own
        kind: Any = type(importlib.import_module(name).torch)
        if not hasattr(kind, "imports_torch"):
            kind.imports_torch = kind.is_importable
            kind.is_importable = _is_imported


def _is_imported(module: Any) -> bool:
    return "torch" in sys.modules and bool(module.imports_torch())
