"""Finds the Python code that a model was made of, and whether it changed.

A cache key is computed before the model is made. What a factory imports later, from other folders
or while it runs, is known only afterwards. So an artifact lists it, and the next conversion checks
the list, as build systems do with the headers that a compiler has read.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from pipeline.machine.files import hash_file
from pipeline.machine.libraries import versions
from pipeline.models import MODELS
from pipeline.probe.code_files import is_own
from pipeline.source.hub import is_hub

_OWN = "pipeline"  # every key has its code


def imports_of(source: str) -> tuple[dict[str, str], dict[str, str]]:
    """Lists the code that was imported until now, for a factory's model.

    Other sources have none: the keys have their files. All modules of the process count, because
    Python does not tell who imported one. That is too much in a program with modules of its own,
    and never too little. The program's own file does not count.

    Args:
        source: The model as the user names it.

    Returns:
        The sha256 of each imported Python file that is not of an installed package, by the module's
        name, or by the file's path if it was loaded in another way than by its name. And the
        version of each installed package that these files import.
    """
    if source in MODELS or source.startswith("spec:") or is_hub(source) or ":" not in source:
        return {}, {}
    factory = Path(source.rpartition(":")[0])
    given = factory.resolve() if factory.suffix == ".py" else None
    modules: dict[str, str] = {}
    names: set[str] = set()
    for name, file in _own_files():
        names |= _imported_by(file)
        if file == given:  # the keys have it
            continue
        found = _file_of(name) == file
        modules[name if found else file.as_posix()] = hash_file(file).sha256
    tops = {name for name in names if name in sys.modules and name not in sys.stdlib_module_names}
    by_name = metadata.packages_distributions()
    packages = sorted({package for top in tops for package in by_name.get(top, ())})
    return modules, versions(tuple(packages))


def changed_imports(
    modules: Mapping[str, str], packages: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Returns what is not as it was, of the code that `imports_of` returned.

    Returns:
        The hash or version then and now, by name. It is empty now if there is none here.
    """
    now = {name: _hash_of(name) for name in modules}
    now |= {name: versions((name,)).get(name, "") for name in packages}
    before = {**modules, **packages}
    return {name: (old, now[name]) for name, old in before.items() if old != now[name]}


def _own_files() -> Iterator[tuple[str, Path]]:
    for name, module in sorted(sys.modules.items()):
        file = _file(module)
        if name in ("__main__", "__mp_main__") or name.split(".")[0] == _OWN or file is None:
            continue
        if is_own(str(file)) and file.is_file():
            yield name, file.resolve()


def _file(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) else None


def _imported_by(file: Path) -> set[str]:
    """The top-level names that a Python file imports; none if it is not Python's text."""
    found: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found


def _hash_of(name: str) -> str:
    file = _file(sys.modules.get(name)) or _file_of(name) or Path(name)
    try:
        return hash_file(file).sha256
    except OSError:
        return ""


def _file_of(name: str) -> Path | None:
    """The file that an import of `name` would run. Nothing is imported to find it."""
    top, *others = name.split(".")
    spec = _top_spec(top)
    for other in others:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{other}", list(spec.submodule_search_locations))
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _top_spec(name: str) -> ModuleSpec | None:
    """What an import would load, also if another module of that name is loaded already."""
    for finder in sys.meta_path:
        with suppress(AttributeError, ImportError, ValueError):
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None
