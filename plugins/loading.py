"""Custom ops: loading plugins, and looking every custom node up before TensorRT parses the model.

Measured on TensorRT-RTX 1.7.1: its parser does not look at a node's domain. A custom node with
the name of an op that the parser knows is read as that op, whatever its domain and whether it
has a function body or not; two functions of one name in two domains are taken for one; and a
function goes before a plugin of the same name. So foreign nodes of a known name are refused, such
functions are inlined, and functions for which a plugin was asked for are taken out of the model
that is parsed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner

from pipeline.build.refusal import called, origin_of
from pipeline.errors import BuildError, InputError
from pipeline.graph.files import nodes_of
from pipeline.machine.child import Child, ChildDied
from pipeline.machine.target import Target, use
from pipeline.plugins import PLUGINS
from pipeline.plugins.base import DOMAIN, Plugin

_STANDARD = ("", "ai.onnx")
_LIBRARY = "give the library that holds its plugin: --plugin libfoo.so"
# where the ops of well-known domains come from
DOMAINS: dict[str, str] = {
    "com.microsoft": "ONNX Runtime's optimiser fused it: export without that optimiser",
    "com.microsoft.nchwc": "ONNX Runtime's optimiser fused it: export without that optimiser",
    "ai.onnx.contrib": "it is ONNX Runtime Extensions': leave pre- and post-processing out of the "
    "graph",
    "ai.onnx.ml": "it is classical machine learning, which TensorRT does not do: leave it out of "
    "the graph",
    "mmdeploy": "it is in MMDeploy's library: --plugin libmmdeploy_tensorrt_ops.so",
    "org.pytorch.aten": "the exporter had no ONNX for this torch op and left a fallback: export "
    "with torch.onnx.export(dynamo=True), or write its translation",
}
Key = tuple[str, str, str]  # a creator's name, version and namespace


@dataclass(frozen=True)
class Asked:
    """A plugin that was asked for: as the user wrote it, and its file unless it is of `PLUGINS`."""

    name: str
    file: Path | None = None


@dataclass(frozen=True)
class Ready:
    """A model that can be parsed.

    Args:
        model: the file to parse: the model itself, or a changed copy beside it.
        plugins: those asked for that its nodes need, as the user wrote them.
        warnings: one sentence each.
    """

    model: Path
    plugins: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def find_plugins(asked: Sequence[str], target: Target) -> tuple[Asked, ...]:
    """Looks up what ``--plugin`` names: a library, a Python file, or one of `PLUGINS`.

    Raises:
        InputError: no such file or plugin, or a Python plugin where TensorRT has none.
    """
    found = []
    for name in dict.fromkeys(asked):
        is_file = name.endswith(".py") or ".so" in Path(name).name or os.sep in name
        if not is_file and name not in PLUGINS:
            known = ", ".join(PLUGINS) or "none"
            raise InputError(
                f"unknown plugin {name!r}: give a library (libfoo.so), a Python file (foo.py) or "
                f"one of the pipeline's own: {known}"
            )
        file = Path(name).resolve() if is_file else None
        if file is not None and not file.is_file():
            raise InputError(f"plugin {name}: no such file")
        if name.endswith(".py") and not _has_python_plugins(target):
            raise InputError(
                f"plugin {name}: target {target} has no Python plugins (IPluginV3 came with "
                "TensorRT 10): give a C++ library"
            )
        found.append(Asked(name, file))
    return tuple(found)


@contextlib.contextmanager
def library_folder(target: Target) -> Iterator[Mapping[str, str]]:
    """Environment variables for the process that runs TensorRT.

    TensorRT-RTX opens ``libtensorrt_rtx.so`` by that name when it makes a plugin, and aborts the
    process where it doesn't find it; its wheel has ``libtensorrt_rtx.so.1`` only. So a folder
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
    """One of `PLUGINS`, imported."""
    module, _, attribute = PLUGINS[name].partition(":")
    plugin: Plugin = getattr(importlib.import_module(module), attribute)
    return plugin


def provided_ops(plugins: Sequence[str], target: Target) -> frozenset[str]:
    """The names of the ops that plugins bring to a target, so that the rewrite stage can keep
    the functions of these names (TensorRT's parser looks plugins up by the op's name alone).

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
                ops |= child.call("pipeline.plugins.loading:_names_of", files, target)
            except ChildDied as died:
                names = ", ".join(plugin.name for plugin in files)
                raise BuildError(
                    f"target {target}: TensorRT's process died: {died.how}, while it loaded the "
                    f"plugin {names}",
                    detail=died.words,
                ) from None
    return frozenset(ops)


def _names_of(asked: Sequence[Asked], target: Target) -> set[str]:
    """In a child."""
    brought, _ = load_plugins(use(target), asked, target)
    return {key[0] for keys in brought.values() for key in keys}


def load_plugins(
    trt: Any,
    asked: Sequence[Asked],
    target: Target,
    doing: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, set[Key]], list[str]]:
    """Loads plugins into this process.

    Args:
        trt: the target's TensorRT module.
        doing: is told ``plugin libfoo.so`` before each, since a library can end the process.

    Returns:
        The creators that each registered, by its name as the user wrote it; and warnings.

    Raises:
        InputError: a library does not load, or a Python file raises; in their own words.
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
    # 10 and later list those of every generation in all_creators, 8.6 in plugin_creator_list
    every = (
        registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    )
    return {(c.name, c.plugin_version, c.plugin_namespace) for c in every}


def prepare(
    trt: Any,
    model: Path,
    spare: Path,
    target: Target,
    brought: Mapping[str, set[Key]],
    reads: Callable[[str], bool],
) -> Ready:
    """Looks every custom node up, and writes a changed copy of the model where one is needed.

    Args:
        model: the ONNX file.
        spare: where a changed copy goes; in the same folder, for the external data.
        brought: what `load_plugins` returned.
        reads: whether TensorRT's parser has an op of that name (`OnnxParser.supports_operator`).

    Raises:
        BuildError: a custom node that nobody knows; it is named, and where to get its plugin.
    """
    proto = onnx.load(model, load_external_data=False)
    registry = creators(trt)
    wanted = {key[0] for keys in brought.values() for key in keys}
    given = len(proto.functions)
    for place in reversed(range(given)):
        if proto.functions[place].name in wanted:
            del proto.functions[place]
    changed = len(proto.functions) < given
    names = Counter(function.name for function in proto.functions)
    misread = [(f.domain, f.name) for f in proto.functions if names[f.name] > 1 or reads(f.name)]
    if misread:
        proto = onnx.inliner.inline_selected_functions(proto, misread)
        changed = True
    functions = {(function.domain, function.name) for function in proto.functions}
    used: set[Key] = set()
    for node in (*nodes_of(proto.graph), *(n for f in proto.functions for n in f.node)):
        if node.domain in _STANDARD or (node.domain, node.op_type) in functions:
            continue
        key = _key(node)
        if key in registry and not reads(node.op_type):
            used.add(key)
        elif not reads(node.op_type):
            raise BuildError(_missing(node, target, key, registry))
        elif onnx.defs.has(node.op_type):  # else an op of TensorRT's own, such as TRT_FP8...
            raise BuildError(
                f"target {target} would read the {called(node)}{origin_of(node)} as the standard "
                f"{node.op_type}, whatever its domain: {DOMAINS.get(node.domain, 'rename the op')}"
            )
    if changed:
        onnx.save(proto, spare)
    # a library that registered nothing may be what another one needs
    needed = tuple(name for name, keys in brought.items() if keys & used or _silent(name, keys))
    return Ready(spare if changed else model, needed)


def _silent(name: str, keys: set[Key]) -> bool:
    return not keys and ".so" in Path(name).name


def _key(node: onnx.NodeProto) -> Key:
    """What TensorRT's parser looks a node up by."""
    words = {a.name: a.s.decode(errors="replace") for a in node.attribute if a.type == a.STRING}
    return node.op_type, words.get("plugin_version", "1"), words.get("plugin_namespace", "")


def _missing(node: onnx.NodeProto, target: Target, key: Key, registry: set[Key]) -> str:
    what = f"target {target} has no plugin for the {called(node)}{origin_of(node)}"
    others = sorted(k for k in registry if k[0] == key[0])
    if others:
        there = ", ".join(f"version {v!r} namespace {n!r}" for _, v, n in others)
        return (
            f"{what} of version {key[1]!r} and namespace {key[2]!r}; there is {there}: set the "
            "node's attributes plugin_version and plugin_namespace"
        )
    if node.domain == DOMAIN:
        for name in PLUGINS:
            plugin = find_plugin(name)
            if plugin.name == node.op_type:
                here = plugin.runs_on(target)
                where = f"--plugin {name}" if here else "it does not exist for this target"
                return f"{what}: it is the pipeline's own: {where}"
    return f"{what}: {DOMAINS.get(node.domain, _LIBRARY)}"


def _has_python_plugins(target: Target) -> bool:
    return target.flavour == "tensorrt_rtx" or target.version >= (10,)


def _open_library(trt: Any, name: str, file: Path) -> None:
    """Libraries that register themselves when they are opened, and those that export getCreators
    or getPluginCreators for the registry."""
    try:
        library = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InputError(f"plugin {name}: does not load: {error}") from error
    exported = any(hasattr(library, f) for f in ("getCreators", "getPluginCreators"))
    registry = trt.get_plugin_registry()
    if exported and hasattr(registry, "load_library") and registry.load_library(str(file)) is None:
        raise InputError(
            f"plugin {name}: TensorRT does not take its plugins; others of the same names are "
            "registered already, or it is built for another TensorRT"
        )


def _run_file(trt: Any, name: str, file: Path) -> None:
    """Runs a Python file, and its function ``register(trt)`` if it has one."""
    spec = importlib.util.spec_from_file_location(f"pipeline_plugin_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # keeps the creators alive
    try:
        spec.loader.exec_module(module)
        if hasattr(module, "register"):
            module.register(trt)
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        line = (
            error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else 0
        )
        raise InputError(
            f"plugin {name}: line {line}: {type(error).__name__}: {error}",
            detail=traceback.format_exc(),
        ) from error
