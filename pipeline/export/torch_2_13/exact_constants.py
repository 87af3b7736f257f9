"""Compares constants exactly while torch's exporter simplifies an ONNX graph.

onnxscript leaves out ``x + 0`` and ``x * 1``. It takes every number up to 1e-8 for 0, and every
number that differs from 1 by at most 1e-5 for 1. So ``x / (x.norm() + 1e-8)`` lost its epsilon, and
was NaN at 0.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from onnxscript.rewriter._matcher import SimplePatternMatcher
from onnxscript.rewriter._pattern_ir import Constant

from pipeline.export.exchange import Exchange

_match: Any = SimplePatternMatcher._match_constant


def _exactly(matcher: SimplePatternMatcher, wanted: Constant, value: Any) -> bool:
    """`_match_constant` without a tolerance."""
    return bool(_match(matcher, Constant(wanted.value, rel_tol=0.0, abs_tol=0.0), value))


_exchange = Exchange({(SimplePatternMatcher, _match.__name__): _exactly})


def exact_constants() -> AbstractContextManager[None]:
    """While it is active, a pattern's constant matches the same number only."""
    return _exchange.used()
