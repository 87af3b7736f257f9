"""The cache key of each stage: a hash of everything that changes the stage's result.

A stage's key includes the key of the stage before. Keys change with pipeline's own code, the spec's
file, options, weights and library versions. They also change with the target and its version, the
GPU kind, the operating system, the CPU's architecture, profiles, precision, tolerances and sizes.

Limits: a spec object without a `key` is new on every run. A user-supplied pass or plugin counts by
its file, without its imports. Files that a factory reads itself do not count: use `force`. What it
imports while it runs or from other folders is checked beside the keys: `pipeline.source.imports`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path

from pipeline.artifact.manifest import Weights
from pipeline.convert.options import StageOptions
from pipeline.errors import InputError
from pipeline.machine.files import hash_file
from pipeline.machine.gpu import find_gpu
from pipeline.machine.libraries import versions
from pipeline.machine.target import Target, installed_version
from pipeline.plugins.loading import plugin_file
from pipeline.source.hub import hub_folder
from pipeline.source.onnx.spec import source_files
from pipeline.source.zoo import source_file
from pipeline.spec.config import Config
from pipeline.spec.expressions import DimExpr
from pipeline.spec.model import ModelSpec, holds_weights
from pipeline.spec.profiles import Profile
from pipeline.store.entry import STAGES, Parts

EXPORT, REWRITE, BUILD, COMPARE = STAGES
_PACKAGES = {
    "export": ("torch", "onnx", "onnxscript", "onnx-ir"),
    "rewrite": ("onnx", "onnx-graphsurgeon", "onnx-ir", "onnxruntime"),
    "build": ("polygraphy",),
    "compare": ("torch", "onnxruntime", "polygraphy", "numpy"),
}
_PACKAGE = Path(__file__).parents[1]


# Fields that do not change a stage's result, or count in another part of a key.
EXEMPT: Mapping[tuple[str, str], str] = {
    ("ExportOptions", "weights"): "its content counts, see weights_info",
    ("ExportOptions", "seed"): "the sizes that a model accepts do not depend on values",
    ("Effort", "timing_cache"): "it only makes a build faster",
    ("BuildOptions", "time_limit"): "a build that takes longer fails",
    ("ModelSpec", "build"): "the file that defines it counts, see _source",
    ("ModelSpec", "onnx"): "its content counts, see _source",
    ("ModelSpec", "reference"): "its content counts, see _source",
    ("ModelSpec", "key"): "see _source",
    ("ModelSpec", "arguments"): "counts as text, see stage_keys",
    ("ModelSpec", "libraries"): "their versions count",
    ("ModelSpec", "seed"): "see weights_info",
    ("ModelSpec", "profiles"): "counts in the key of the build",
    ("ModelSpec", "tolerance"): "counts in the key of the comparison",
    ("ModelSpec", "engine_tolerance"): "counts in the key of the comparison",
    ("Output", "tolerance"): "counts in the key of the comparison",
    ("Dim", "defaulted"): "the range counts, not who chose the range",
}


def stage_keys(
    config: Config, spec: ModelSpec, options: StageOptions, weights: Weights
) -> dict[str, str]:
    """Returns the key of every stage, in order."""
    return keys_of(stage_parts(config, spec, options, weights))


def keys_of(parts: Parts) -> dict[str, str]:
    """Returns the key of every stage from its parts. It includes the key of the stage before."""
    keys: dict[str, str] = {}
    before = ""
    for stage in STAGES:
        text = json.dumps([before, parts[stage]], sort_keys=True)
        keys[stage] = before = hashlib.sha256(text.encode()).hexdigest()
    return keys


def stage_parts(
    config: Config, spec: ModelSpec, options: StageOptions, weights: Weights
) -> dict[str, dict[str, object]]:
    """Returns what the key of every stage is made of, in order, as JSON types by name."""
    tolerances = [spec.tolerance, *(output.tolerance for output in spec.outputs)]
    held_to = {
        "tolerance": content_of(tolerances), "engine tolerance": content_of(spec.engine_tolerance),
    }  # fmt: skip
    # the search for a recipe is never quick
    sizes = replace(options.compare, quick=False)
    searched = [held_to, content_of(sizes), versions(_PACKAGES["compare"])]
    more: dict[str, dict[str, object]] = {
        "export": {
            "python": platform.python_version(),
            "pipeline's code": pipeline_hash(),
            "source": _source(config, spec),
            "spec": content_of(spec),
            # the text tells a tuple from a list, and one dataclass from another
            "arguments": repr(spec.arguments),
            "weights": asdict(weights),
            "libraries": versions(spec.libraries),
            # a measured tolerance is measured in the export
            "measured": [tolerance is None for tolerance in tolerances],
        },
        "rewrite": {},
        "build": {
            "operating system": platform.system(),
            "CPU": platform.machine(),
            "TensorRT": installed_version(options.build.target),
            "compute capability": _built_for(options.build.target),
            "profile": _profiles(spec.profiles),
            "searched": searched if options.build.auto else None,
        },
        "compare": {**held_to},
    }
    return {
        stage: {
            **more[stage],
            "options": content_of(options.by_stage[stage]),
            "packages": versions(_PACKAGES[stage]),
        }
        for stage in STAGES
    }


def _profiles(profiles: Sequence[Profile]) -> object:
    texts = [{name: ":".join(map(str, r)) for name, r in p.ranges.items()} for p in profiles]
    return [{"name": p.name, "ranges": text} for p, text in zip(profiles, texts, strict=True)]


def is_new_every_time(config: Config, spec: ModelSpec) -> bool:
    """True for a spec object without a key: its keys never equal those of another run."""
    return spec.onnx is None and not isinstance(config.model, str) and spec.key is None


def content_of(value: object) -> object:
    """Returns the part of an object that counts for a key, as JSON types.

    A dataclass counts with all fields that are not in `EXEMPT`. An expression counts with its dims.
    A path or a plugin file counts by its content. A target counts by its name.
    """
    if isinstance(value, Target):
        return value.name
    if isinstance(value, Path):
        return _file_hash(value)
    if isinstance(value, DimExpr):
        value = value.text, value.dims
    if is_dataclass(value):
        kind = type(value).__name__
        return {
            item.name: _plugins(getattr(value, item.name))
            if item.name == "plugins"
            else content_of(getattr(value, item.name))
            for item in fields(value)
            if (kind, item.name) not in EXEMPT
        }
    if isinstance(value, Mapping):
        return {str(key): content_of(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [content_of(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def _built_for(target: Target) -> object:
    """Returns the compute capability of this machine's GPU; None for a portable plan."""
    gpu = find_gpu()
    return None if target.flavour == "tensorrt_rtx" or isinstance(gpu, str) else gpu.capability


def _plugins(names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Returns each plugin's name, with the hash of its file if it is a file."""
    files = {name: plugin_file(name) for name in names}
    return [(n, _file_hash(f) if f is not None and f.is_file() else None) for n, f in files.items()]


def _source(config: Config, spec: ModelSpec) -> object:
    """Returns a value that changes when `ModelSpec.build` changes.

    Python cannot compare a function's closure or the files that the function reads. So a spec
    object without a key never equals an earlier spec object.
    """
    if spec.onnx is not None:
        other = source_files(spec.reference) if spec.reference is not None else []
        files = {"onnx": source_files(spec.onnx), "reference": other}
        return {name: [_file_hash(file) for file in found] for name, found in files.items()}
    if is_new_every_time(config, spec):
        return uuid.uuid4().hex
    return {"key": spec.key, "file": _file_hash(source_file(spec))}


@cache
def pipeline_hash() -> str:
    """Returns the hash of pipeline's own files, with its passes, plugins and models."""
    digest = hashlib.sha256()
    for folder in (_PACKAGE, *(_PACKAGE / name for name in ("passes", "plugins", "models"))):
        files = (path for end in ("*.py", "*.cu") for path in folder.resolve().rglob(end))
        for path in sorted(files):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def weights_info(config: Config, spec: ModelSpec) -> Weights:
    """Returns the origin of the weights, for the manifest.

    Raises:
        InputError: The file cannot be read.
    """
    path = config.weights_path
    if path is None and holds_weights(config.model):
        return Weights(Path(str(config.model)).name, _file_hash(Path(str(config.model))), None)
    folder = hub_folder(str(config.model)) if path is None else None
    if folder is not None:
        return Weights(folder.resolve().name, _folder_hash(folder), None)
    if path is None:
        return Weights(None, None, spec.seed)
    if path.is_dir():
        return Weights(path.resolve().name, _folder_hash(path), None)
    if not path.is_file():
        raise InputError(f"weights {path}: no such file")
    return Weights(path.name, _file_hash(path), None)


def _folder_hash(path: Path) -> str:
    """Returns the hash of all names and contents of files in a checkpoint's folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise InputError(f"weights {path}: the folder is empty. Pass a checkpoint's folder")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path).as_posix()}\0{_file_hash(file)}\0".encode())
    return digest.hexdigest()


def _file_hash(path: Path | None) -> str | None:
    try:
        return hash_file(path).sha256 if path is not None else None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from error
