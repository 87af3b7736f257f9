"""Finding the source of a conversion by its text.

A source is one of these:

- the name of a model in the zoo
- a factory of a `ModelSpec` or a torch module: ``package.module:factory`` or ``file.py:factory``
- a torch module by its name in a file or package: ``file.py:net``
- a saved ``.pt2`` program
- an ``.onnx`` file
- a model of a hub: ``hf:NAME`` or ``timm/NAME``, where NAME may be a folder
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.models import MODELS
from pipeline.source.factory import (
    SourceFactory,
    call_factory,
    check_options,
    find_factory,
    signature_of,
)
from pipeline.source.hub import find_hub, is_hub
from pipeline.source.imports import is_newer
from pipeline.source.onnx.spec import onnx_spec, with_reference
from pipeline.source.tolerance import with_stated
from pipeline.source.values import with_values
from pipeline.source.zoo import find_spec
from pipeline.spec.config import Config
from pipeline.spec.forms import INPUT_FORM
from pipeline.spec.model import ModelSpec
from pipeline.spec.ranges import read_range, split_range
from pipeline.spec.text import (
    parse_dims,
    parse_inputs,
    split_dims,
)
from pipeline.spec.weights import WEIGHTS, load_weights, what_it_holds

if TYPE_CHECKING:
    import torch

_SEED = 0


def find_source(config: Config) -> ModelSpec:
    """Finds or makes the spec that a conversion starts from.

    Raises:
        InputError: The source or its factory does not exist, the factory raises, or inputs and
            dims don't fit the source.
    """
    _need_torch(config.model)
    spec = _with_output_names(_found(config), config)
    spec = with_stated(spec, config)
    if config.engine_tolerance is not None:
        of_engine = {**spec.engine_tolerance, str(config.engine_precision): config.engine_tolerance}
        spec = replace(spec, engine_tolerance=of_engine)
    if config.dtype is not None:
        if spec.onnx is not None:
            raise InputError(f"{config.model}: --dtype works only for torch models. Leave it out")
        spec = replace(spec, dtype=config.dtype)
    if config.reference is not None:
        spec = with_reference(spec, Path(config.reference))
    if config.state:
        spec = replace(spec, state=(*spec.state, *config.state))
    if config.allow_narrow:
        spec = replace(spec, allow_narrow=True)
    if config.search_seconds is not None:
        if not 0 < config.search_seconds < math.inf:
            text = f"{config.search_seconds:g} is no number of seconds"
            raise InputError(f"search_seconds: {text}. Pass more than 0")
        spec = replace(spec, search_seconds=config.search_seconds)
    if config.rules:
        spec = replace(spec, rules=tuple(dict.fromkeys((*spec.rules, *config.rules))))
    spec = _with_ranges(spec, config)
    return spec if config.values is None else with_values(spec, config.values)


def _need_torch(model: str | ModelSpec) -> None:
    """Raises `InputError` if the source needs torch, and torch is not installed."""
    if isinstance(model, ModelSpec):
        onnx, name = model.onnx is not None, model.name
    else:
        onnx, name = model.endswith(".onnx"), model
    if not onnx and importlib.util.find_spec("torch") is None:
        raise InputError(
            f"source {name}: it needs torch, which is not installed. Install the extra: "
            "pip install '.[export]' in a clone of pipeline. An .onnx file needs no "
            "torch"
        )


def _with_output_names(spec: ModelSpec, config: Config) -> ModelSpec:
    if not config.output_names:
        return spec
    if not all(config.output_names):
        raise InputError("--output-name: a name is empty")
    if spec.outputs:
        names = ", ".join(output.name for output in spec.outputs)
        raise InputError(f"model {spec.name} names its outputs: {names}. Leave --output-name out")
    return replace(spec, output_names=config.output_names)


def _with_ranges(spec: ModelSpec, config: Config) -> ModelSpec:
    if not config.ranges:
        return spec
    inputs = {i.name: i for i in spec.inputs}
    for name, text in map(split_range, config.ranges):
        if name not in inputs:
            raise InputError(f"range {name}: no such input; the inputs are {', '.join(inputs)}")
        try:
            found = read_range(text, inputs[name].dtype, spec.dims)
        except InputError as error:
            raise InputError(f"range {name}={text}: {error}") from error
        inputs[name] = replace(inputs[name], **found)
    return replace(spec, inputs=tuple(inputs.values()))


def _found(config: Config) -> ModelSpec:
    model = config.model
    if isinstance(model, ModelSpec) or model in MODELS:
        _no_inputs(config, "the spec declares them")
        return find_spec(model, config.options, config.weights_path)
    ranges, expressions = split_dims(config.dims)
    dims = parse_dims(ranges, auto=not config.exact)
    if model.endswith(".onnx"):
        _none_of(config, model, ("inputs", "options", "weights"))
        return onnx_spec(Path(model), dims, expressions=expressions)
    for name, text in expressions.items():
        instead = "" if model.endswith(".pt2") else f": write {{{text}}} in its --input"
        raise InputError(f"dim {name}={text}: an expression works only for ONNX files{instead}")
    if model.endswith(".pt2"):
        from pipeline.source.program.spec import program_spec

        _none_of(config, model, ("inputs", "options", "weights"))
        return program_spec(Path(model), dims, trust=config.trust)
    factory = find_hub(model, trust=config.trust)
    if factory is None and ":" in model:
        factory = find_factory(model)
    if factory is not None:
        return _from_factory(config, dims, factory)
    if Path(model).suffix in (*WEIGHTS, ".py") and not Path(model).exists():
        raise InputError(f"source {model}: no such file")
    if Path(model).suffix in WEIGHTS and Path(model).is_file():
        raise InputError(f"source {model}: {what_it_holds(Path(model))}")
    if Path(model).suffix == ".py":
        raise InputError(f"source {model!r}: no factory is named. Pass {model}:FACTORY")
    return find_spec(model, config.options, config.weights_path)  # raises: lists the zoo


def _no_inputs(config: Config, why: str) -> None:
    for word in ("inputs", "dims"):
        if getattr(config, word):
            raise InputError(
                f"--{word[:-1]} can't be used with a spec: {why}; use --profile to narrow ranges"
            )


def _none_of(config: Config, source: str, words: tuple[str, ...]) -> None:
    for word in words:
        if getattr(config, word):
            option = "weights" if word == "weights" else word[:-1]
            raise InputError(f"{source}: has its own {word}; leave --{option} out")


def _from_factory(config: Config, dims: Mapping[str, Any], factory: SourceFactory) -> ModelSpec:
    assert isinstance(config.model, str)
    options = dict(config.options)
    check_options(config.model, factory.make, options)
    own = "weights" in inspect.signature(factory.make).parameters and "weights" not in options
    made = None if config.inputs else call_factory(config.model, factory.make, options)
    if isinstance(made, ModelSpec):
        _no_inputs(config, "the factory's spec declares them")
        own_key = _hash(factory.files(), config.model, repr(sorted(options.items())))
        return replace(made, key=made.key or own_key)
    if not config.inputs:
        raise InputError(
            f"source {config.model}: makes {type(made).__name__}, not a ModelSpec. Describe "
            f"each input: --input {INPUT_FORM}{signature_of(made)}"
        )
    inputs = parse_inputs(config.inputs, dims)
    model = config.model

    def build(weights: Path | None) -> torch.nn.Module:
        import torch

        more = {"weights": weights} if own and weights is not None else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            module = call_factory(model, factory.make, {**options, **more})
        if isinstance(module, ModelSpec):
            raise InputError(f"source {model}: makes a ModelSpec; leave --input out")
        if weights is not None and not own and isinstance(module, torch.nn.Module):
            load_weights(module, weights)
        return module  # type: ignore[no-any-return]

    return ModelSpec(
        name=name_for(model, options),
        build=build,
        inputs=inputs,
        libraries=tuple(dict.fromkeys(["torch", *factory.packages])),
        key=_hash(factory.files(), model, *config.inputs, *config.dims, str(config.exact)),
        seed=None if config.weights or is_hub(model) or factory.in_hand else _SEED,
        options=options,
    )


def name_for(source: str, options: Mapping[str, Any]) -> str:
    """A name for a model and its artifact: ``create_model-small``."""
    last = source.rpartition(":")[2]
    name = Path(last).name if is_hub(source) else last.split(".")[-1]
    words = [str(v) for v in options.values() if isinstance(v, str)]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join([name, *words])).strip(".-") or "model"


def _hash(files: Sequence[Path], source: str, *texts: str) -> str:
    digest = hashlib.sha256(source.encode())
    given = Path(source.rpartition(":")[0]).resolve()  # it has just run, if it is a file
    if any(is_newer(file) for file in files if file != given):
        digest.update(uuid.uuid4().bytes)  # an older one may have run
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()
