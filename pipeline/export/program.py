"""A saved program as a module that takes its tensors one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_unflatten


class ProgramModule(torch.nn.Module):
    """What an ExportedProgram computes.

    Its inputs are the program's tensors in order, whatever nested arguments they stood in;
    constants that it was exported with stay what they were. It returns what the program does.

    Args:
        program: the program. Its parameters are the module's.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        # the guards are found anew when it is exported again, over the range that is asked for
        self.program = program.module(check_guards=False)
        spec = program.call_spec.in_spec
        assert spec is not None
        self._spec = spec
        arguments = [
            s.arg for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"
        ]
        self._constants = [
            (type(a).__name__ != "TensorArgument", getattr(a, "value", None)) for a in arguments
        ]

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        leaves = [value if constant else next(rest) for constant, value in self._constants]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> ProgramModule:
        """Nothing: a program is what it was when it was exported, and refuses to be changed."""
        del mode
        return self
