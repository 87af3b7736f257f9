"""Converts PyTorch models to TensorRT engines: `run` writes an artifact, `load` runs its engine.

import pipeline

report = pipeline.run("raft_small")
print(report.path, report.ok)

report = pipeline.convert(module, {"x": "1x3x{h}x{w}"}, {"h": (64, 128, 512), "w": (64, 512)})

with pipeline.load(report.path) as engine:
    flow = engine(image1=a, image2=b)["flow"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    StoreError,
    TargetMissing,
)

if TYPE_CHECKING:
    from pipeline.artifact.artifact import Artifact
    from pipeline.build import Build
    from pipeline.commands.check.module import check
    from pipeline.convert import Convert
    from pipeline.convert.driver import run, verify
    from pipeline.convert.refit import refit
    from pipeline.convert.report import Report
    from pipeline.runtime.engine import Engine, load
    from pipeline.runtime.exporters import opentelemetry_metrics, prometheus_collector
    from pipeline.spec.config import Config
    from pipeline.spec.dims import Dim
    from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
    from pipeline.spec.padding import Padding
    from pipeline.spec.plan_flags import PlanFlags
    from pipeline.spec.profiles import Profile

    build: Build
    convert: Convert

# Imported on first use: converting needs onnx, and running an engine must not need onnx.
_MODULES = {
    "Artifact": "artifact.artifact",
    "Config": "spec.config",
    "Dim": "spec.dims",
    "Engine": "runtime.engine",
    "Input": "spec.model",
    "ModelSpec": "spec.model",
    "Output": "spec.model",
    "Padding": "spec.padding",
    "PlanFlags": "spec.plan_flags",
    "Profile": "spec.profiles",
    "Report": "convert.report",
    "Tolerance": "spec.model",
    "check": "commands.check.module",
    "load": "runtime.engine",
    "opentelemetry_metrics": "runtime.exporters",
    "prometheus_collector": "runtime.exporters",
    "refit": "convert.refit",
    "run": "convert.driver",
    "verify": "convert.driver",
}

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
    "PlanFlags",
    "Profile",
    "Report",
    "RewriteError",
    "StoreError",
    "TargetMissing",
    "Tolerance",
    "build",
    "check",
    "convert",
    "load",
    "opentelemetry_metrics",
    "prometheus_collector",
    "refit",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("build", "convert"):  # packages that can be called
        return importlib.import_module(f"pipeline.{name}")
    if name == "__version__":
        libraries = importlib.import_module("pipeline.machine.libraries")
        found = libraries.versions(("trt-pipeline",))
        return found.get("trt-pipeline", "unknown")  # a folder on the path, and not installed
    if name not in _MODULES:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pipeline.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
