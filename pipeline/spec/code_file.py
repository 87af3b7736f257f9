"""A Python file that a model was made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeFile:
    """A Python file that was imported for a model; see `pipeline.source.imports`.

    Args:
        sha256: The hash of its content in lower-case hex. It is empty if there was no such module,
            or if the file is newer than the process, which may have run an older one.
        file: The path of the file; empty if there was no such module.
    """

    sha256: str = ""
    file: str = ""
