"""Makes the exports of a test process quicker. The tests export hundreds of times.

- torch.onnx.export translates its table of about 500 ONNX functions at each call. This takes 0.5 s
  of CPU, half of a small export. Here it is cached. Every export gets a copy of the table, so it
  can register functions. tests/export/test_export.py compares the copy with torch's table.
- To list the ops that it may decompose, torch looks up every such op once for each namespace of
  ops, of which there are about 30, and does this twice for each export. Here it is once for each
  list. A small export of 0.6 s takes about 0.1 s less.
"""

from __future__ import annotations

import sys
from typing import Any

_REGISTRY = "torch.onnx._internal.exporter._registration"
_UTILS = "torch._export.utils"
_USERS = ("torch.export.decomp_utils", "torch.export.exported_program")


def keep_table() -> None:
    """Caches the table from the next export on, if torch's exporter is imported."""
    _look_up_ops_once()
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


def _look_up_ops_once() -> None:
    """Looks up torch's ops once for each list of the ops that can be decomposed."""
    utils, *users = (sys.modules.get(name) for name in (_UTILS, *_USERS))
    if utils is None or None in users or hasattr(utils, "look_up_each_time"):
        return
    look_up, listed = utils._materialize_cpp_cia_ops, utils._collect_all_valid_cia_ops

    def collect() -> Any:
        look_up()
        utils._materialize_cpp_cia_ops = lambda: None
        try:
            return listed()
        finally:
            utils._materialize_cpp_cia_ops = look_up

    utils.look_up_each_time = listed
    for module in (utils, *users):
        module._collect_all_valid_cia_ops = collect
