"""Checks a torch module in hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.commands.check import check as checking
from pipeline.commands.check.check import CheckReport
from pipeline.source.module import module_config

if TYPE_CHECKING:
    import torch


def check(
    module: torch.nn.Module, inputs: Any = None, dims: Any = None, *, name: str = "", **options: Any
) -> CheckReport:
    """Lists what would stop a conversion of a torch module, without building or writing anything.

    Args:
        module, inputs, dims, name, options: As in `pipeline.convert`.

    Returns:
        The findings. `CheckReport.ok` is True if no finding blocks a conversion, and ``print``
        shows the report as ``pipeline check`` does.

    Raises:
        InputError: A conversion would not start with these arguments.
    """
    return checking.check(module_config(module, inputs, dims, name, options), lambda _: None)
