"""Builds engines with TensorRT: `pipeline.build.build`. The package itself builds an artifact's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.spec.given import check_names

_OPTIONS = (
    "profiles", "precision", "recipe", "target", "gpus", "plugins", "effort", "flags",
    "announce",
)  # fmt: skip


class Build(ModuleType):
    """The package `pipeline.build`, which is also the function ``pipeline.build(...)``."""

    def __call__(self, artifact: Path | str, **options: Any) -> Any:
        """Builds the engine of an artifact again, for this machine's TensorRT and GPU.

        Args:
            artifact: The artifact's folder.
            **options: ``profiles`` (texts such as ``h=135:440:2160``), ``precision``, ``recipe`` (a
                file), ``plugins``, ``effort`` (`pipeline.spec.effort.Effort`) and ``flags``
                (`pipeline.PlanFlags`). By default they are the artifact's. With ``target`` or
                ``gpus`` (texts such as ``sm86``), the new engine gets its own folder in the
                artifact's ``engines``.

        Returns:
            A `pipeline.Report`. The comparison with the engine comes with `pipeline.verify`.

        Raises:
            PipelineError: See `pipeline.errors`. The old engine stays.
        """
        check_names(options, _OPTIONS, "pipeline.build")
        # by its name, like the attributes of `pipeline`: this room is below `convert`
        driver = importlib.import_module("pipeline.convert.driver")
        return driver.run_build(artifact, **options)


sys.modules[__name__].__class__ = Build
