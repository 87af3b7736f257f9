"""Converts models: `pipeline.convert.driver`. The package itself converts a module in hand."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipeline.machine.progress import Announce, silent
from pipeline.source.module import module_config

if TYPE_CHECKING:
    import torch

    from pipeline.convert.report import Report


class Convert(ModuleType):
    """The package `pipeline.convert`, which is also the function ``pipeline.convert(...)``."""

    def __call__(
        self,
        module: torch.nn.Module,
        inputs: Any = None,
        dims: Any = None,
        *,
        name: str = "",
        announce: Announce | None = None,
        **options: Any,
    ) -> Report:
        """Converts a torch module that you have in hand, and writes the artifact.

        Args:
            module: The module. It stays as it is, in its train or eval mode.
            inputs: The arguments of ``forward``, by name or in order: texts such as
                ``1x3x{h}x{w}``, tensors, pairs of both, or `Input` objects.
            dims: The range of each dim by name: (min, opt, max).
            name: The name of the model; by default the name of its class.
            announce: Called with each step that begins. By default, the steps are printed if stderr
                is a terminal.
            **options: Other fields of `pipeline.Config`, such as ``target`` and ``out``.

        A range that the model does not accept is narrowed, with a warning.

        Returns:
            The report. `Report.narrowed` says which sizes the model does not accept.

        Raises:
            PipelineError: See `pipeline.run`. An `InputError` says how to call.
        """
        from pipeline.convert.driver import run

        if announce is None:
            announce = _printed if sys.stderr.isatty() else silent
        report = run(module_config(module, inputs, dims, name, options), announce)
        if report.narrowed:
            text = (
                f"{report.manifest.name} does not accept every size: {'; '.join(report.narrowed)}"
            )
            warnings.warn(f"{text}. exact=True makes this an error", stacklevel=2)
        return report


def _printed(text: str) -> None:
    print(f"pipeline: {text}", file=sys.stderr, flush=True)


sys.modules[__name__].__class__ = Convert
