"""Lets a model read and replace ``weight.data`` while it is traced.

``Tensor.data`` gives the tensor without its history, and goes around the tracing. So a weight that
``forward`` folds (``self.weight.data * self.scale.data``) is a constant without values, and
torch.export refuses the program (torch 2.13). ``detach()`` gives the same tensor and is traced. A
new value of ``weight.data`` is copied into the weight, so that later reads in the graph see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READ: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WRITE: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class PlainData(TorchFunctionMode):
    """While it is active, ``x.data`` is ``x.detach()``, and a new value is copied into it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function of its API."""
        del types
        if func == _READ:
            return args[0].detach()
        if func == _WRITE and args[0].shape == args[1].shape:
            args[0].detach().copy_(args[1])
            return None
        return func(*args, **(kwargs or {}))
