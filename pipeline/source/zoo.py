"""Finding a model's spec and source file by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.errors import InputError
from pipeline.models import MODELS
from pipeline.spec.model import ModelSpec

Factory = Callable[..., ModelSpec]


def find_spec(
    model: str | ModelSpec, options: Mapping[str, object], weights: Path | None = None
) -> ModelSpec:
    """The spec of that name, made with these options of its factory.

    Args:
        model: The model's name, or a spec, which is returned.
        options: The options of the factory by name.
        weights: The weights, for a factory with this argument. A checkpoint's folder may state the
            model's sizes.

    Raises:
        InputError: The model or the option does not exist. The message lists the known ones.
    """
    if isinstance(model, ModelSpec):
        if options:
            raise InputError(f"model {model.name} is a spec, which has no options. Leave them out")
        return model
    factory = find_factory(model)
    parameters = inspect.signature(factory).parameters
    known = {name: p for name, p in parameters.items() if name != "weights"}
    for name, value in options.items():
        if name not in known:
            raise InputError(
                f"model {model}: no option {name!r}; its options: {', '.join(known) or 'none'}"
            )
        want = type(known[name].default)
        if type(value) is not want:
            raise InputError(f"model {model}: option {name}={value!r}: expected {want.__name__}")
    more = {"weights": weights} if "weights" in parameters else {}
    return factory(**options, **more)


def find_factory(name: str) -> Factory:
    """The factory of a model in the zoo.

    Raises:
        InputError: There is no such model.
    """
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise InputError(f"unknown model {name!r}{hint}; known: {', '.join(MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory


def source_file(spec: ModelSpec) -> Path | None:
    """The Python file that defines the spec's `build`; None if there is none."""
    try:
        found = inspect.getsourcefile(spec.build)
    except TypeError:
        return None
    return Path(found) if found and Path(found).is_file() else None
