"""PyTorch to TensorRT through ONNX: `run` converts a model and leaves an artifact, `load` runs it.

import pipeline

report = pipeline.run("raft_small")
print(report.path, report.ok)

with pipeline.load(report.path) as engine:
    flow = engine(image1=a, image2=b)["flow"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.artifact import Artifact
from pipeline.dims import Dim
from pipeline.errors import (
    ArtifactError,
    BuildError,
    CompareError,
    ConstraintError,
    EngineError,
    ExportError,
    InputError,
    OutOfMemory,
    PipelineError,
    RewriteError,
    TargetMissing,
)
from pipeline.profiles import Profile
from pipeline.runtime import Engine, load
from pipeline.spec import Input, ModelSpec, Output, Padding, Tolerance

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.driver import Report, run

# What converts needs onnx, what runs an engine does not: these come when they are asked for.
_CONVERTING = {"Config": "config", "Report": "driver", "run": "driver"}

__all__ = [
    "Artifact",
    "ArtifactError",
    "BuildError",
    "CompareError",
    "Config",
    "ConstraintError",
    "Dim",
    "Engine",
    "EngineError",
    "ExportError",
    "Input",
    "InputError",
    "ModelSpec",
    "OutOfMemory",
    "Output",
    "Padding",
    "PipelineError",
    "Profile",
    "Report",
    "RewriteError",
    "TargetMissing",
    "Tolerance",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _CONVERTING:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeline.{_CONVERTING[name]}"), name)
