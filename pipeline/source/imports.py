"""Finds the Python code that a model was made of, and whether it changed.

A cache key is computed before the model is made. What a factory imports later, from other folders
or while it runs, is known only afterwards. So an artifact lists it, and the next conversion checks
the list, as build systems do with the headers that a compiler has read.

Not found: files that a factory runs or reads without an import, such as torch.hub's ``hubconf.py``,
and packages that installed packages import.
"""

from __future__ import annotations

import ast
import inspect
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import machinery
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import InputError
from pipeline.machine.files import hash_file
from pipeline.machine.libraries import packages_by_import, versions
from pipeline.models import MODELS
from pipeline.probe.code_files import is_own
from pipeline.source.hub import is_hub
from pipeline.spec.code_file import CodeFile

if TYPE_CHECKING:
    import torch

STARTED = time.time()  # this module is imported before a factory's file runs
_OWN = "pipeline"  # every key has its code
_FOLDER = Path(__file__).parents[1]


def imports_of(
    source: str, module: torch.nn.Module | None = None
) -> tuple[dict[str, CodeFile], dict[str, str]]:
    """Lists the code that was imported until now, for a factory's model.

    Other sources have none: the keys have their files. All modules of the process count, because
    Python does not tell who imported one. That is too much in a program with modules of its own,
    and never too little. The program's own file does not count.

    Args:
        source: The model as the user names it.
        module: The model. The files of its classes count too.

    Returns:
        The Python files that are not of an installed package, by the module's name, or by the
        file's path if it was loaded in another way. Modules that these files import are among them
        even if there are none. And the versions of the installed packages that they import.

    Raises:
        InputError: The factory's file got a module of another folder that has the same name.
    """
    if not _is_factory(source):
        return {}, {}
    factory = given_place(source)
    given = factory.resolve() if factory is not None else None
    loaded = dict(_own_files())
    if given is not None:
        _check_beside(source, given, loaded)
    names = {
        name
        for file in {*loaded.values(), *([given] if given else [])}
        for name in _imported_by(file)
    }
    found: dict[str, CodeFile] = {}
    for name, file in loaded.items():
        if file != given:  # the keys have it
            found[name if _file_of(name) == file else file.as_posix()] = _code_file(file)
    for file in _files_of_classes(module) - {*loaded.values(), given}:
        found[file.as_posix()] = _code_file(file)
    others = {n for n in names if n not in sys.stdlib_module_names and n.split(".")[0] != _OWN}
    found |= {n: CodeFile() for n in others if n not in sys.modules and _spec_of(n) is None}
    by_name = packages_by_import()
    packages = {p for n in others if n in sys.modules for p in by_name.get(n, ())}
    return dict(sorted(found.items())), versions(tuple(sorted(packages)))


def changed_imports(
    modules: Mapping[str, CodeFile], packages: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Returns what is not as it was, of the code that `imports_of` returned.

    Returns:
        The hash or version then and now, by name. It is empty if there is none, or not known.
    """
    changed: dict[str, tuple[str, str]] = {}
    for name, one in modules.items():
        now = _hashes(name, one)
        if now != ({one.sha256} if one.file else set()) or (one.file and not one.sha256):
            changed[name] = one.sha256, next(iter(sorted(now - {one.sha256})), "")
    here = {name: versions((name,)).get(name, "") for name in packages}
    changed |= {name: (old, here[name]) for name, old in packages.items() if old != here[name]}
    return changed


def given_file(source: str) -> dict[str, CodeFile]:
    """The file of a factory ``folder/file.py:factory``, by its name ``file.py``; none for others.

    Its hash is empty if the file is newer than the process, so that an older one may have run.
    """
    place = given_place(source)
    file = _real(place) if place is not None and _is_factory(source) else None
    if place is None or file is None:
        return {}
    return {place.name: _code_file(file)}


def given_place(source: str) -> Path | None:
    """The path ``folder/file.py`` of a factory ``folder/file.py:factory``; None for others.

    A module that the user names, ``package.module:factory``, is an import like all others.
    """
    place = Path(source.rpartition(":")[0])
    return place if place.suffix == ".py" else None


def changed_files(source: str, modules: Mapping[str, CodeFile]) -> dict[str, Path]:
    """Returns the files that a run of the source would import now, and that have another content.

    A file whose hash is not known, or that is not found here, is left out.

    Args:
        source: The model as the user names it.
        modules: The code that it was made of; see `imports_of` and `given_file`.

    Returns:
        The files by their names in `modules`. Nothing is run to find them.
    """
    given = given_place(source)
    changed = {}
    with _importable(given.resolve().parent if given is not None else Path.cwd()):
        for name, one in modules.items():
            own = given if given is not None and name == given.name else _file_of(name)
            loaded = getattr(sys.modules.get(name), "__file__", None)
            places = [Path(place) for place in (loaded, own, one.file) if place]
            file = next((real for place in places if (real := _real(place))), None)
            if one.sha256 and file is not None and hash_file(file).sha256 != one.sha256:
                changed[name] = file
    return changed


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Puts a folder first on the path, as `pipeline.source.factory` does before it runs a file."""
    before = list(sys.path)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def is_newer(file: Path) -> bool:
    """True if a file was written after this process began, so that an older one may have run."""
    try:
        stat = file.stat()
    except OSError:
        return True
    return max(stat.st_mtime, stat.st_ctime) >= STARTED


def _is_factory(source: str) -> bool:
    if source in MODELS or is_hub(source) or ":" not in source:
        return False
    # an object's text is spec:NAME too; a module of that name was imported
    return not source.startswith("spec:") or "spec" in sys.modules


def _code_file(file: Path) -> CodeFile:
    return CodeFile("" if is_newer(file) else hash_file(file).sha256, file.as_posix())


def _own_files() -> Iterator[tuple[str, Path]]:
    """The modules of the process that are neither installed nor of Python, by name."""
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or name.split(".")[0] == _OWN:
            continue
        if isinstance(file, str) and is_own(file) and (real := _real(Path(file))):
            yield name, real


def _real(file: Path) -> Path | None:
    """The file, or the archive that it is in; None if it is nowhere."""
    return next((path.resolve() for path in (file, *file.parents) if path.is_file()), None)


def _files_of_classes(module: torch.nn.Module | None) -> set[Path]:
    """The files of the user's classes in a model, also of those that were not imported by name."""
    kinds = {kind for each in (module.modules() if module else ()) for kind in type(each).__mro__}
    found: set[Path] = set()
    for value in (value for kind in kinds for value in vars(kind).values()):
        code = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
        file = getattr(code, "co_filename", "<")
        if not file.startswith("<") and is_own(file) and _FOLDER not in Path(file).parents:
            found |= {real} if (real := _real(Path(file))) else set()
    return found


def _imported_by(file: Path) -> set[str]:
    """The top-level names that a Python file imports; none if it is not Python's text."""
    found: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError, OSError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found


def _check_beside(source: str, given: Path, loaded: Mapping[str, Path]) -> None:
    """Raises `InputError` if the factory's file imports a module, and got one of another folder."""
    for name in sorted(_imported_by(given) & loaded.keys()):
        own = _file_of(name)
        if own is not None and given.parent in own.parents and loaded[name] != own:
            raise InputError(
                f"source {source}: its import of {name} gave {loaded[name]}, which this process "
                f"had imported before, and not {own}. Convert it in a new process"
            )


def _hashes(name: str, one: CodeFile) -> set[str]:
    """The hashes of all files that may be run as this module here."""
    module_file = getattr(sys.modules.get(name), "__file__", None)
    loaded = Path(module_file) if isinstance(module_file, str) else None
    found = {
        file for file in (loaded, _file_of(name), Path(one.file) if one.file else None) if file
    }
    hashes = set()
    for file in {real for file in found if (real := _real(file))}:
        with suppress(OSError):
            hashes.add(hash_file(file).sha256)
    return hashes


def _file_of(name: str) -> Path | None:
    """The file that an import of `name` would run. Nothing is imported to find it."""
    top, *others = name.split(".")
    spec = _spec_of(top)
    if spec is None:
        return None
    file = Path(spec.origin) if spec.origin else None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    for other in others:
        found = [at for place in places if (at := _below(place, other)) is not None]
        if not found:
            return None
        file = next((file for file, _ in found if file is not None), None)
        places = [folder for _, folder in found if folder is not None]
    return _real(file) if file is not None else None


def _below(place: Path, name: str) -> tuple[Path | None, Path | None] | None:
    """A module's file and a package's folder in a folder; None if there is neither."""
    endings = machinery.all_suffixes()
    folder = place / name
    for file in (folder / f"__init__{end}" for end in endings):
        if file.is_file():
            return file, folder
    for file in (place / f"{name}{end}" for end in endings):
        if file.is_file():
            return file, None
    return (None, folder) if folder.is_dir() else None


def _spec_of(name: str) -> ModuleSpec | None:
    """What an import of a top-level name would load, also if another one is loaded already."""
    for finder in sys.meta_path:
        with suppress(AttributeError, ImportError, ValueError, KeyError):
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None
