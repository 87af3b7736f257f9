"""PyTorch to TensorRT through ONNX: `run` converts a model and leaves an artifact.

import pipeline

report = pipeline.run("raft_small")
print(report.path, report.ok)
"""

from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.dims import Dim
from pipeline.driver import Report, run
from pipeline.errors import (
    ArtifactError,
    BuildError,
    CompareError,
    ConstraintError,
    ExportError,
    InputError,
    PipelineError,
    RewriteError,
    TargetMissing,
)
from pipeline.profiles import Profile
from pipeline.spec import Input, ModelSpec, Output, Padding, Tolerance

__all__ = [
    "Artifact",
    "ArtifactError",
    "BuildError",
    "CompareError",
    "Config",
    "ConstraintError",
    "Dim",
    "ExportError",
    "Input",
    "InputError",
    "ModelSpec",
    "Output",
    "Padding",
    "PipelineError",
    "Profile",
    "Report",
    "RewriteError",
    "TargetMissing",
    "Tolerance",
    "run",
]
