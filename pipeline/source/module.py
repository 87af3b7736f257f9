"""A torch module in hand as the source of a conversion."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import InputError
from pipeline.source.values import to_array, with_values
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.given import check_names
from pipeline.spec.model import ModelSpec
from pipeline.spec.structure import Path, children, leaves, name_of, rebuilt
from pipeline.spec.tensors import Input
from pipeline.spec.text import by_argument, parse_dim, parse_input
from pipeline.spec.weights import SCRIPTED

if TYPE_CHECKING:
    import torch

EXAMPLE = 'pipeline.convert(module, {"x": "1x3x{h}x{w}"}, {"h": (64, 128, 512), "w": (64, 512)})'
_AXES = (
    "A dim has its name in the text of an input, in place of a size. Write "
    'inputs={"x": ("{b}x8", tensor)}, dims={"b": (1, 8)}'
)
_OWN = ("model", "options", "weights", "inputs", "dims", "ranges", "values", "trust")
_OPTIONS = tuple(field.name for field in fields(Config) if field.name not in _OWN)


def module_config(
    module: torch.nn.Module, inputs: Any, dims: Any, name: str, options: Mapping[str, Any]
) -> Config:
    """The config of a conversion of a module; see `module_spec` for the arguments.

    Args:
        options: Other fields of the `Config`.

    Raises:
        InputError: An option is unknown, or the module cannot be called this way.
    """
    check_names(options, _OPTIONS, "pipeline.convert and pipeline.check")
    exact = bool(options.get("exact"))
    return Config(module_spec(module, inputs, dims, name=name, exact=exact), **options)


def module_spec(
    module: torch.nn.Module, inputs: Any, dims: Any = None, *, name: str = "", exact: bool = False
) -> ModelSpec:
    """The spec of a module in hand.

    Args:
        module: The module. It stays as it is: a conversion puts everything back that it changes.
        inputs: The arguments of ``forward``: a dict by name, or a sequence in their order. One
            that is no tuple, list or dict is the only argument. Each is one of these, or a nested
            tuple, list, dict or dataclass of them. A name such as ``past[0..27][0..1]`` gives a
            text to many parts of an argument.

            - a text ``SHAPE[:DTYPE[:LOW..HIGH]]``, such as ``1x3x{h}x{w}``
            - an `Input`
            - a tensor or an array: all its sizes are fixed, and its values are used
            - a pair of a text or an `Input`, and a tensor: the text says which axes are dynamic
        dims: The ranges of the dims in the texts, by name: (min, opt, max), (min, max), a text
            ``MIN:OPT:MAX/MULTIPLE``, or a `Dim`. Except a `Dim`, each is narrowed to the sizes that
            the module accepts.
        name: The name of the model; by default the name of the module's class.
        exact: Whether to fail instead of narrowing.

    Raises:
        InputError: The module is none, or is not on the CPU. Or inputs or dims are not valid. The
            message says what to pass.
    """
    _check_module(module)
    if inputs is None:
        raise InputError(f"no inputs: describe each argument of forward{_signature(module)}. Write "
                         f"for example {EXAMPLE}")  # fmt: skip
    ranges = _dims(dims, auto=not exact)
    given: dict[str, np.ndarray] = {}
    declared = {
        word: _declared(value, (word,), ranges, given)
        for word, value in _by_name(module, inputs).items()
    }
    spec = ModelSpec(
        name=name or re.sub(r"[^A-Za-z0-9_]+", "_", type(module).__name__),
        build=lambda _: module,
        inputs=declared,
        libraries=("torch",),
    )
    for unused in [word for word in ranges if word not in spec.dims]:
        raise InputError(
            f"dim {unused}: no input uses it. Write {{{unused}}} in place of a size: "
            f"{_with_texts(spec, given)}"
        )
    return with_values(spec, given) if given else spec


def _check_module(module: Any) -> None:
    import torch

    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        if isinstance(module, (str, ModelSpec, Config)):
            do = "For a name, a file, a ModelSpec or a Config, call pipeline.run(...)"
        elif isinstance(module, type) and issubclass(module, torch.nn.Module):
            kind, do = f"the class {module.__name__}", f"Make a module: {module.__name__}(...)"
        else:
            do = f"Write for example {EXAMPLE}"
        raise InputError(f"expected a torch.nn.Module, not {kind}. {do}")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"the module is {SCRIPTED}. Pass the torch module that it was made from")
    for word, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type == "meta":
            raise InputError(f"{word} has no values (it is on the meta device). Load its weights")
        if tensor.device.type != "cpu":
            raise InputError(f"{word} is on {tensor.device}. Move the module first: module.cpu()")


def _signature(module: torch.nn.Module) -> str:
    try:
        return str(inspect.signature(module.forward))
    except (TypeError, ValueError):
        return ""


def _by_name(module: torch.nn.Module, inputs: Any) -> dict[str, Any]:
    """The inputs by the names of forward's arguments."""
    if isinstance(inputs, Mapping):
        return by_argument({str(name): value for name, value in inputs.items()})
    every = list(inputs) if type(inputs) in (tuple, list) else [inputs]
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return {f"input_{n}": value for n, value in enumerate(every)}
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    if rest:
        names += [f"{rest}_{n}" for n in range(len(every) - len(names))]
    if len(every) > len(names):
        raise InputError(
            f"{len(every)} inputs for forward{_signature(module)}. Pass them by name: "
            f'{{"{names[0] if names else "x"}": ...}}'
        )
    return dict(zip(names, every, strict=False))


def _dims(dims: Any, *, auto: bool) -> dict[str, Dim]:
    if dims is not None and not isinstance(dims, Mapping):
        raise InputError(
            f'dims={dims!r}: pass a dict by name, such as {{"h": (64, 128, 512)}}. {_AXES}'
        )
    found: dict[str, Dim] = {}
    for name, value in (dims or {}).items():
        if isinstance(name, tuple) or isinstance(value, Mapping):
            raise InputError(f"dims: {name!r}: {value!r} is not a dim and its range. {_AXES}")
        if isinstance(value, Dim) and value.name == name:
            found[name] = value
        elif isinstance(value, str):
            found[name] = parse_dim(f"{name}={value}", auto=auto)
        elif isinstance(value, (tuple, list)) and len(value) in (2, 3):
            low, high = value[0], value[-1]
            middle = {"opt": value[1]} if len(value) == 3 else {}
            try:
                found[name] = Dim(name, min=low, **middle, max=high, auto=auto)
            except InputError as error:
                if not middle:
                    raise
                raise InputError(f"{error}: {value!r} is read as (min, opt, max)") from error
        elif isinstance(value, Dim):
            raise InputError(
                f'dim {name}: this Dim is called {value.name}. Write Dim("{name}", ...)'
            )
        else:
            raise InputError(
                f"dim {name}: {value!r} is not a range. Pass (min, opt, max), (min, max), a text "
                f'such as "64:128:512/8", or Dim("{name}", ...)'
            )
    return found


def _declared(value: Any, path: Path, dims: Mapping[str, Dim], given: dict[str, np.ndarray]) -> Any:
    """The value with an `Input` in place of each leaf. Arrays are added to `given` by name."""
    where = _place(path)
    if (array := _array(value)) is not None:
        value = "x".join(map(str, array.shape))
    elif type(value) is tuple and len(value) == 2 and isinstance(value[0], (str, Input)):
        array = _array(value[1])
        value = value if array is None else value[0]
    if isinstance(value, str):
        if array is not None and ":" not in value:
            value = f"{value}:{array.dtype}"
        value = parse_input(f"{where}:{value}", dims)
    if isinstance(value, Input):
        value = replace(value, name=value.name or name_of(path, "input"))
        if array is not None:
            given[value.name] = array
        return value
    _check_shape(value, where)
    parts = None if value is None else children(value)
    if parts:
        return rebuilt(value, [_declared(p, (*path, key), dims, given) for key, p in parts])
    if value is None:
        return None
    raise InputError(
        f"inputs {where}: {value!r} is no input of an engine. Pass a tensor, a text such as "
        "1x3x{h}x{w}, or an Input. For another argument, give it a default, or wrap the module"
    )


def _check_shape(value: Any, where: str) -> None:
    """Refuses a shape as a tuple, which would be read as a tuple of inputs."""
    if not isinstance(value, (tuple, list)) or not any(isinstance(part, int) for part in value):
        return
    if all(isinstance(part, int) or str(part).isidentifier() for part in value):
        text = "x".join(f"{{{p}}}" if str(p).isidentifier() else str(p) for p in value)
        raise InputError(f'inputs {where}: {value!r} is not a text. Write the shape as "{text}"')


def _array(value: Any) -> np.ndarray | None:
    """A tensor or an array as an array; None for other values."""
    plain = isinstance(value, np.ndarray) or hasattr(value, "detach")
    return to_array(value, "inputs") if plain else None


def _place(path: Path) -> str:
    """A path as `parse_input` reads it: ``past[0][1]``, ``batch.image``."""
    first, *rest = path
    words = [
        f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
        for part in rest
    ]
    return f"{first}{''.join(words)}"


def _with_texts(spec: ModelSpec, given: Mapping[str, Any]) -> str:
    """How to say where a dim stands, for an error."""
    first: Sequence[Input] = [i for _, i in leaves(list(spec.inputs))]
    text = "x".join(map(str, first[0].shape))
    value = f'("{text}", tensor)' if first[0].name in given else f'"{text}"'
    return f'inputs={{"{first[0].name}": {value}}}'
