"""Loads plugins for custom ops.

Measured on TensorRT-RTX 1.7.1: its parser ignores a node's domain. It reads a custom node with the
name of a known op as that op, even if the node has a function body. It confuses two functions with
one name in two domains. It prefers a function to a plugin of the same name. So foreign nodes with a
known name are refused, and such functions are inlined. Functions that a plugin replaces are removed
from the model that is parsed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import BuildError, InputError
from pipeline.machine import offered
from pipeline.machine.child import Child, ChildDied
from pipeline.machine.offered import offered_file, offered_names
from pipeline.machine.python_file import line_of_error, run_python_file
from pipeline.machine.target import Target, use
from pipeline.plugins import PLUGINS
from pipeline.plugins.base import Plugin

Key = tuple[str, str, str]  # a creator's name, version and namespace


@dataclass(frozen=True)
class RequestedPlugin:
    """A requested plugin: the name that the user wrote, and its file unless it is in `PLUGINS`."""

    name: str
    file: Path | None = None


def find_plugins(asked: Sequence[str], target: Target) -> tuple[RequestedPlugin, ...]:
    """Looks up the values of ``--plugin``.

    They are libraries, Python files, names in `PLUGINS`, or names that installed packages offer.

    Raises:
        InputError: a file or name does not exist, or this TensorRT has no Python plugins.
    """
    found = []
    for name in dict.fromkeys(asked):
        file = plugin_file(name)
        if file is None and name not in PLUGINS:
            known = ", ".join([*PLUGINS, *offered_names(offered.PLUGINS)])
            raise InputError(
                f"unknown plugin {name!r}: give a library (libfoo.so), a Python file (foo.py) or "
                f"one of the pipeline's own, or of an installed package: {known}"
            )
        if file is not None and not file.is_file():
            raise InputError(f"plugin {name}: no such file")
        if file is not None and file.suffix == ".py" and not _has_python_plugins(target):
            raise InputError(
                f"plugin {name}: target {target} has no Python plugins (IPluginV3 came with "
                "TensorRT 10): give a C++ library"
            )
        found.append(RequestedPlugin(name, file))
    return tuple(found)


def plugin_file(name: str) -> Path | None:
    """The file that a value of ``--plugin`` stands for; None for a name in `PLUGINS` or unknown.

    Raises:
        InputError: see `offered_file`.
    """
    is_file = name.endswith(".py") or ".so" in Path(name).name or os.sep in name
    file = Path(name) if is_file else None
    if file is None and name not in PLUGINS:
        file = offered_file(offered.PLUGINS, name)
    return None if file is None else file.resolve()


@contextlib.contextmanager
def library_folder(target: Target) -> Iterator[Mapping[str, str]]:
    """Environment variables for the process that runs TensorRT.

    TensorRT-RTX opens ``libtensorrt_rtx.so`` by that name when it makes a plugin. If it doesn't
    find the file, it aborts the process. Its wheel has only ``libtensorrt_rtx.so.1``. So a folder
    with a link of that name goes first on LD_LIBRARY_PATH.
    """
    spec = (
        importlib.util.find_spec("tensorrt_rtx_libs") if target.flavour == "tensorrt_rtx" else None
    )
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    libraries = [file for place in places for file in sorted(place.glob("libtensorrt_rtx.so.*"))]
    if not libraries:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        (Path(folder) / "libtensorrt_rtx.so").symlink_to(libraries[0])
        path = os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
        yield {"LD_LIBRARY_PATH": path}


def find_plugin(name: str) -> Plugin:
    """Imports one of `PLUGINS`."""
    module, _, attribute = PLUGINS[name].partition(":")
    plugin: Plugin = getattr(importlib.import_module(module), attribute)
    return plugin


def provided_ops(plugins: Sequence[str], target: Target) -> frozenset[str]:
    """The names of the ops that plugins add to a target.

    The rewrite stage keeps functions of these names: TensorRT's parser looks plugins up by the op's
    name alone.

    Libraries and Python files are loaded in a child process to find out.

    Raises:
        InputError: see `find_plugins` and `load_plugins`.
        TargetMissing: a file, where the target's TensorRT is not installed.
        BuildError: a plugin ended the process.
    """
    asked = find_plugins(plugins, target)
    own = [find_plugin(plugin.name) for plugin in asked if plugin.file is None]
    ops = {plugin.name for plugin in own if plugin.runs_on(target)}
    files = tuple(plugin for plugin in asked if plugin.file is not None)
    if files:
        with library_folder(target) as env, Child(env) as child:
            try:
                ops |= child.call(_names_of, files, target)
            except ChildDied as died:
                names = ", ".join(plugin.name for plugin in files)
                raise BuildError(
                    f"target {target}: TensorRT crashed: {died.how}, while loading the "
                    f"plugin {names}",
                    detail=died.words,
                ) from None
    return frozenset(ops)


def _names_of(asked: Sequence[RequestedPlugin], target: Target) -> set[str]:
    """Runs in a child process."""
    brought, _ = load_plugins(use(target), asked, target)
    return {key[0] for keys in brought.values() for key in keys}


def load_plugins(
    trt: Any,
    asked: Sequence[RequestedPlugin],
    target: Target,
    doing: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, set[Key]], list[str]]:
    """Loads plugins into this process.

    Args:
        trt: the target's TensorRT module.
        doing: called with ``plugin libfoo.so`` before each, since a library can end the process.

    Returns:
        The creators that each plugin registered, by the name that the user wrote; and warnings.

    Raises:
        InputError: a library does not load, or a Python file raises; the message has the cause.
    """
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(None, "")
    brought, warnings = {}, []
    for plugin in asked:
        doing(f"plugin {plugin.name}")
        before = creators(trt)
        if plugin.file is None:
            own = find_plugin(plugin.name)
            if own.runs_on(target):
                own.register(trt)
            else:
                warnings.append(
                    f"plugin {plugin.name} does not exist for target {target}: the op's ONNX body "
                    "is used in its place"
                )
        elif plugin.name.endswith(".py"):
            _run_file(trt, plugin.name, plugin.file)
            if creators(trt) == before:
                raise InputError(
                    f"plugin {plugin.name}: registers no plugin creator; define register(trt), "
                    "which calls trt.get_plugin_registry().register_creator"
                )
        else:
            _open_library(trt, plugin.name, plugin.file)
        brought[plugin.name] = creators(trt) - before
    return brought, warnings


def creators(trt: Any) -> set[Key]:
    """Name, version and namespace of every plugin creator that TensorRT knows."""
    registry = trt.get_plugin_registry()
    # 10 and later list creators of all generations in all_creators, 8.6 in plugin_creator_list
    every = (
        registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    )
    return {(c.name, c.plugin_version, c.plugin_namespace) for c in every}


def registered_nothing(name: str, keys: set[Key]) -> bool:
    return not keys and ".so" in Path(name).name


def _has_python_plugins(target: Target) -> bool:
    return target.flavour == "tensorrt_rtx" or target.version >= (10,)


def _open_library(trt: Any, name: str, file: Path) -> None:
    """Opens a library. It registers itself, or exports getCreators or getPluginCreators."""
    try:
        library = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InputError(f"plugin {name}: the library does not load: {error}") from error
    exported = any(hasattr(library, f) for f in ("getCreators", "getPluginCreators"))
    registry = trt.get_plugin_registry()
    if exported and hasattr(registry, "load_library") and registry.load_library(str(file)) is None:
        raise InputError(
            f"plugin {name}: TensorRT refuses its plugins; others of the same names are "
            "registered already, or it is built for another TensorRT"
        )


def _run_file(trt: Any, name: str, file: Path) -> None:
    """Runs a Python file, and its function ``register(trt)`` if it has one."""
    try:
        module = run_python_file(file, f"pipeline_plugin_{file.stem}")  # keeps the creators alive
        if hasattr(module, "register"):
            module.register(trt)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"plugin {name}: {line_of_error(error, file)}: {type(error).__name__}: {error}",
            detail=traceback.format_exc(),
        ) from error
