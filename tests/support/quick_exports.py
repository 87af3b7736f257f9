"""Caches a table of torch's exporter between the exports of a test process.

torch.onnx.export translates its table of about 500 ONNX functions at each call. This takes 0.5 s of
CPU, half of a small export, and the tests export hundreds of times. Every export gets a copy of the
table, so it can register functions. tests/export/test_export.py compares the copy with torch's
table.
"""

from __future__ import annotations

import sys
from typing import Any

_REGISTRY = "torch.onnx._internal.exporter._registration"


def keep_table() -> None:
    """Caches the table from the next export on, if torch's exporter is imported."""
    module = sys.modules.get(_REGISTRY)
    if module is None or hasattr(module.ONNXRegistry, "made_anew"):
        return
    own = module.ONNXRegistry.from_torchlib.__func__

    made: dict[Any, Any] = {}

    def from_torchlib(registry: Any, **how: Any) -> Any:
        # a later import of a library adds ops to the table (torchvision)
        ops = len(sys.modules["torch"]._C._dispatch_get_all_op_names())
        key = (ops, registry, *sorted(how.items()))
        if key not in made:
            made[key] = own(registry, **how)
        kept, copy = made[key], registry()
        vars(copy).update(vars(kept))
        copy.functions = {target: list(known) for target, known in kept.functions.items()}
        return copy

    module.ONNXRegistry.made_anew = classmethod(own)
    module.ONNXRegistry.from_torchlib = classmethod(from_torchlib)
