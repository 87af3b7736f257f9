"""Imports and calls a factory named ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, PipelineError, first_line, first_lines
from pipeline.machine.libraries import import_torchvision, packages_by_import
from pipeline.machine.python_file import line_of_error, run_python_file

_INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class SourceFactory:
    """A callable that makes a module or a spec.

    Args:
        make: The callable; it takes options by name.
        packages: The installed distributions that contain it.
        files: Returns the files that a cache key covers.
        in_hand: Whether the text names a module, which `make` returns as it is. It has the weights
            that it got at the import, which no seed of ours determines.
    """

    make: Callable[..., Any]
    packages: Sequence[str]
    files: Callable[[], Sequence[Path]]
    in_hand: bool = False


def find_factory(text: str) -> SourceFactory:
    """The callable of ``module:factory`` or ``file.py:factory``, or of a module in that place.

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
    torch = sys.modules.get("torch")  # if the name is a module's, its file has imported torch
    in_hand = torch is not None and isinstance(found, torch.nn.Module)
    if not callable(found):
        raise InputError(f"source {text}: {name} is {type(found).__name__}, not a factory to call")
    try:
        file = inspect.getsourcefile(inspect.unwrap(found)) or module.__file__
    except TypeError:
        file = getattr(module, "__file__", None)
    named = getattr(module, "__file__", None)
    files = partial(files_of, [Path(each) for each in (file, named) if each])
    make = (lambda: found) if in_hand else found
    return SourceFactory(make, packages_of(found), files, in_hand)


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


def call_factory(text: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Calls a factory.

    Raises:
        InputError: It raises an error that is not of this package.
    """
    try:
        return mended(lambda: factory(**options))
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"source {text}: the factory raises {type(error).__name__}: {first_lines(error)}"
            f"{_raised_at(error)}",
            detail="".join(traceback.format_exception(error)),
        ) from error


def _raised_at(error: BaseException) -> str:
    """The last line of the user's own code in a traceback, for an error; empty if there is none."""
    library = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = "site-packages" in path.parts or any(map(path.is_relative_to, library))
        if path.is_file() and not installed:
            here = Path.cwd().resolve()
            near = path.resolve().is_relative_to(here)
            shown = path.resolve().relative_to(here) if near else path
            return f" (raised at {shown}:{frame.lineno})"
    return ""


def check_options(text: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Checks that the factory has each option, and that text is not given for a bool or a number.

    Raises:
        InputError: The factory has no such option, or does not take text for it.
    """
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in options:
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                raise InputError(f"source {text}: no option {name!r}; its options: {known}")
    for name, value in options.items():
        wanted = _plain_type(parameters.get(name))
        if isinstance(value, str) and wanted:
            raise InputError(
                f"source {text}: option {name}={value!r} is text, and the factory takes {wanted}"
            )


def _plain_type(parameter: inspect.Parameter | None) -> str:
    """What a parameter takes, by its annotation or its default; empty if it may be text."""
    if parameter is None:
        return ""
    if parameter.annotation is not parameter.empty:
        kind = parameter.annotation
    else:
        kind = type(parameter.default)
    named = getattr(kind, "__name__", str(kind))
    return {"bool": "true or false", "int": "an int", "float": "a number"}.get(named, "")


def signature_of(made: Any) -> str:
    """The signature of a module's forward, for an error."""
    forward = getattr(made, "forward", None)
    if forward is None:
        return ""
    with contextlib.suppress(TypeError, ValueError):
        return f"; its forward takes {inspect.signature(forward)}"
    return ""


def packages_of(factory: Callable[..., Any]) -> list[str]:
    """The installed packages that contain a factory."""
    top = (getattr(factory, "__module__", "") or "").split(".")[0]
    return list(packages_by_import().get(top, ()))


@cache
def _installed(file: str) -> Path:
    """The path of an installed module, without links. A process imports thousands of them."""
    return Path(file).resolve()


def files_of(files: Sequence[Path]) -> list[Path]:
    """The Python files that a cache key covers: files of a factory that you may edit.

    These are the given ones, and the imported modules below their folders or the current folder.
    Installed packages are left out, because the cache key has their version. For modules that the
    factory imports later, during its call, see `pipeline.source.imports`.

    Args:
        files: The file that the user names, and the one that defines the factory.
    """
    found = {file.resolve() for file in files}
    own = [file for file in found if "site-packages" not in file.parts]
    folders = (*(file.parent for file in own), Path.cwd().resolve()) if own else ()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or "x"
        path = _installed(file) if file.startswith(_INSTALLED) else Path(file).resolve()
        below = any(path.is_relative_to(folder) for folder in folders)
        ours = name.split(".")[0] == "pipeline"  # every key has it
        if below and "site-packages" not in path.parts and not ours:
            found.add(path)
    return sorted(path for path in found if path.is_file())
