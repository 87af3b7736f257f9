"""Small graphs for every pass: ones to rewrite, near misses to leave alone, ones to refuse.

There is one file per pass module, with the same name. `pipeline passes --still-needed` and the
contract test run them. ``measured.json`` holds the results of targets that need a GPU.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.passes import DEFAULT_PASSES
from pipeline.passes.case import Case

__all__ = ["CASES", "MEASURED", "measured"]

MEASURED = Path(__file__).with_name("measured.json")

_MODULES = dict.fromkeys(p.run.__module__.rpartition(".")[2] for p in DEFAULT_PASSES)
CASES: tuple[Case, ...] = tuple(
    case
    for name in _MODULES
    for case in importlib.import_module(f"pipeline.passes.cases.{name}").CASES
)


def measured(target: str) -> Mapping[str, tuple[str, str]]:
    """A target's verdicts on each case: unchanged, and after the passes.

    ``right``: parsed, built and run, with ONNX Runtime's numbers at every shape. ``builds``: not
    run. ``parse``, ``build``, ``crash``, ``sizes`` and ``numbers`` say what failed. ``error``: the
    trial itself failed. ``-``: not tried, since the passes refuse the case or have changed since.

    Args:
        target: the target's name.

    Returns:
        Two verdicts by ``str(case)``. Empty if nothing was measured on the target.
    """
    found = json.loads(MEASURED.read_text(encoding="utf-8")).get(target, {"cases": {}})
    return {case: (without, after) for case, (without, after) in found["cases"].items()}
