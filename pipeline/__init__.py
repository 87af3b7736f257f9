"""Converts PyTorch models to TensorRT engines: `run` writes an artifact, `load` runs its engine.

import pipeline

report = pipeline.run("raft_small")
print(report.path, report.ok)

with pipeline.load(report.path) as engine:
    flow = engine(image1=a, image2=b)["flow"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.artifact.artifact import Artifact
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
from pipeline.runtime.engine import Engine, load
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.padding import Padding
from pipeline.spec.profiles import Profile

if TYPE_CHECKING:
    from pipeline.convert.driver import Report, run
    from pipeline.spec.config import Config

# Imported on first use: converting needs onnx, and running an engine must not need onnx.
_CONVERTING = {"Config": "spec.config", "Report": "convert.driver", "run": "convert.driver"}

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
