"""Prints a table of a checkout's structure, as Markdown. Needs only Python's standard library.

    python structure.py [ROOT] [--places] [--walk FILE:FUNCTION:PARAM] [--json]
    python structure.py BEFORE AFTER            (two columns)

It counts in pipeline/ and in the folders that pipeline/ links to (passes, plugins, models):

- files directly in pipeline/: its .py files.
- lines by room: a room is a folder of pipeline/. Modules beside the folders are the room "(flat)".
- arrows between rooms: ordered pairs of rooms with at least one import, also in functions and under
  TYPE_CHECKING. An arrow is "up" if it is against the floors. The floors come from the layers
  contract of import-linter in the checkout's pyproject.toml, else from `FLOORS`. For arrows, the
  module errors is a room, __init__ is the face, and __main__ is on no floor.
- places that parse prose: see `prose`.
- functions with more than 7 arguments: positional and keyword-only arguments, without self and cls,
  *args and **kwargs.
- class names defined twice, including nested classes; `_Job` and `Job` are one name.
- Config through run(): see `Walk`. A stop is a call that passes Config, or a value derived from it,
  to a function of the project.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tomllib

MOST_ARGUMENTS = 7
FLAT = "(flat)"
FACE, MAIN = "(face)", "(main)"
BESIDE = {"errors"}  # modules that are floors by themselves
# low to high; rooms of one floor don't import each other
FLOORS = (
    ("errors",), ("machine",), ("spec",), ("graph",), ("passes", "plugins"), ("rewrite", "probe"),
    ("export",), ("models",), ("source",), ("artifact", "build"), ("runtime",), ("compare",),
    ("convert",), (FACE,), ("commands",),
)  # fmt: skip


# ---------------------------------------------------------------- the tree


@dataclass
class Module:
    """One file. `name` is dotted, and `path` is relative to the root."""

    name: str
    path: str
    text: str
    package: bool
    tree: ast.Module = field(repr=False)

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (len(parts) == 2 and self.package) else FLAT

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


class House:
    """A checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        seen: set[Path] = set()
        for file in sorted(self._files(root / "pipeline")):
            if (real := file.resolve()) in seen:
                continue
            seen.add(real)
            dotted = ".".join(file.relative_to(root).with_suffix("").parts)
            package = dotted.endswith(".__init__")
            name = dotted.removesuffix(".__init__")
            text = file.read_text()
            path = str(real.relative_to(root.resolve()))
            self.modules[name] = Module(name, path, text, package, ast.parse(text))

    def _files(self, folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():  # also links: passes, plugins and models are links
                if entry.name != "__pycache__":
                    yield from self._files(entry)
            elif entry.suffix == ".py":
                yield entry

    def resolved(self, module: Module, node: ast.ImportFrom) -> str:
        """The dotted name of ``from X import``."""
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if module.package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def imports(self, module: Module) -> Iterator[tuple[str, str | None, str]]:
        """(module, name in it or None, local name) of each import of the project's modules."""
        for node in ast.walk(module.tree):
            yield from self.imported(module, node)

    def imported(self, module: Module, node: ast.AST) -> Iterator[tuple[str, str | None, str]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in self.modules:
                    yield alias.name, None, alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = self.resolved(module, node)
            for alias in node.names:
                if f"{base}.{alias.name}" in self.modules:
                    yield f"{base}.{alias.name}", None, alias.asname or alias.name
                elif base in self.modules:
                    yield base, alias.name, alias.asname or alias.name


# ---------------------------------------------------------------- rooms and arrows


def floors(house: House) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The floors from low to high, and the place where they are stated."""
    project = house.root / "pyproject.toml"
    if project.is_file():
        tools = tomllib.loads(project.read_text()).get("tool", {})
        for contract in tools.get("importlinter", {}).get("contracts", ()):
            if contract.get("type") == "layers":
                rows = [
                    tuple(
                        name.strip(" ()").removeprefix("pipeline.")
                        for name in re.split(r"[|:]", row)
                    )
                    for row in contract["layers"]
                ]
                return tuple(reversed(rows)), "pyproject.toml"
    return FLOORS, "the plan"


def arrow_room(house: House, name: str, known: set[str]) -> str:
    module = house.modules[name]
    if name in ("pipeline", "pipeline.__main__"):
        return FACE if name == "pipeline" else MAIN
    last = name.removeprefix("pipeline.")
    return last if module.room == FLAT and last in known & BESIDE else module.room


def arrows(house: House) -> tuple[set[tuple[str, str]], list[tuple[str, str]], str]:
    rows, where = floors(house)
    rank = {room: i for i, row in enumerate(rows) for room in row}
    found: set[tuple[str, str]] = set()
    for module in house.modules.values():
        a = arrow_room(house, module.name, set(rank))
        for target, _, _ in house.imports(module):
            b = arrow_room(house, target, set(rank))
            if a != b:
                found.add((a, b))
    up = [(a, b) for a, b in sorted(found) if a in rank and b in rank and rank[a] <= rank[b]]
    return found, up, where


def single_arrows(house: House) -> int:
    """The arrows if each module beside the rooms were a room."""
    found = set()
    for module in house.modules.values():
        a = module.name if module.room == FLAT else module.room
        for target, _, _ in house.imports(module):
            other = house.modules[target]
            b = other.name if other.room == FLAT else other.room
            found |= {(a, b)} if a != b else set()
    return len(found)


def written_paths(house: House) -> list[str]:
    """Functions named by text such as ``"pipeline.build:_build_here"``, which no import shows."""
    return [
        f"{m.path}:{n.lineno} {n.value}"
        for m in house.modules.values()
        for n in ast.walk(m.tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
        and re.fullmatch(r"pipeline(?:\.\w+)+:\w+", n.value)
    ]  # fmt: skip


# ---------------------------------------------------------------- arguments and classes


def long_calls(house: House) -> list[tuple[str, int]]:
    found = []
    for module in house.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
                count = len(names) - (names[:1] in (["self"], ["cls"])) + len(node.args.kwonlyargs)
                if count > MOST_ARGUMENTS:
                    found.append((f"{module.path}:{node.lineno} {node.name}", count))
    return sorted(found, key=lambda row: (-row[1], row[0]))


def twins(house: House) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for module in house.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{module.path}:{node.lineno}")
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


# ---------------------------------------------------------------- prose

# names of variables and attributes with sentences of the pipeline
CARRIERS = frozenset((
    "note", "notes", "why", "words", "detail", "details", "text", "texts", "message", "messages",
    "reason", "reasons", "line", "lines", "what", "where", "do", "how", "complaint", "complaints",
    "hint", "hints", "declare", "cause", "causes", "finding", "findings", "refinement",
    "refinements", "problem", "problems", "said", "told", "label", "stderr", "error", "errors",
    "rule", "rules", "size_rule", "origin", "sentence", "trail", "warning", "warnings", "e",
    "output", "printed",
))  # fmt: skip
METHODS = frozenset((
    "startswith", "endswith", "partition", "rpartition", "split", "rsplit", "removeprefix",
    "removesuffix", "replace", "find", "rfind",
))  # fmt: skip
_THROUGH = frozenset(("strip", "lstrip", "rstrip", "lower", "casefold", "format", "group"))
_WRAPPERS = frozenset(("str", "reversed", "sorted", "list", "tuple"))
_OF_NODES = frozenset(("origin_of", "line_of"))  # functions that return such a sentence
_RE = frozenset(("match", "search", "fullmatch", "findall", "finditer", "sub", "subn", "split"))

FOREIGN = "another program's words (torch, TensorRT, ONNX Runtime, onnx, the kernel)"
USER = "what the user wrote"
LANGUAGE = "an expression of sizes: a language with a grammar, not prose"
FORMAT = "a file format, an expression of code or a template: no sentence"
# the reviewed exceptions, by expression, so that they also apply to moved code
ALLOWED: dict[str, tuple[str, ...]] = {
    FOREIGN: (
        "re.search(advice.text, text)",
        "_PARSER.finditer(said.text)",
        "_MYELIN.finditer(said.text)",
        "_MYELIN_WHY.search(said.text)",
        "_BEFORE_COLON.finditer(said.text)",
        r"said.text[match.end():].split('\n[')",
        "re.search(pattern, said.text)",
        "why.startswith('Invalid Node - ')",
        "_INNER.search(text)",
        "_WORDS.search(why)",
        """_CHECK.sub(lambda match: f" ({match['values']})", why)""",
        "_SOURCE.sub('', why)",
        "_MYELIN_CHECK.search(text)",
        "_MYELIN_CHECK.sub('', text)",
        r"re.search('\\baxis \\d', text)",
        "re.search('Unsupported model IR version.* max supported .*: (\\\\d+)', error.detail)",
        r"re.sub('/\\S+\\.(?:cc|h):\\d+ .*\\) ', '', str(error))",
        "_NODE.search(text)",
        "_STOPPED in text",
        "_WAS_RUNNING.search(text)",
        "_LOADING.search(text)",
        "text.split('Status Message: ')",
        "_NO_MEMORY.search(str(error))",
        r"re.sub('\\d+', '', self.refused[self.key(sizes)].error)",
        "text.splitlines()[0].removeprefix('[ShapeInferenceError] ')",
        "'not self-consistent' in warning",
        r"re.search('[Nn]ame: (?P<name>.*?) ?OpType: (?P<op>\\w+)', text)",
        "text.partition('==> Context')",
        "_AT_NODE.search(line)",
        "_LAYER.findall(line)",
        "message.partition('Suggested fixes:')",
        "_FIX.match(line)",
        "_FIXED.finditer(message)",
        "_SYMBOL.match(text)",
        "_GUARD.match(text)",
        "_AT.search(said.text)",
        "_INCONSISTENT.search(warning)",
        "line.startswith('MemAvailable:')",
        "line.startswith('VmHWM:')",
        "'Bad node spec' in line",
        "'torchvision::' in str(error)",
        "'torchvision::' not in str(error)",
        "'operator torchvision::' not in text",
        "'Suggested fixes:' in text",
        "'code specialized it to be a constant' in text",
        "'File ' in line",
        "line.startswith('File \"')",
        "lines[starts[-1]].removeprefix('File \"')",
        "re.search(pattern, text)",
        "_BY_VALUES.search(rule.failed.error)",
    ),
    USER: (
        "'--debug' in words",
        "text.partition('=')",
        "text.rpartition('=')",
        "text.split('..')",
        "text.split(',')",
        "text.partition(':')",
        "text.rpartition(':')",
        "where.endswith('.py')",
        r"re.fullmatch('[A-Za-z_]\\w*', text)",
        "_MULTIPLE.fullmatch(text)",
        r"re.fullmatch('[1-9]\\d*', text)",
        r"re.fullmatch('[\\w\\s+*]+', text)",
    ),
    LANGUAGE: (
        r"re.findall('[A-Za-z_]\\w*', text)",
        r"re.sub('[A-Za-z_]\\w*', put, text)",
        r"re.sub('\\W+', '_', text, flags=re.ASCII)",
        r"re.search('//|%|m(in|ax)\\(', texts)",
        r"re.search('\\b(Min|Max)\\(', text)",
        r"re.findall('\\d+', text)",
        "re.search('//|%', text)",
        r"re.findall('\\w+|//|[-+*%]', text)",
        r"re.sub('\\((\\w+)\\)', '\\1', words)",
        r"re.search(f'\\b{name}\\b', words)",
        r"re.sub('\\b[A-Za-z]\\w*\\b', lambda m: symbols.get(m[0], m[0]), words)",
        "text.replace(f'_{name}', 'n')",
        "re.split('(<=|>=|==|!=|<|>)', text)",
        r"re.fullmatch('\\w+', text)",
        "SYMBOL_NAME.sub(lambda m: str(symbols.get(m[0], m[0])), text)",
        "SYMBOL_NAME.sub(lambda m: symbols[m[0]].formula, text)",
        r"re.sub('\\b[a-z]\\d+\\b', replacement, text)",
        r"re.fullmatch('(?:(\\d+)\\*)?([a-z]\\d+)', text)",
        r"re.sub(f'\\b{re.escape(padded_name(name))}\\b', whole, text)",
        r"re.sub(f'\\b{re.escape(gone)}\\b', kept, text)",
    ),
    FORMAT: (
        "line.startswith(_PHASE)",
        "line.removeprefix(_PHASE)",
        "line.startswith(_PARSING)",
        "line.removeprefix(_PARSING)",
        "line.startswith(_LAYERS)",
        "line.removeprefix(_LAYERS)",
        "text.replace('%', '%%')",
        "_NO_XML.sub('?', text)",
        "_MENTIONED.search(text)",
        "_NAME.fullmatch(text)",
        "_PATH.fullmatch(text)",
        "text.split('.')",
        "text.split('=>', 1)",
        "f'] {k}' in text",
        "text.replace('_N', f'_{number}')",
        r"re.search(f'\\b{name}\\b', text)",
    ),
}
_REASON = {expression: why for why, rows in ALLOWED.items() for expression in rows}


def _carries(node: ast.expr) -> bool:  # noqa: PLR0911
    """True for a name or attribute of `CARRIERS`, or for a value made from one."""
    if isinstance(node, ast.Name):
        return node.id in CARRIERS
    if isinstance(node, ast.Attribute):
        return node.attr in CARRIERS
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _carries(node.value)
    if isinstance(node, ast.BoolOp):
        return any(_carries(value) for value in node.values)
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            wrapped = called.id in _WRAPPERS and bool(node.args) and _carries(node.args[0])
            return wrapped or called.id in _OF_NODES
        if isinstance(called, ast.Attribute):
            through = called.attr in METHODS | _THROUGH | {"splitlines"}
            return (through and _carries(called.value)) or called.attr in CARRIERS
    return False


def _is_text(node: ast.expr) -> bool:
    """True for a literal text, an f-string, a constant by its name, or a collection of these."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.Name):
        return node.id.strip("_").isupper()
    return isinstance(node, ast.JoinedStr)


def _asks(node: ast.AST) -> bool:
    """True if this expression takes a sentence apart or searches in it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, holder = node.func.attr, node.func.value
        if name in METHODS and node.args and _carries(holder):
            first = node.args[0]
            return not isinstance(first, ast.Constant) or (
                isinstance(first.value, str) and bool(first.value.strip())
            )
        if name in _RE and isinstance(holder, ast.Name):
            own = holder.id == "re"
            at = own + (name in ("sub", "subn"))
            if own or holder.id.strip("_").isupper():
                return len(node.args) > at and _carries(node.args[at])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        (right,) = node.comparators
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            return _carries(right) and _is_text(node.left)
        if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            sides = (node.left, right), (right, node.left)
            return any(
                _carries(a) and isinstance(b, ast.Constant) and isinstance(b.value, str)
                and " " in b.value for a, b in sides
            )  # fmt: skip
    return False


def prose(house: House) -> tuple[dict[str, list[str]], Counter[str]]:
    """Places that parse the pipeline's sentences, and the number of allowed places of each kind.

    A place is a line (statement) that searches in a variable or attribute of the names `CARRIERS`.
    It does so with a string method, ``in``, a comparison or a regular expression. `ALLOWED` lists
    expressions that read the text of another program, the user's text, or a language. A person
    reviewed each of them. A new expression is a place until a person has reviewed it.

    Returns:
        ``file:line function`` to the expressions, and the number of allowed expressions by reason.
    """
    places: dict[str, list[str]] = defaultdict(list)
    allowed: Counter[str] = Counter()

    def visit(node: ast.AST, module: Module, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if _asks(node):
            expression = ast.unparse(node)
            if expression in _REASON:
                allowed[_REASON[expression]] += 1
            elif not any(
                ast.unparse(inner) in _REASON
                for inner in ast.walk(node)
                if isinstance(inner, (ast.Call, ast.Compare))
            ):
                places[f"{module.path}:{node.lineno} {function}"].append(expression)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            visit(child, module, function)

    for module in house.modules.values():
        visit(module.tree, module, "")
    return dict(places), allowed


# ---------------------------------------------------------------- the walk

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A function of the project: its module, its class, and its definition."""

    module: str
    holder: str
    node: _Function = field(compare=False, hash=False)
    name: str = ""

    @property
    def parameters(self) -> list[str]:
        a = self.node.args
        return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


class Walk:
    """Follows one parameter, call by call.

    Inside of a function, a name is *derived* if it is the parameter, or if it is assigned or looped
    over from a derived expression. In such an expression a derived name occurs unchanged:

    - as the holder of an attribute, an item or a method
    - as a part of a container
    - as an argument of a constructor, or of a function outside of the project

    With `results`, a call of a project's function is also derived if its returned expression is
    derived (the spec that find_source(config) returns).

    A *stop* is a call that passes a derived value to a function of the project. The value is an
    argument, or the object of a method that only one class defines. Each place in the code counts
    once. The walk continues inside of the callee, with the parameters that it got. A function may
    also be passed on with derived values (to run it in a process), or named by a text such as
    "pipeline.build:_build_here". Such a function counts as called. All branches are walked.
    """

    def __init__(self, house: House, results: bool = False) -> None:
        self.house, self.results = house, results
        self.stops: set[tuple[str, int, int]] = set()
        self.files: set[str] = set()
        self.functions: set[tuple[str, str, str]] = set()
        self._memo: dict[tuple[str, str, str, frozenset[str]], bool] = {}

    @cached_property
    def _functions(self) -> dict[tuple[str, str, str], Place]:
        found = {}
        for module in self.house.modules.values():
            for node in module.tree.body:
                if isinstance(node, _Function):
                    found[module.name, "", node.name] = Place(module.name, "", node, node.name)
                elif isinstance(node, ast.ClassDef):
                    for inner in node.body:
                        if isinstance(inner, _Function):
                            place = Place(module.name, node.name, inner, inner.name)
                            found[module.name, node.name, inner.name] = place
        return found

    @cached_property
    def _classes(self) -> set[tuple[str, str]]:
        return {
            (m.name, n.name)
            for m in self.house.modules.values()
            for n in m.tree.body
            if isinstance(n, ast.ClassDef)
        }

    @cached_property
    def _methods(self) -> dict[str, list[Place]]:
        found: dict[str, list[Place]] = defaultdict(list)
        for (_, holder, name), place in self._functions.items():
            if holder and not name.startswith("__"):
                found[name].append(place)
        return found

    @cached_property
    def _names(self) -> dict[str, dict[str, tuple[str, str | None]]]:
        """module -> local name -> (module, name in it)."""
        return {
            m.name: {local: (target, name) for target, name, local in self.house.imports(m)}
            for m in self.house.modules.values()
        }

    def _target(self, module: str, name: str, depth: int = 0) -> tuple[str, str] | None:
        """The module and the name where a name of this module is defined."""
        if (module, "", name) in self._functions or (module, name) in self._classes:
            return module, name
        found = self._names.get(module, {}).get(name)
        if found and found[1] is not None and depth < 5:
            return self._target(found[0], found[1], depth + 1)
        return None

    def _named(self, module: str, node: ast.expr) -> Place | tuple[str, str] | None:
        """The function or class that an expression names."""
        target = None
        if isinstance(node, ast.Name):
            target = self._target(module, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = self._names.get(module, {}).get(node.value.id)
            if found and found[1] is None:
                target = self._target(found[0], node.attr)
            elif owner := self._target(module, node.value.id):
                return self._functions.get((owner[0], owner[1], node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(pipeline(?:\.\w+)+):(\w+)", node.value)
            target = (match[1], match[2]) if match else None
        if target is None:
            return None
        return self._functions.get((target[0], "", target[1])) or (
            target if target in self._classes else None
        )

    def start(self, file: str, function: str, parameter: str) -> None:
        for (module, _, name), place in self._functions.items():
            if name == function and self.house.modules[module].path == file:
                if parameter not in place.parameters:
                    raise SystemExit(f"{function} has no parameter {parameter}")
                self._enter(place, frozenset([parameter]))
                return
        raise SystemExit(f"{file} has no function {function}")

    def _enter(self, place: Place, given: frozenset[str]) -> bool:
        """Walks a function. Returns True if its result is derived."""
        key = (place.module, place.holder, place.name, given)
        if key in self._memo:
            return self._memo[key]
        self._memo[key] = False
        self.files.add(self.house.modules[place.module].path)
        self.functions.add(key[:3])
        derived = set(given)
        while True:
            size = len(derived)
            for node in ast.walk(place.node):
                for target, value in _assignments(node):
                    if self._derived(value, derived, place):
                        derived |= _bound(target)
            if len(derived) == size:
                break
        returned = False
        for node in ast.walk(place.node):
            if isinstance(node, ast.Call):
                self._derived(node, derived, place)
            elif isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value:
                returned |= self._derived(node.value, derived, place)
        self._memo[key] = returned
        return returned

    def _derived(self, node: ast.AST, derived: set[str], place: Place) -> bool:
        if isinstance(node, ast.Name):
            return node.id in derived
        if isinstance(node, (ast.Compare, ast.Constant)):
            return False  # a bool is not derived
        if isinstance(node, ast.Call):
            return self._call(node, derived, place)
        if isinstance(node, ast.IfExp):
            return any(self._derived(n, derived, place) for n in (node.body, node.orelse))
        if isinstance(node, ast.Lambda):
            return self._derived(node.body, derived, place)
        return any(
            self._derived(child, derived, place)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.expr, ast.comprehension, ast.keyword, ast.FormattedValue))
        )

    def _call(self, node: ast.Call, derived: set[str], place: Place) -> bool:
        values = [*node.args, *(k.value for k in node.keywords)]
        flags = [self._derived(value, derived, place) for value in values]
        holder = isinstance(node.func, ast.Attribute) and self._derived(
            node.func.value, derived, place
        )
        if not any(flags) and not holder:
            return False
        for value in values:  # a function that is passed on with derived values
            handed = self._named(place.module, value)
            if isinstance(handed, Place) and any(flags):
                self._stop(node, place)
                self._enter(handed, frozenset(handed.parameters))
        callee = self._named(place.module, node.func)
        if callee is None and isinstance(node.func, ast.Attribute):
            own = isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "cls")
            if own and place.holder:
                callee = self._functions.get((place.module, place.holder, node.func.attr))
            elif holder and len(self._methods[node.func.attr]) == 1:
                callee = self._methods[node.func.attr][0]
        if isinstance(callee, tuple):  # a class: into its __init__, if it has one
            made = self._functions.get((*callee, "__init__"))
            if made is None:
                return True
            self._visit(node, made, flags, True, place)
            return True
        if callee is None:
            return True
        bound = bool(callee.holder) and callee.parameters[:1] in (["self"], ["cls"])
        return self._visit(node, callee, flags, bound, place, holder)

    def _visit(
        self, node: ast.Call, callee: Place, flags: list[bool], bound: bool, place: Place,
        holder: bool = False,
    ) -> bool:  # fmt: skip
        names = callee.parameters[bound:]
        given = {names[i] for i, _ in enumerate(node.args) if flags[i] and i < len(names)}
        rest = flags[len(node.args) :]
        for keyword, flag in zip(node.keywords, rest, strict=True):
            if flag:
                given |= {keyword.arg} & set(names) if keyword.arg else set(names)
        if bound and holder:
            given.add(callee.parameters[0])
        if not given:
            return False
        self._stop(node, place)
        return self._enter(callee, frozenset(given)) and self.results

    def _stop(self, node: ast.Call, place: Place) -> None:
        self.stops.add((self.house.modules[place.module].path, node.lineno, node.col_offset))


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
        yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr


def _bound(target: ast.AST) -> set[str]:
    """The names that an assignment binds; for ``a.b = x`` and ``a[i] = x``: a."""
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def walk(house: House, start: str = "", results: bool = False) -> Walk | None:
    """Config's walk through run(), wherever that stands."""
    if not start:
        for file in ("pipeline/convert/driver.py", "pipeline/driver.py"):
            if any(m.path == file for m in house.modules.values()):
                start = f"{file}:run:config"
                break
        else:
            return None
    found = Walk(house, results)
    found.start(*start.split(":"))
    return found


# ---------------------------------------------------------------- the table


def rows(house: House, start: str = "") -> dict[str, str]:
    """The table's rows."""
    found: dict[str, str] = {}
    direct = [m for m in house.modules.values() if m.path.count("/") == 1 and m.room == FLAT]
    hidden = [m for m in direct if Path(m.path).name.startswith("_") and "__" not in m.path]
    found["files directly in pipeline/"] = f"{len(direct)} ({len(hidden)} of them `_x`)"
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module in house.modules.values():
        lines[module.room] += module.lines
        files[module.room] += 1
    found["lines, all rooms"] = f"{sum(lines.values())} in {sum(files.values())} files"
    for room in sorted(lines, key=lambda r: (r != FLAT, r)):
        found[f"lines of {room}"] = f"{lines[room]} in {files[room]} files"
    pairs, up, where = arrows(house)
    found["rooms"] = str(len(lines))
    found["arrows between rooms"] = str(len(pairs))
    found["of these, against the floors"] = f"{len(up)} (floors of {where})"
    found["arrows, each file beside the rooms as a room"] = str(single_arrows(house))
    modules = {
        (m.name, t) for m in house.modules.values() for t, _, _ in house.imports(m) if t != m.name
    }
    found["imports between files"] = str(len(modules))
    found["functions named by a text"] = str(len(written_paths(house)))
    places, allowed = prose(house)
    distinct = len({place.split(":")[0] for place in places})
    found["places that parse prose"] = f"{len(places)} in {distinct} files"
    found["reads of foreign or user's text, sizes, formats (allowed)"] = str(sum(allowed.values()))
    found[f"functions with more than {MOST_ARGUMENTS} arguments"] = str(len(long_calls(house)))
    names = twins(house)
    found["class names defined twice"] = f"{len(names)}, by {sum(map(len, names.values()))} classes"
    for results in (False, True):
        walked = walk(house, start, results)
        if walked:
            what = f"Config through run(){', results of calls too' if results else ''}"
            found[f"{what}: stops"] = str(len(walked.stops))
            found[f"{what}: functions"] = str(len(walked.functions))
            found[f"{what}: files"] = str(len(walked.files))
    return found


def details(house: House, start: str = "") -> str:
    """All places behind the numbers."""
    pairs, up, _ = arrows(house)
    places, allowed = prose(house)
    walked = walk(house, start)
    blocks = {
        "arrows between rooms": [f"{a} -> {b}" for a, b in sorted(pairs)],
        "against the floors": [f"{a} -> {b}" for a, b in up],
        "functions named by a text": written_paths(house),
        "places that parse prose": [f"{p}: {'; '.join(e)}" for p, e in places.items()],
        "allowed": [f"{n} of {why}" for why, n in allowed.most_common()],
        f"more than {MOST_ARGUMENTS} arguments": [f"{p}: {n}" for p, n in long_calls(house)],
        "class names defined twice": [f"{n}: {', '.join(p)}" for n, p in twins(house).items()],
        "files that Config enters": sorted(walked.files) if walked else [],
    }
    return "\n".join(
        f"\n## {title}: {len(lines)}\n\n" + "\n".join(f"- {line}" for line in lines)
        for title, lines in blocks.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--places", action="store_true", help="also every place behind a figure")
    parser.add_argument("--walk", default="", metavar="FILE:FUNCTION:PARAM")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    houses = [House(root) for root in options.root]
    tables = [rows(house, options.walk) for house in houses]
    if options.json:
        print(json.dumps(tables if len(tables) > 1 else tables[0], indent=2))
        return 0
    heads = ["before", "after"] if len(tables) == 2 else [str(r) for r in options.root]
    print("| | " + " | ".join(heads) + " |\n|---|" + "---|" * len(tables))
    keys = list(dict.fromkeys(key for table in tables for key in table))
    for key in sorted(keys, key=lambda k: (_order(k), keys.index(k))):
        print(f"| {key} | " + " | ".join(table.get(key, "-") for table in tables) + " |")
    if options.places:
        print(details(houses[-1], options.walk))
    return 0


_ORDER = ("files directly", "lines, all", "lines of", "rooms", "arrows", "of these", "imports")


def _order(key: str) -> int:
    return next((i for i, head in enumerate(_ORDER) if key.startswith(head)), len(_ORDER))


if __name__ == "__main__":
    sys.exit(main())
