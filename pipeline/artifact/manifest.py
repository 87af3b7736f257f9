"""The description of an artifact: ``manifest.json``, read and written through dataclasses.

The dataclasses are the schema. A JSON object has exactly the fields of its dataclass, so a changed
field needs another `SCHEMA`. Some dataclasses belong to the spec and to the passes. A test compares
all fields with a list, so that every change is noticed.

The file has no NaN or infinity: a number that may be null is null if it is not finite. The last
key, ``manifest_sha256``, is the hash of all other keys and shows an edit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, NoReturn

from pipeline.artifact.meaning import check_meaning
from pipeline.artifact.records import decode, encode, fail
from pipeline.artifact.stored_interface import read_interface, write_interface
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.files import FileInfo
from pipeline.machine.gpu import Capability, parse_capabilities
from pipeline.machine.target import Flavour
from pipeline.rewrite.record import PassRecord
from pipeline.spec.code_file import CodeFile
from pipeline.spec.findings import Note
from pipeline.spec.interface import Interface
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags
from pipeline.spec.recipe import HalfInfo
from pipeline.spec.rules import AppliedRule, merged_dims
from pipeline.spec.tensors import Tolerance
from pipeline.spec.verdicts import Check, Verdict

SCHEMA = 12
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
    """The model's source, and the arguments that made the model.

    `source` is a name in the zoo, ``module:factory`` or a file. `inputs` and `dims` are text, and
    empty if the source declares them. `dtype` is ``float32`` if the user asked to convert the
    module first. `modules` and `packages` are the code that a factory's model was made of; see
    `pipeline.source.imports`.
    """

    source: str
    options: Mapping[str, Option]
    weights: Weights
    libraries: Mapping[str, str]
    inputs: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    dtype: Literal["float32"] | None = None
    modules: Mapping[str, CodeFile] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetInfo:
    """The TensorRT that the result is for.

    `version` is the version that built the plan; None without a plan. `compute_capabilities`
    (``9.0``) are those of the GPUs that the plan is for. It is empty without a plan, or for a
    plan that runs on every GPU of TensorRT-RTX except 7.5.
    """

    name: str
    flavour: Flavour
    version: str | None
    compute_capabilities: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[Capability, ...]:
        """The GPUs that a build for TensorRT-RTX was asked for; none for other targets."""
        rtx = self.flavour == "tensorrt_rtx"
        return parse_capabilities(self.compute_capabilities) if rtx else ()


@dataclass(frozen=True)
class DynamicInfo:
    """The evidence that a dim is dynamic: its axes in the ONNX file, and the sizes that ran."""

    where: str
    ran_at: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The evidence as text."""
        ran = f"; ran at {', '.join(map(str, self.ran_at))}" if self.ran_at else ""
        return f"not fixed in {self.where}{ran}"


@dataclass(frozen=True)
class ExportInfo:
    """The export stage's results.

    `refinements` are the rules that narrowed dims. `dynamic` is the evidence for each dynamic dim.
    `notes` lists wrong statements in a source file.
    """

    opset: int
    exporter: str
    seconds: float
    refinements: tuple[AppliedRule, ...]
    dynamic: Mapping[str, DynamicInfo]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewriteInfo:
    """The passes in order, and the number of nodes before and after."""

    passes: tuple[PassRecord, ...]
    warnings: tuple[str, ...]
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class BuildInfo:
    """The build stage's results.

    Args:
        seconds: The time of the build.
        plan_bytes: The size of the plan.
        validity: The message of the target's runtime about the plan.
        layers: The number of layers in the network.
        warnings: The builder's warnings.
        plugins: The plugins to load before the plan.
        plugin_hashes: The sha256 of each plugin that is a file, by its name in `plugins`. A file
            with other content is not loaded.
        peak_bytes: The peak memory of the process that built the plan.
        optimization_level: The builder's level; None for TensorRT's default.
        timing_cache: How the timing cache was used, as text.
        gpu: The name of the GPU of the build; empty without one.
        half: How a recipe was applied, see `pipeline.spec.recipe`; None without a recipe.
        flags: Where the plan runs, and whether its weights can be replaced.
        refitted_from: The sha256 of the plan whose weights were replaced; empty for a plan with
            the weights of its build.
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
    half: HalfInfo | None = None
    flags: PlanFlags = NO_FLAGS
    refitted_from: str = ""


@dataclass(frozen=True)
class PointInfo:
    """One set of sizes, with a verdict for each output of each pair of runs.

    `left_out` is the reason why it was not compared; None if it was compared.
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
    """All points, including those left out, with the checks and the notes.

    `engine_tolerances` is the measured tolerance of each output of an engine in tf32 or half
    precision, by its name. It is empty if the spec states one.
    `passed` is true if every verdict and every check passes, and no note has a kind that fails.
    """

    memory_limit_bytes: int
    points: tuple[PointInfo, ...]
    notes: tuple[Note, ...] = ()
    checks: tuple[Check, ...] = ()
    engine_tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    passed: bool = field(init=False)

    def __post_init__(self) -> None:
        verdicts = [result for point in self.points for result in point.results]
        good = all(v.passed for v in verdicts) and all(c.passed for c in self.checks)
        object.__setattr__(self, "passed", good and not any(note.fails for note in self.notes))


@dataclass(frozen=True)
class StageInfo:
    """The time and memory of a stage; `peak_bytes` is None if it was not measured."""

    name: str
    seconds: float
    library_seconds: Mapping[str, float]
    peak_bytes: int | None


def now() -> str:
    """The current time in the format of ``created``: UTC, ISO 8601, whole seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole manifest. A stage that was not run yet is None.

    Args:
        interface: The inputs and outputs, their sizes and their tolerances.
        engine_gpu: The name of the GPU on which the engine was compared; empty if it was not.
        reference: The run that all others are compared with: ``torch``, or ``exported`` if the
            source is an ONNX file, or ``reference`` for another ONNX file that the user gave.
        keys: The hash of everything that a stage's result depends on, by the stage's name.
        files: The hash and size of each file, by its name relative to the artifact, with ``/``.
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
            ArtifactError: An output has none.
        """
        try:
            return self.interface.tolerances()
        except InputError as error:
            raise ArtifactError(f"{error}; export the model again") from error

    def engine_tolerances(self) -> dict[str, Tolerance]:
        """The tolerance of every output of the engine, by its name.

        Raises:
            ArtifactError: An output has none.
        """
        try:
            found = self.interface.engine_tolerances(self.precision)
        except InputError as error:
            raise ArtifactError(f"{error}; export the model again") from error
        measured = self.comparison.engine_tolerances if self.comparison is not None else {}
        return {**found, **measured}

    @property
    def flags(self) -> PlanFlags:
        """The flags of the plan; none without a plan."""
        return self.build.flags if self.build is not None else NO_FLAGS

    def loads_in(self, version: str | None) -> bool:
        """True if this version of the target's TensorRT loads the plan.

        NVIDIA's support matrix: "Engines built with the version-compatible flag can run with newer
        TensorRT versions within the same major version."
        """
        built = self.target.version
        if version == built or None in (version, built) or not self.flags.version_compatible:
            return version == built
        here, there = (
            [int(n) for n in re.findall(r"\d+", text or "")[:4]] for text in (version, built)
        )
        return here[:1] == there[:1] and here >= there

    @property
    def merged(self) -> Mapping[str, str]:
        """For each declared dim that the export merged into another one, that dim's name."""
        rules = self.export.refinements if self.export is not None else ()
        return merged_dims(rules, self.interface.dims)

    def to_json(self) -> str:
        """The manifest as the text of ``manifest.json``.

        Raises:
            ArtifactError: A value has another type than its field, or must be finite and is not.
        """
        content = encode(self, {Interface: write_interface})
        _decode(content, "manifest.json")
        return json.dumps({**content, _HASH: _hash(content)}, indent=2, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "manifest.json") -> Manifest:
        """Reads the text that `to_json` wrote; errors begin with `where`.

        Raises:
            ArtifactError: The text is not JSON, has an unknown schema, or was changed after it was
                written. Or a field is missing, unknown or of the wrong type, or its value means
                nothing (`pipeline.artifact.meaning`).
        """
        try:
            content = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{where}: is cut short or not JSON: {error}") from error
        if not isinstance(content, dict):
            fail(where, "", "expected an object")
        schema = content.get("schema")
        if type(schema) is int and schema != SCHEMA:
            fail(where, "", f"schema {schema} is not supported; this version reads {SCHEMA}")
        stated = content.pop(_HASH, None)
        manifest = _decode(content, where)
        if stated is None:
            fail(where, _HASH, "is missing")
        if stated != _hash(content):
            fail(where, "", "was changed after it was written (its hash differs)")
        return manifest


def _decode(content: Any, where: str) -> Manifest:
    manifest: Manifest = decode(content, Manifest, where, "", {Interface: read_interface})
    check_meaning(manifest, where)
    return manifest


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return content
