"""Finding the source of a conversion by its text.

A source is one of these:

- the name of a model in the zoo
- a factory of a `ModelSpec` or a torch module: ``package.module:factory`` or ``file.py:factory``
- a saved ``.pt2`` program
- an ``.onnx`` file
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, PipelineError, first_line
from pipeline.machine.libraries import import_torchvision
from pipeline.machine.python_file import line_of_error, run_python_file
from pipeline.models import MODELS
from pipeline.source.onnx.spec import onnx_spec
from pipeline.source.tolerance import with_stated, with_stated_outputs
from pipeline.source.values import with_values
from pipeline.source.zoo import find_spec
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec
from pipeline.spec.ranges import read_range, split_range
from pipeline.spec.text import (
    INPUT_FORM,
    parse_dims,
    parse_inputs,
    split_dims,
)
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    import torch

_SEED = 0


def find_source(config: Config) -> ModelSpec:
    """Finds or makes the spec that a conversion starts from.

    Raises:
        InputError: The source or its factory does not exist, the factory raises, or inputs and
            dims don't fit the source.
    """
    spec = _found(config)
    if config.output_tolerances:
        spec = with_stated_outputs(spec, config)
    if config.engine_tolerance is not None:
        of_engine = {**spec.engine_tolerance, str(config.precision): config.engine_tolerance}
        spec = replace(spec, engine_tolerance=of_engine)
    if config.dtype is not None:
        if spec.onnx is not None:
            raise InputError(f"{config.model}: --dtype works only for torch models. Leave it out")
        spec = replace(spec, dtype=config.dtype)
    if config.state:
        spec = replace(spec, state=(*spec.state, *config.state))
    spec = _with_ranges(spec, config)
    return spec if config.values is None else with_values(spec, config.values)


def _with_ranges(spec: ModelSpec, config: Config) -> ModelSpec:
    if not config.ranges:
        return spec
    inputs = {i.name: i for i in spec.inputs}
    for name, text in map(split_range, config.ranges):
        if name not in inputs:
            raise InputError(f"range {name}: no such input; the inputs are {', '.join(inputs)}")
        try:
            found = read_range(name, text, inputs[name].dtype, spec.dims)
        except InputError as error:
            raise InputError(f"range {name}={text}: {error}") from error
        inputs[name] = replace(inputs[name], **found)
    return replace(spec, inputs=tuple(inputs.values()))


def _found(config: Config) -> ModelSpec:
    model = config.model
    if isinstance(model, ModelSpec) or model in MODELS:
        _no_inputs(config, "the spec declares them")
        return with_stated(find_spec(model, config.options, config.weights_path), config)
    ranges, expressions = split_dims(config.dims)
    dims = parse_dims(ranges, auto=not config.exact)
    if model.endswith(".onnx"):
        _none_of(config, model, ("inputs", "options", "weights"))
        return onnx_spec(Path(model), dims, tolerance=config.tolerance, expressions=expressions)
    for name, text in expressions.items():
        instead = "" if model.endswith(".pt2") else f": write {{{text}}} in its --input"
        raise InputError(f"dim {name}={text}: an expression works only for ONNX files{instead}")
    if model.endswith(".pt2"):
        from pipeline.source.program.spec import program_spec

        _none_of(config, model, ("inputs", "options", "weights"))
        return program_spec(Path(model), dims, tolerance=config.tolerance, trust=config.trust)
    if ":" in model:
        return _from_factory(config, dims)
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


def _from_factory(config: Config, dims: Mapping[str, Any]) -> ModelSpec:
    assert isinstance(config.model, str)
    factory, file = find_factory(config.model)
    options = _options(config, factory)
    own = "weights" in inspect.signature(factory).parameters and "weights" not in options
    made = None if config.inputs else _call(config.model, factory, options)
    if isinstance(made, ModelSpec):
        _no_inputs(config, "the factory's spec declares them")
        made = with_stated(made, config)
        own_key = _hash(files_of(file), config.model, repr(sorted(options.items())))
        return replace(made, key=made.key or own_key)
    if not config.inputs:
        raise InputError(
            f"source {config.model}: makes {type(made).__name__}, not a ModelSpec. Describe "
            f"each input: --input {INPUT_FORM}{_signature_of(made)}"
        )
    inputs = parse_inputs(config.inputs, dims)
    model = config.model

    def build(weights: Path | None) -> torch.nn.Module:
        import torch

        more = {"weights": weights} if own and weights is not None else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            module = _call(model, factory, {**options, **more})
        if isinstance(module, ModelSpec):
            raise InputError(f"source {model}: makes a ModelSpec; leave --input out")
        if weights is not None and not own and isinstance(module, torch.nn.Module):
            load_weights(module, weights)
        return module  # type: ignore[no-any-return]

    return ModelSpec(
        name=name_for(model, options),
        build=build,
        inputs=inputs,
        tolerance=config.tolerance,
        libraries=tuple(dict.fromkeys(["torch", *_distributions(factory)])),
        key=_hash(files_of(file), model, *config.inputs, *config.dims, str(config.exact)),
        seed=None if config.weights else _SEED,
        options=options,
    )


def find_factory(text: str) -> tuple[Callable[..., Any], Path | None]:
    """The callable of ``module:factory`` or ``file.py:factory``, and its file.

    Raises:
        InputError: The file, module or attribute does not exist, or the import raises.
    """
    where, _, name = text.rpartition(":")
    path = Path(where)
    module = mended(lambda: _file_module(path) if path.suffix == ".py" else _module(where))
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(f"source {text}: {where} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"source {text}: {name} is {type(found).__name__}, not a factory to call")
    try:
        file = inspect.getsourcefile(inspect.unwrap(found)) or module.__file__
    except TypeError:
        file = getattr(module, "__file__", None)
    return found, Path(file) if file else None


def _module(name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script does not add the current folder
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name.split(".", maxsplit=1)[0] == missing.split(".")[0]:
            raise InputError(
                f"source {name}: there is no module {missing}. Install its package, or name a "
                "file (file.py:factory)"
            ) from error
        raise InputError(
            f"source {name}: its import needs {missing}, which is not installed. Install it"
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _file_module(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"source {path}: no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # so the file can import files beside it
        sys.path.insert(0, folder)
    name = re.sub(r"\W", "_", path.stem)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path.resolve()):
        name = f"{name}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    try:
        return run_python_file(path.resolve(), name)
    except (Exception, SystemExit) as error:  # a script that runs when it is imported
        raise _import_failed(str(path), error, path.resolve()) from error


def _import_failed(name: str, error: BaseException, file: Path | None = None) -> BaseException:
    if isinstance(error, PipelineError) or "torchvision::" in str(error):
        return error
    place = f" ({line_of_error(error, file)})" if file else ""
    return InputError(
        f"source {name}: its import raises {type(error).__name__}: {first_line(error, '')}{place}",
        detail="".join(traceback.format_exception(error)),
    )


def mended(action: Callable[[], Any]) -> Any:
    """Runs an action, and runs it again if it fails because torchvision can't be imported.

    The import can fail with a CPU build of torch, and many libraries import torchvision. Before
    the second run, `import_torchvision` makes the import work.

    Returns:
        The result of the action.
    """
    try:
        return action()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        if "operator torchvision::" not in text:
            raise
        import_torchvision()
        return action()


def _call(text: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        return mended(lambda: factory(**options))
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        first = first_line(error, "")
        raise InputError(
            f"source {text}: the factory raises {type(error).__name__}: {first}",
            detail="".join(traceback.format_exception(error)),
        ) from error


def _options(config: Config, factory: Callable[..., Any]) -> dict[str, Any]:
    """The options, after a check that the factory has each option.

    Raises:
        InputError: The factory has no such option.
    """
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in config.options:
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                raise InputError(f"source {config.model}: no option {name!r}; its options: {known}")
    return dict(config.options)


def _signature_of(made: Any) -> str:
    """The signature of a module's forward, for an error."""
    forward = getattr(made, "forward", None)
    if forward is None:
        return ""
    with contextlib.suppress(TypeError, ValueError):
        return f"; its forward takes {inspect.signature(forward)}"
    return ""


def name_for(source: str, options: Mapping[str, Any]) -> str:
    """A name for a model and its artifact: ``create_model-resnet18``."""
    name = source.rpartition(":")[2].split(".")[-1]
    words = [str(v) for v in options.values() if isinstance(v, str)]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join([name, *words])).strip(".-") or "model"


def _distributions(factory: Callable[..., Any]) -> list[str]:
    """The installed packages that contain a factory."""
    top = (getattr(factory, "__module__", "") or "").split(".")[0]
    return importlib.metadata.packages_distributions().get(top, [])


def files_of(file: Path | None) -> list[Path]:
    """The Python files that a cache key covers: files of a factory that you may edit.

    These are the factory's file, and the imported modules below its folder or the current folder.
    Installed packages are left out, because the cache key has their version. Modules that the
    factory imports later, during its call, are missed.
    """
    if file is None:
        return []
    if "site-packages" in file.parts:
        return [file]
    folders = (file.resolve().parent, Path.cwd().resolve())
    found = {file.resolve()}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "x").resolve()
        below = any(path.is_relative_to(folder) for folder in folders)
        own = name.split(".")[0] == "pipeline"  # every key has it
        if below and "site-packages" not in path.parts and not own:
            found.add(path)
    return sorted(path for path in found if path.is_file())


def _hash(files: Sequence[Path], *texts: str) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()
