"""Keeps ``len(tensor)`` symbolic while a model is traced.

Python's ``len`` must return a number, so torch.export bakes the first axis in. Under
`symbolic_lengths` the name ``len`` in the model's own modules gives ``x.shape[0]`` of a tensor x.
Of everything else it is Python's own. A module that defines ``len`` itself keeps its own.
"""

from __future__ import annotations

import builtins
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipeline.export.torch_2_13.namespaces import namespaces, renamed


def _len(value: Any, /) -> Any:
    """``len`` that keeps the symbolic length of a tensor."""
    plain = isinstance(value, torch.Tensor) and type(value).__len__ is torch.Tensor.__len__
    return value.shape[0] if plain and value.dim() > 0 else builtins.len(value)


def symbolic_lengths(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Makes ``len`` of a tensor its first size, in the modules of a model.

    Args:
        module: the model.
    """
    return renamed("len", _len, namespaces(module))
