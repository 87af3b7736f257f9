"""expand_hardmax: ties."""

from __future__ import annotations

import numpy as np
from pass_harness import apply, own, run

from pipeline.passes.expand_hardmax import PASS


def test_of_several_largest_the_first_is_taken() -> None:
    (case,) = (c for c in own("expand_hardmax", "positive") if c.name == "last axis")
    x = np.array([[1, 3, 3, 2], [5, 5, 5, 5]], np.float32)
    after, _ = apply(PASS, case.model())
    for model in (case.model(), after):
        (y,) = run(model, {"x": x})
        np.testing.assert_array_equal(y, [[0, 1, 0, 0], [1, 0, 0, 0]])
