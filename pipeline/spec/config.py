"""What to convert and how. Frozen, so that a run is what its Config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import InputError
from pipeline.machine.target import DEFAULT_TARGET
from pipeline.spec.effort import DEFAULT_EFFORT, Effort
from pipeline.spec.model import ModelSpec
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Precision, Tolerance

Option = int | float | str | bool


@dataclass(frozen=True)
class Config:
    """One conversion.

    These fields change the artifact and feed its keys: `model`, `options`, `weights`, `target`,
    `profiles`, `precision`, `shapes`, `seed`, `passes`, `skip`, `plugins`, `inputs`, `dims`,
    `ranges`, `tolerance`, `engine_tolerance`, the level of `effort`, `exact`, and
    `memory_limit` where it is given. `out` and `force` don't.

    Args:
        model: a model's name, a spec, or a source (see `pipeline.source.find`):
            ``package.module:factory``, ``file.py:factory``, a ``.pt2`` or an ``.onnx`` file.
        out: the artifact's folder; ``artifacts/<name>`` by default.
        options: arguments of the model's factory.
        weights: ``.pth``, ``.pt`` or ``.safetensors``, or a checkpoint's folder where the model
            takes one; without it seeded random weights.
        target: a name out of `pipeline.machine.target.TARGETS`.
        profiles: in place of the spec's own; as objects or as text (``h=135:440:2160``).
        precision: ``fp32``, ``tf32``, or ``fp16``.
        shapes: further sizes to compare at, as text (``h=441,w=1023``).
        memory_limit: bytes that one run of the comparison may take by its estimate; by default
            half of the free memory, at most 6 GiB.
        seed: for the random inputs of the comparison.
        passes: Python files with a rewrite pass of one's own each (`pipeline.rewrite.choose`).
        skip: names of passes not to run though the target needs them.
        plugins: what TensorRT shall load: names out of `pipeline.plugins.PLUGINS`, shared
            libraries, or Python files (`pipeline.plugins.loading`).
        force: convert even if nothing changed, and replace what was made from another source.
        inputs, dims: of a source that declares none, as text (`pipeline.spec.text`).
        tolerance: of such a source; measured where it is left out (`pipeline.export.tolerance`).
        engine_tolerance: of an engine in this `precision`, in place of the spec's.
        ranges: of the random values that inputs are verified with, as text: ``ids=0..1000``.
        effort: how hard the builder tries, and a file that its timings are shared through.
        exact: fail where such a source does not take every size of `dims`, and say so; without
            it the dims are narrowed to what it takes.
    """

    model: str | ModelSpec
    out: Path | str | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    weights: Path | str | None = None
    target: str = DEFAULT_TARGET
    profiles: tuple[Profile | str, ...] = ()
    precision: Precision = "fp32"
    shapes: tuple[str, ...] = ()
    memory_limit: int | None = None
    seed: int = 0
    passes: tuple[Path | str, ...] = ()
    skip: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    force: bool = False
    inputs: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    tolerance: Tolerance | None = None
    engine_tolerance: Tolerance | None = None
    ranges: tuple[str, ...] = ()
    effort: Effort = DEFAULT_EFFORT
    exact: bool = False

    def __post_init__(self) -> None:
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise InputError(f"memory limit {self.memory_limit}: must be positive")
        for name in ("profiles", "shapes", "passes", "skip", "plugins", "inputs", "dims", "ranges"):
            if isinstance(getattr(self, name), (str, Path)):
                raise InputError(f"{name}={str(getattr(self, name))!r}: give a tuple of them")
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: can't be negative")

    @property
    def weights_path(self) -> Path | None:
        return None if self.weights is None else Path(self.weights)

    def place(self, spec: ModelSpec) -> Path:
        """The artifact's folder."""
        return Path("artifacts") / spec.name if self.out is None else Path(self.out)

    def parsed_profiles(self) -> tuple[Profile, ...]:
        """The profiles as objects; those given as text are called after their place."""
        return tuple(
            p if isinstance(p, Profile) else Profile.parse(p, f"profile{n}")
            for n, p in enumerate(self.profiles)
        )
