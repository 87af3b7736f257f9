"""What torch's exporter makes anew at every export, kept between the exports of a test process.

torch.onnx.export translates its table of some 500 ONNX functions at each call: 0.5 s of CPU, half
of a small export, and the tests export hundreds of times. Every export gets a copy, so that what
it registers is its own; tests/test_export.py holds the copy against torch's own table.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_REGISTRY = "torch.onnx._internal.exporter._registration"


def keep_table() -> None:
    """Keeps the table from the next export on, where torch's exporter has been imported."""
    module = sys.modules.get(_REGISTRY)
    if module is None or hasattr(module.ONNXRegistry, "made_anew"):
        return
    own = module.ONNXRegistry.from_torchlib.__func__

    @functools.cache
    def made(registry: Any, **how: Any) -> Any:
        return own(registry, **how)

    def from_torchlib(registry: Any, **how: Any) -> Any:
        kept, copy = made(registry, **how), registry()
        vars(copy).update(vars(kept))
        copy.functions = {target: list(known) for target, known in kept.functions.items()}
        return copy

    module.ONNXRegistry.made_anew = classmethod(own)
    module.ONNXRegistry.from_torchlib = classmethod(from_torchlib)
