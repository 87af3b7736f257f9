"""What a rewrite did, pass by pass, as a manifest stores it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.graph.change import Change


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: whether the target needs it, why it exists, and the nodes it changed.

    Args:
        skipped: the target needs the pass, but the caller left it out.
        diff: if requested, one line of ONNX text for each removed (``- ``) or new (``+ ``) node.
    """

    name: str
    needed: bool
    summary: str
    needs: tuple[str, ...]
    evidence: tuple[str, ...]
    fault: str = ""
    clean_up: bool = False
    skipped: bool = False
    rewritten: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()
    diff: tuple[str, ...] = ()
