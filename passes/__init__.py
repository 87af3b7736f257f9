"""The rewrite passes, in the order in which they run.

The list is all there is: no pass is registered anywhere else. Each runs only where its target
needs it (see `pipeline.passes._base.Pass.needed_by`).
"""

from __future__ import annotations

from pipeline.passes import decompose_instance_norm, scale_resize, slice_shape
from pipeline.passes._base import Change, Needs, Pass, PassResult

__all__ = ["DEFAULT_PASSES", "Change", "Needs", "Pass", "PassResult"]

DEFAULT_PASSES: tuple[Pass, ...] = (
    # Follows the arithmetic that computes the sizes, and removes it where it is not needed any
    # more: before slice_shape, so that fewer Shape nodes are left to rewrite.
    scale_resize.PASS,
    # Makes and removes no Shape: anywhere.
    decompose_instance_norm.PASS,
    # Last, so that a Shape with start or end which an earlier pass may make is rewritten too.
    slice_shape.PASS,
)
