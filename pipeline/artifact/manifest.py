"""What an artifact says of itself: ``manifest.json``, read and written through dataclasses.

The dataclasses are the schema: a JSON object holds the fields of its dataclass, no fewer and no
more, so a change to one of them needs another `SCHEMA`. Some of them are classes of the spec and
of the passes. A test holds the fields of all to a list, so no change goes unnoticed.

A number that may be null is null where it is not finite; NaN and infinity never stand in the
file. The last key, ``manifest_sha256``, is the hash of all others, so that an edit shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NoReturn

from pipeline.artifact.records import decode, encode, fail
from pipeline.artifact.stored_interface import read_interface, write_interface
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.files import FileInfo
from pipeline.machine.target import Flavour
from pipeline.rewrite.record import PassRecord
from pipeline.spec.findings import Note
from pipeline.spec.interface import Interface
from pipeline.spec.rules import AppliedRule
from pipeline.spec.tensors import Tolerance
from pipeline.spec.verdicts import Check, Verdict

SCHEMA = 5
_HASH = "manifest_sha256"

Option = int | float | str | bool


@dataclass(frozen=True)
class Weights:
    """The weights' file name and hash; both are None for random weights made from `seed`."""

    file: str | None
    sha256: str | None
    seed: int | None


@dataclass(frozen=True)
class ModelInfo:
    """The model: its name in the zoo, ``module:factory`` or a file, and what it was made with;
    `inputs` and `dims` as text where the source declares none itself.
    """

    source: str
    options: Mapping[str, Option]
    weights: Weights
    libraries: Mapping[str, str]
    inputs: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetInfo:
    """The TensorRT that the result is for; `version` is the one that built it, if any did.

    `compute_capability` is that of the GPU that the plan was built on and runs on (``9.0``); None
    where there is no plan, or a portable one (TensorRT-RTX).
    """

    name: str
    flavour: Flavour
    version: str | None
    compute_capability: str | None = None


@dataclass(frozen=True)
class DynamicInfo:
    """How a dim was shown to be dynamic: the axis that has it in the ONNX file, and the sizes that
    it ran at."""

    where: str
    ran_at: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """In words."""
        ran = f"; ran at {', '.join(map(str, self.ran_at))}" if self.ran_at else ""
        return f"free in {self.where}{ran}"


@dataclass(frozen=True)
class ExportInfo:
    """`refinements`: the rules that narrowed dims; `dynamic`: dim to how it was shown to be
    dynamic; `notes`: what a source file states otherwise than it is.
    """

    opset: int
    exporter: str
    seconds: float
    refinements: tuple[AppliedRule, ...]
    dynamic: Mapping[str, DynamicInfo]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewriteInfo:
    """The passes in their order, and the graph's size before and after."""

    passes: tuple[PassRecord, ...]
    warnings: tuple[str, ...]
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class BuildInfo:
    """`validity` is what the target's runtime says of the plan; `layers`, the network's size;
    `plugins`, what has to be loaded before the plan is; `plugin_hashes`, the sha256 of those that
    are files, by the same names (a file of another content is not loaded); `peak_bytes` is of the
    process that built; `optimization_level`, the builder's, None where it was left to TensorRT;
    `timing_cache`, in words; `gpu`, the name of the GPU that it was built on, empty without one.
    """

    seconds: float
    plan_bytes: int
    validity: str
    layers: int
    warnings: tuple[str, ...]
    plugins: tuple[str, ...] = ()
    peak_bytes: int | None = None
    optimization_level: int | None = None
    timing_cache: str = "none"
    gpu: str = ""
    plugin_hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PointInfo:
    """One set of sizes, with a verdict for each output of each pair of runs.

    `left_out` is why it was not compared; None where it was.
    """

    label: str
    sizes: Mapping[str, int]
    estimate_bytes: int
    results: tuple[Verdict, ...] = ()
    left_out: Note | None = None

    @property
    def compared(self) -> bool:
        """True if runs were compared at these sizes."""
        return self.left_out is None


@dataclass(frozen=True)
class ComparisonInfo:
    """All points, those left out included, the checks, and the notes on all of them.

    `passed` follows from the kinds of the others: every verdict and every check passes, and no
    note is of a kind that fails.
    """

    memory_limit_bytes: int
    points: tuple[PointInfo, ...]
    notes: tuple[Note, ...] = ()
    checks: tuple[Check, ...] = ()
    passed: bool = field(init=False)

    def __post_init__(self) -> None:
        verdicts = [result for point in self.points for result in point.results]
        good = all(v.passed for v in verdicts) and all(c.passed for c in self.checks)
        object.__setattr__(self, "passed", good and not any(note.fails for note in self.notes))


@dataclass(frozen=True)
class StageInfo:
    """What a stage took; `peak_bytes` is None where it was not measured."""

    name: str
    seconds: float
    library_seconds: Mapping[str, float]
    peak_bytes: int | None


def now() -> str:
    """This moment, as ``created`` has it: UTC, ISO 8601, whole seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole manifest. A stage that was not run yet is None.

    Args:
        interface: what goes in and what comes out, at which sizes, and how exact it has to be.
        engine_gpu: name of the GPU that the engine was compared on; empty where it was not.
        reference: the run that everything is held against: ``torch``, or ``exported`` where an
            ONNX file is the source.
        keys: stage name to the hash of everything that its result depends on.
        files: name relative to the artifact, with ``/``, to hash and size.
    """

    schema: int = SCHEMA
    name: str
    created: str
    model: ModelInfo
    interface: Interface
    reference: str = "torch"
    target: TargetInfo
    precision: str
    export: ExportInfo | None = None
    rewrite: RewriteInfo | None = None
    build: BuildInfo | None = None
    comparison: ComparisonInfo | None = None
    engine_compared: bool = False
    engine_compared_why: str = "not compared yet"
    engine_gpu: str = ""
    stages: tuple[StageInfo, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)

    def tolerances(self) -> dict[str, Tolerance]:
        """The tolerance of every output by its name.

        Raises:
            ArtifactError: an output has none.
        """
        try:
            return self.interface.tolerances()
        except InputError as error:
            raise ArtifactError(f"{error}: export it again") from error

    def engine_tolerances(self) -> dict[str, Tolerance]:
        """The tolerance of every output of the engine, by its name.

        Raises:
            ArtifactError: an output has none.
        """
        try:
            return self.interface.engine_tolerances(self.precision)
        except InputError as error:
            raise ArtifactError(f"{error}: export it again") from error

    def to_json(self) -> str:
        """The manifest as the text of ``manifest.json``.

        Raises:
            ArtifactError: a value is not of its field's type, or not finite where that must be.
        """
        content = encode(self, {Interface: write_interface})
        _decode(content, "manifest.json")
        return json.dumps({**content, _HASH: _hash(content)}, indent=2, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "manifest.json") -> Manifest:
        """Reads what `to_json` wrote; errors begin with `where`.

        Raises:
            ArtifactError: not JSON, of an unknown schema, a field that is missing, unknown or
                of the wrong type, or changed since it was written.
        """
        try:
            content = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{where}: is cut short or no JSON: {error}") from error
        if not isinstance(content, dict):
            fail(where, "", "expected an object")
        schema = content.get("schema")
        if type(schema) is int and schema != SCHEMA:
            fail(where, "", f"schema {schema} is unknown here; this version reads {SCHEMA}")
        stated = content.pop(_HASH, None)
        manifest = _decode(content, where)
        if stated is None:
            fail(where, _HASH, "is missing")
        if stated != _hash(content):
            fail(where, "", "was changed after it was written (its hash is another)")
        return manifest


def _decode(content: Any, where: str) -> Manifest:
    manifest: Manifest = decode(content, Manifest, where, "", {Interface: read_interface})
    return manifest


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return content
