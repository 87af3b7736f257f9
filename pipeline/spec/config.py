"""What to convert and how. A Config is frozen, so it can't change during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import InputError
from pipeline.machine.target import DEFAULT_TARGET
from pipeline.spec.effort import DEFAULT_EFFORT, Effort
from pipeline.spec.given import check_kind, check_texts, named_fields
from pipeline.spec.model import ModelSpec
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags
from pipeline.spec.precision import FOR_AUTO, Asked
from pipeline.spec.profiles import Profile
from pipeline.spec.recipe import Recipe, read_recipe
from pipeline.spec.tensors import Precision, Tolerance, check_tolerance

Option = int | float | str | bool

# the fields that are tuples of texts, with an example of each
_TEXTS = {
    "profiles": "b=1:4:8",
    "shapes": "b=3",
    "passes": "my_pass.py",
    "skip": "PASS",
    "plugins": "PLUGIN",
    "gpus": "sm86",
    "inputs": "x:{b}x3",
    "dims": "b=1:4:8",
    "ranges": "ids=0..1000",
    "rules": "h*w <= 1000",
    "state": "cache",
    "output_names": "scores",
}
_FILES = {
    "out": "artifacts/net", "weights": "net.pth", "recipe": "recipe.json", "reference": "net.onnx",
    "store": "/shared/store",
}  # fmt: skip
_OTHERS: Mapping[str, tuple[type, ...]] = {
    "profiles": (Profile,),
    "passes": (Path,),
    "plugins": (Path,),
}


@named_fields
@dataclass(frozen=True)
class Config:
    """One conversion.

    These fields change the artifact and feed its keys: `model`, `options`, `weights`, `target`,
    `profiles`, `precision`, `recipe`, `gpus`, `shapes`, `seed`, `quick`, `passes`, `skip`,
    `plugins`, `inputs`, `dims`, `ranges`, `rules`, `values`, `output_names`, `tolerance`,
    `output_tolerances`, `reference`, `engine_tolerance`, the level of `effort`, `exact`,
    `allow_narrow`, `search_seconds`, `state`, `dtype`, `flags`, and `memory_limit` if you set it.
    `out`, `force`, `trust` and `store` do not.

    Args:
        model: A model's name, a spec, or a source (see `pipeline.source.find`):
            ``package.module:factory``, ``file.py:factory``, ``hf:NAME``, ``timm/NAME``, a ``.pt2``
            or an ``.onnx`` file.
        out: The artifact's folder; ``artifacts/<name>`` by default.
        options: Arguments of the model's factory.
        weights: A ``.pth``, ``.pt`` or ``.safetensors`` file, or a checkpoint's folder if the model
            accepts one. Without it the weights are random, from a seed.
        target: A name in `pipeline.machine.target.TARGETS`.
        profiles: Profiles in place of the spec's, as objects or as text (``h=135:440:2160``).
        precision: ``fp32``, ``tf32``, ``fp16`` or ``bf16``; ``auto`` for fp16 with a recipe that a
            search finds (`pipeline.compare.half_search`).
        recipe: A recipe's file (`pipeline.spec.recipe`). It states the precision, in place of
            `precision`.
        gpus: The kinds of GPU that the engine is for, as text (``sm86``). Only TensorRT-RTX can
            choose; by default its engine runs on every GPU that it supports except 7.5.
        shapes: More sizes to compare at, as text (``h=441,w=1023``).
        memory_limit: The largest estimated memory of one run in the comparison, in bytes. By
            default half of the free memory, at most 6 GiB.
        seed: The seed of the comparison's random inputs.
        passes: Python files with one user-supplied rewrite pass each (`pipeline.rewrite.choose`).
        skip: Names of passes to leave out although the target needs them.
        plugins: The plugins that TensorRT loads: names in `pipeline.plugins.PLUGINS`, shared
            libraries, or Python files (`pipeline.plugins.loading`).
        force: Whether to convert even if nothing changed, and to replace an artifact of another
            source.
        inputs: The inputs of a source that declares none, as text (`pipeline.spec.text`).
        dims: The dims of such a source, as text.
        tolerance: The tolerance of such a source. By default it is measured
            (`pipeline.export.tolerance`).
        output_tolerances: The tolerance of single outputs that the source does not state, by name.
        engine_tolerance: The tolerance of an engine in this `precision`, in place of the spec's.
        ranges: The ranges of the inputs' random values, as text: ``ids=0..1000``.
        rules: Rules on several sizes, as text (``h*w <= 1000``), beside those of the spec.
        effort: How hard the builder tries, and a file to share its timings.
        exact: Whether to fail if such a source does not accept every size of `dims`. Otherwise the
            dims are narrowed to the sizes that it accepts.
        allow_narrow: Whether a range may become a single size. Otherwise that is an error.
        search_seconds: Seconds of CPU time for trying sizes; None for the default.
        state: Names of attributes that calls of the model change; see `ModelSpec.state`.
        dtype: ``float32`` converts the module to float32 first; see `ModelSpec.dtype`.
        values: The user's values of inputs, in place of random ones: a ``.npz`` or ``.pt`` file, or
            arrays or tensors (see `pipeline.source.values`).
        trust: Whether to load a ``.pt2`` that could run code of its author: pickles, custom
            objects, or compiled code.
        output_names: Names for the outputs of a source that declares none, in order.
        quick: Whether to compare at few sizes only.
        reference: For an ``.onnx`` file: another ONNX file with the same inputs and outputs, whose
            outputs are the reference.
        flags: Where the plan runs besides this machine, and whether its weights can be replaced
            (`pipeline.spec.plan_flags.PlanFlags`).
        store: A store of artifacts to share (`pipeline.store.store`): a folder, or an address such
            as ``s3://bucket/path``.

    Raises:
        InputError: A field is unknown, or its value is out of range or of another kind.
    """

    model: str | ModelSpec
    out: Path | str | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    weights: Path | str | None = None
    target: str = DEFAULT_TARGET
    profiles: tuple[Profile | str, ...] = ()
    precision: Asked = "fp32"
    recipe: Path | str | None = None
    gpus: tuple[str, ...] = ()
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
    output_tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    engine_tolerance: Tolerance | None = None
    ranges: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    effort: Effort = DEFAULT_EFFORT
    exact: bool = False
    allow_narrow: bool = False
    search_seconds: float | None = None
    state: tuple[str, ...] = ()
    dtype: Literal["float32"] | None = None
    trust: bool = False
    values: Any = None
    output_names: tuple[str, ...] = ()
    quick: bool = False
    reference: Path | str | None = None
    store: Path | str | None = None
    flags: PlanFlags = NO_FLAGS

    def __post_init__(self) -> None:
        _check_model(self.model)
        for word, example in _FILES.items():
            check_kind(word, getattr(self, word), (str, Path), f'"{example}"')
        check_kind("flags", self.flags, (PlanFlags,), "PlanFlags(refit=True)")
        check_kind("seed", self.seed, (int,), "0")
        check_kind("memory_limit", self.memory_limit, (int,), "8 * 2**30")
        check_kind("search_seconds", self.search_seconds, (int, float), "60")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise InputError(f"memory limit {self.memory_limit}: must be positive")
        for name, example in _TEXTS.items():
            check_texts(name, getattr(self, name), example, _OTHERS.get(name, ()))
        for word in ("tolerance", "engine_tolerance"):
            check_tolerance(getattr(self, word), word)
        if not isinstance(self.output_tolerances, Mapping):
            text = f"output_tolerances={self.output_tolerances!r}"
            raise InputError(f'{text}: expected a dict, such as {{"scores": Tolerance(...)}}')
        for name, tolerance in self.output_tolerances.items():
            check_tolerance(tolerance, f"output_tolerances[{name!r}]")
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: can't be negative")
        if self.values is not None and self.seed:
            raise InputError(
                f"seed {self.seed}: works only with random inputs. Leave out --seed or --inputs"
            )

    @property
    def stored_recipe(self) -> Recipe | None:
        """The recipe of the given file. Raises `InputError` if it is not valid."""
        return None if self.recipe is None else read_recipe(Path(self.recipe))

    @property
    def engine_precision(self) -> Precision:
        """The precision of the engine: that of the recipe, if there is one."""
        recipe = self.stored_recipe
        if recipe is not None:
            if self.precision not in ("fp32", recipe.precision):
                raise InputError(
                    f"recipe {self.recipe}: states {recipe.precision}, not {self.precision}. "
                    "Leave out --precision"
                )
            return recipe.precision
        return FOR_AUTO if self.precision == "auto" else self.precision

    @property
    def weights_path(self) -> Path | None:
        return None if self.weights is None else Path(self.weights)

    def place(self, spec: ModelSpec) -> Path:
        """The artifact's folder."""
        return Path("artifacts") / spec.name if self.out is None else Path(self.out)

    def parsed_profiles(self) -> tuple[Profile, ...]:
        """The profiles as objects. The n-th one, if it is text, is called ``profile<n>``."""
        return tuple(
            p if isinstance(p, Profile) else Profile.parse(p, f"profile{n}")
            for n, p in enumerate(self.profiles)
        )


def _check_model(model: object) -> None:
    if isinstance(model, (str, ModelSpec)):
        return
    kind = type(model).__name__
    if isinstance(model, Path):
        do = f'Write "{model}"'
    elif hasattr(model, "named_parameters"):  # a torch module; torch is not imported here
        kind = f"the module {kind}"
        do = 'For a module, write pipeline.convert(module, {"x": "1x3x{h}x{w}"}, {"h": (64, 512), '
        do += '"w": (64, 512)})'
    else:
        do = 'Write for example "file.py:factory"'
    raise InputError(f"expected a model's name, a source as text or a ModelSpec, not {kind}. {do}")
