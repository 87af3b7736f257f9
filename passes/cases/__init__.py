"""Small graphs for every pass: ones to rewrite, near misses to leave alone, ones to refuse.

`pipeline passes --still-needed` and the contract test run them. One file a pass.
"""

from __future__ import annotations

from pipeline.passes._case import Case
from pipeline.passes.cases import decompose_instance_norm, scale_resize, slice_shape

CASES: tuple[Case, ...] = (
    *scale_resize.CASES,
    *decompose_instance_norm.CASES,
    *slice_shape.CASES,
)
