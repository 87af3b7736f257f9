"""Writes an artifact as a model of a Triton model repository.

    NAME/config.pbtxt     the configuration
    NAME/1/model.plan     the engine, or model.onnx with its external data
    NAME/warmup/          raw inputs of the warm-up requests
    NAME/plugins/         the plugin libraries of the engine
    NAME/pipeline.json    the artifact's name and the hash of its manifest

https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_repository.md
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from pipeline.artifact.artifact import Artifact, check_file
from pipeline.commands.triton.batching import find_batching
from pipeline.commands.triton.config import (
    Backend,
    Config,
    Served,
    engine_shapes,
    make_config,
    narrowed_dtypes,
    onnx_shapes,
)
from pipeline.commands.triton.containers import (
    ONNX_RUNTIME,
    check_release,
    find_release,
    image,
)
from pipeline.compare.problems import only_engine_failed
from pipeline.errors import InputError
from pipeline.graph.external_data import check_models, outside_files
from pipeline.graph.reading import read_onnx
from pipeline.machine.swap_folder import replacing
from pipeline.plugins import PLUGINS
from pipeline.runtime.trust import allowed_plugins, check_given
from pipeline.spec.file_names import MANIFEST, MODEL, PLAN

MARKER = "pipeline.json"
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Choice:
    """What the user chose: None for what is found out.

    Args:
        backend: Triton's backend; ``auto`` for the engine if Triton can load it.
        name: The model's name on the server.
        container: The release of Triton's container.
        plugins: The plugin files that the user trusts.
    """

    backend: Literal["auto", "tensorrt", "onnxruntime"] = "auto"
    name: str | None = None
    container: str | None = None
    plugins: Sequence[str] = ()


@dataclass(frozen=True)
class Written:
    """A model that was written.

    Args:
        model: The folder of the model.
        backend: Triton's backend.
        image: The container image that serves the model.
        tensorrt: The TensorRT that built the engine; None for ONNX Runtime.
        compute_capabilities: The kinds of GPU that the engine is for; none for ONNX Runtime.
        max_batch_size: The largest batch; 0 if requests run alone.
        why_no_batches: The reason for a `max_batch_size` of 0; empty for others.
        warm_up: The labels of the warm-up requests.
        compared: Whether the comparison of what is served has passed.
        engine_failed: Whether the engine, which is not served, failed its comparison.
        command: The command that starts the server.
    """

    model: str
    backend: Backend
    image: str
    tensorrt: str | None
    compute_capabilities: tuple[str, ...]
    max_batch_size: int
    why_no_batches: str
    warm_up: tuple[str, ...]
    compared: bool
    engine_failed: bool
    command: str

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps(asdict(self), indent=2)


def write_model(artifact: Artifact, repository: Path, choice: Choice) -> Written:
    """Writes an artifact as a model of a repository.

    A model of the same name is replaced if `write_model` wrote it. Other models stay as they are.

    Raises:
        InputError: What would be served failed its comparison. Or Triton can't load the engine, or
            ONNX Runtime the ONNX file. Or the model's folder belongs to somebody else.
    """
    manifest = artifact.manifest
    name = choice.name or manifest.name
    place = _place(repository, name)
    backend = _backend(artifact, choice)
    engine_failed = _check_comparison(artifact, backend)
    plugins = _plugins(artifact, choice) if backend == "tensorrt" else ()
    engine = manifest.target if backend == "tensorrt" else None
    if engine is None:
        release = check_release(choice.container or ONNX_RUNTIME)
    else:
        release = find_release(engine.version or "unknown", choice.container)
    batching = find_batching(manifest, in_profiles=engine is not None)
    shapes = engine_shapes(manifest.interface) if engine else onnx_shapes(artifact.model)
    served = Served(name, backend, batching, shapes, narrowed_dtypes(manifest, backend))
    config = make_config(manifest, served)
    with replacing(place, keep=False, marker=MARKER) as staging:
        _fill(staging, artifact, config, backend, plugins)
    return Written(
        model=str(place),
        backend=backend,
        image=image(release),
        tensorrt=engine.version if engine else None,
        compute_capabilities=engine.compute_capabilities if engine else (),
        max_batch_size=batching.largest,
        why_no_batches=batching.why,
        warm_up=config.warm_up,
        compared=manifest.comparison is not None and (engine is None or manifest.engine_compared),
        engine_failed=engine_failed,
        command=_command(repository, name, release, plugins, gpu=engine is not None),
    )


def _place(repository: Path, name: str) -> Path:
    """The model's folder. Raises `InputError` if it is somebody else's, or no repository's."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name {name!r}: Triton names the model's folder so. Pass a --name that begins with a "
            "letter or a digit, and has no others but '.', '_' and '-'"
        )
    if (repository / MANIFEST).is_file():
        raise InputError(
            f"{repository}: is an artifact, not a model repository; give another place"
        )
    place = repository / name
    if place.is_dir() and any(place.iterdir()) and not (place / MARKER).is_file():
        raise InputError(
            f"{place}: is a model that pipeline did not write, so it stays as it is. Pass --name, "
            "or another repository"
        )
    return place


def _backend(artifact: Artifact, choice: Choice) -> Backend:
    """The backend. Raises `InputError` if it can't load what the artifact has."""
    manifest = artifact.manifest
    rtx = manifest.target.flavour == "tensorrt_rtx"
    has_plan = PLAN in manifest.files
    if choice.backend == "tensorrt" and rtx:
        raise InputError(
            f"{artifact.path}: its engine is for TensorRT-RTX, which no backend of Triton loads. "
            "Pass --backend onnxruntime, or convert for another target"
        )
    if choice.backend == "tensorrt" or (choice.backend == "auto" and has_plan and not rtx):
        artifact.plan  # noqa: B018  # says which stage is missing
        return "tensorrt"
    check_models(artifact.model.parent, [MODEL], manifest.interface)
    return "onnxruntime"


def _check_comparison(artifact: Artifact, backend: Backend) -> bool:
    """Raises `InputError` if what is served failed its comparison, as a store refuses it.

    Returns:
        True if the engine failed, and model.onnx is served, which passed.
    """
    comparison, where = artifact.manifest.comparison, artifact.path
    if comparison is None or comparison.passed:
        return False
    details = f"`pipeline inspect {quote(str(where))}` says what differs"
    if not only_engine_failed(comparison):
        raise InputError(
            f"{where}: its comparison failed, so it is not served. {details}. Convert again"
        )
    if backend == "tensorrt":
        raise InputError(
            f"{where}: its engine failed its comparison, so it is not served. {details}. Build it "
            "again with another --precision, or serve model.onnx with --backend onnxruntime"
        )
    return True


def _plugins(artifact: Artifact, choice: Choice) -> tuple[Path, ...]:
    """The engine's plugin libraries. Raises `InputError` if Triton can't load one."""
    check_given(artifact.manifest, choice.plugins, str(artifact.path))
    needed = allowed_plugins(artifact.manifest, choice.plugins, str(artifact.path))
    for name in needed:
        if name in PLUGINS or name.endswith(".py"):
            raise InputError(
                f"{artifact.path}: its engine needs the plugin {name}, which is Python code. "
                "Triton loads only plugins in shared libraries"
            )
    return tuple(map(Path, needed))


def _fill(
    folder: Path, artifact: Artifact, config: Config, backend: Backend, plugins: Sequence[Path]
) -> None:
    """Writes the files of a model into its folder."""
    version, warm_up, libraries = (folder / name for name in ("1", "warmup", "plugins"))
    if backend == "tensorrt":
        _copy(artifact, PLAN, version / "model.plan")
    else:
        _copy(artifact, MODEL, version / MODEL)
        for name in outside_files(artifact.model, read_onnx(artifact.model)):
            _copy(artifact, name, version / name)
    for name, content in config.files.items():
        warm_up.mkdir(exist_ok=True)
        (warm_up / name).write_bytes(content)
    for library in plugins:
        libraries.mkdir(exist_ok=True)
        shutil.copyfile(library, libraries / library.name)
    (folder / "config.pbtxt").write_text(config.text, encoding="utf-8")
    digest = hashlib.sha256((artifact.path / MANIFEST).read_bytes()).hexdigest()
    facts = {"artifact": artifact.manifest.name, "manifest_sha256": digest}
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _copy(artifact: Artifact, name: str, place: Path) -> None:
    """Copies a file of the artifact, and checks the copy: another run may replace the artifact."""
    if name not in artifact.manifest.files:
        raise InputError(f"{artifact.path}: the manifest does not list {name}")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(artifact.path / name, place)
    check_file(place, artifact.manifest.files[name], "; run the command again")


def _command(
    repository: Path, name: str, release: str, plugins: Sequence[Path], *, gpu: bool
) -> str:
    """The command that starts a server with the repository."""
    words = ["docker run --rm", *(["--gpus=all"] if gpu else []), "-p 8000:8000 -p 8001:8001"]
    words += [f'-v "{repository.resolve()}:/models"', image(release)]
    words.append("tritonserver --model-repository=/models")
    if plugins:
        files = ";".join(f"/models/{name}/plugins/{library.name}" for library in plugins)
        words.append(f'--backend-config=tensorrt,plugins="{files}"')
    return " ".join(words)
