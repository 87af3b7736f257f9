"""Collects the messages that Polygraphy and TensorRT would print."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field


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
