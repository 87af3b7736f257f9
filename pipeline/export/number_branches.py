"""Branches on sizes that only choose numbers, pad or crop, as arithmetic on sizes.

torch.export follows one side of each branch. Window attention, say, does not shift its windows
where one window covers the image::

    if window >= height:
        shift[0] = 0

Both sides of such a branch only give numbers to names and to elements of lists. So its function is
compiled again with the branch as arithmetic (`pipeline.export.select`): the shift becomes a size
that is 0 there. A side may also pad or crop a tensor (``x = F.pad(x, (0, n))``, ``x = x[:, :-n]``):
on the other side, a copy of it is padded by 0, or a view of it is cropped to its size. If one of
the two is written to later, the branch stays. That is done while torch traces, for the lines that
are named. The program is checked like any other.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from pipeline.export.asked import Line
from pipeline.export.cut import copies_watched
from pipeline.export.exchange import Exchange

_SELECT = "__import__('pipeline.export.select', None, None, ['select'])"
_CUT = "__import__('pipeline.export.cut', None, None, ['cut'])"
_PURE = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Call, ast.expr_context,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip
_FUNCTIONS = ("min", "max", "abs", "len", "int")  # calls of these change nothing
_METHODS = ("size", "dim", "numel")
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_WITH_CODE = (
    FunctionType, MethodType, type, property, staticmethod, classmethod, functools.partial,
)  # fmt: skip

_Codes = Mapping[tuple[str, int], CodeType]  # code by its name and first line


@contextlib.contextmanager
def selecting(lines: Collection[Line]) -> Iterator[None]:
    """While it is active, the branches at these lines are arithmetic, where they can be.

    Only functions and methods that a module's names lead to are changed.

    Raises:
        Undecided: the model writes into a tensor that it padded or cropped in such a branch.
    """
    new: dict[tuple[Any, str], Any] = {}
    for file in {file for file, _ in lines}:
        codes = _compiled(file, frozenset(line for other, line in lines if other == file))
        for function in _functions(file) if codes else ():
            code = function.__code__
            other = codes.get(_key(code))
            if other is not None and other.co_freevars == code.co_freevars:
                new[function, "__code__"] = other
    with Exchange(new).used() if new else contextlib.nullcontext(), copies_watched():
        yield


def _functions(file: str) -> list[FunctionType]:
    """The functions of a file, and those inside their wrappers."""
    found: dict[int, FunctionType] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if value.__code__.co_filename == file:
                found[id(value)] = value
            cells = value.__closure__ or ()
            parts = [getattr(value, "__wrapped__", None), *map(_content, cells)]
        elif isinstance(value, type) and value.__module__ in names:
            parts = list(vars(value).values())
        elif isinstance(value, property):
            parts = [value.fget]
        else:
            parts = [getattr(value, name, None) for name in ("__func__", "func", "__wrapped__")]
        for part in parts:
            if isinstance(part, _WITH_CODE):
                visit(part)

    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    names = {module.__name__ for module in modules}
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, _WITH_CODE):
                visit(value)
    return list(found.values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def arithmetic_lines(lines: Collection[Line]) -> frozenset[Line]:
    """Those of the lines whose branch can be arithmetic, as far as its text tells."""
    return frozenset(
        (file, line)
        for file, line in lines
        if not file.startswith("<") and _compiled(file, frozenset({line}))
    )


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


@functools.cache
def _compiled(file: str, lines: frozenset[int]) -> _Codes:
    """The functions of a file with the branches at some lines as arithmetic.

    Empty if none of them can be. A function that has the name and line of another is left out.
    """
    try:
        change = _Change(lines)
        tree = change.visit(ast.parse(Path(file).read_text(encoding="utf-8"), file))
        if not change.count:
            return {}
        whole = compile(tree, file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError):
        return {}
    found: dict[tuple[str, int], CodeType] = {}
    twice = set()
    for code in _parts(whole):
        twice |= {_key(code)} & found.keys()
        found[_key(code)] = code
    return {key: code for key, code in found.items() if key not in twice}


class _Change(ast.NodeTransformer):
    """Writes the branches at some lines as arithmetic.

    Attributes:
        count: The number of branches that were written so.
    """

    def __init__(self, lines: Collection[int]) -> None:
        self.count = 0
        self._at = lines

    def _is_meant(self, node: ast.If | ast.IfExp) -> bool:
        last = node.test.end_lineno or node.test.lineno
        return any(n in self._at for n in range(node.test.lineno, last + 1)) and _pure(node.test)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        meant = self._is_meant(node) and _pure(node.body) and _pure(node.orelse)
        test = _condition(node.test)
        self.generic_visit(node)
        if not meant:
            return node
        self.count += 1
        text = f"{_SELECT}.either({test}, lambda: {_text(node.body)}, lambda: {_text(node.orelse)})"
        return _placed(ast.parse(text, mode="eval").body, node)

    def visit_If(self, node: ast.If) -> Any:
        targets = _targets([*node.body, *node.orelse])
        meant = self._is_meant(node) and bool(targets)
        test = _condition(node.test)
        self.generic_visit(node)
        if not meant:
            return node
        self.count += 1
        assert targets is not None
        text = _branch(test, node.body, node.orelse or [ast.Pass()], targets, self.count)
        return [_placed(statement, node) for statement in ast.parse(text).body]


def _branch(
    test: str,
    side: Sequence[ast.stmt],
    other: Sequence[ast.stmt],
    targets: Sequence[ast.Name | ast.Subscript],
    number: int,
) -> str:
    """A branch that is arithmetic if its condition is open, and as it was if not.

    If a side fails, or if a value can't be chosen, the values from before are put back.
    """
    texts = [_text(target) for target in targets]
    values = f"[{', '.join(f'{_SELECT}.read(lambda: {text})' for text in texts)}]"
    lists = ", ".join(_text(t.value) for t in targets if isinstance(t, ast.Subscript))
    chosen, before, start, one = (
        f"_pipeline_{name}_{number}" for name in ("if", "before", "start", "one")
    )

    def restored(values: str) -> str:
        lines = [
            f"if {values}[{k}] is not {_SELECT}.NOTHING:\n    {text} = {values}[{k}]"
            for k, text in enumerate(texts)
        ]
        return indent("\n".join(lines), " " * 8)

    plain = f"if {chosen}:\n{_block(side)}\nelse:\n{_block(other)}"
    results = "\n".join(f"{text} = {one}[{k}]" for k, text in enumerate(texts))
    return f"""
{chosen} = {test}
if {_SELECT}.is_open({chosen}):
    {before} = {values}
    try:
        {_SELECT}.listed({lists})
{_block(_with_numbers(side, chosen, before, texts), 8)}
        {one} = {values}
        {start} = {_SELECT}.start_of_second({chosen}, {one}, {before})
{restored(start)}
{_block(_with_numbers(other, f"{_SELECT}.negated({chosen})", start, texts), 8)}
        {one} = {_SELECT}.joined({chosen}, {before}, {one}, {values})
    except Exception:
{restored(before)}
{indent(plain, " " * 8)}
    else:
{indent(results, " " * 8)}
else:
{indent(plain, " " * 4)}
"""


def _text(node: ast.AST) -> str:
    return f"({ast.unparse(node)})" if isinstance(node, ast.expr) else ast.unparse(node)


def _block(statements: Sequence[ast.stmt], spaces: int = 4) -> str:
    return indent("\n".join(map(ast.unparse, statements)), " " * spaces)


def _placed(node: Any, at: ast.AST) -> Any:
    """The new node, with the place of the one that it replaces."""
    for part in ast.walk(node):
        ast.copy_location(part, at)
    return node


def _with_numbers(
    statements: Sequence[ast.stmt], condition: str, before: str, targets: Sequence[str]
) -> list[ast.stmt]:
    """The statements of a side in a form that can run on both sides.

    ``a += b`` is ``a = number(a) + b``, for it may change an object. A tensor is padded and cropped
    where the condition holds.

    Args:
        statements: the statements.
        condition: the text of the condition of this side.
        before: the name of the list of the targets' values before this side.
        targets: the texts of the targets.
    """

    class Numbers(ast.NodeTransformer):
        def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
            target = ast.unparse(node.target)
            value = ast.parse(f"{_SELECT}.number({target})", mode="eval").body
            return ast.Assign([node.target], ast.BinOp(value, node.op, node.value), lineno=0)

    changed: list[ast.stmt] = []
    for statement in statements:
        text = _cut_text(statement, condition, before, targets)
        changed += ast.parse(text).body if text else [Numbers().visit(copy.deepcopy(statement))]
    return changed


def _cut_text(
    statement: ast.stmt, condition: str = "", before: str = "", targets: Sequence[str] = ()
) -> str | None:
    """``x = pad(x, ...)`` or ``x = x[...]`` with slices, as a call; None for another statement."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name):
        return None
    name = target.id
    number = targets.index(_text(target)) if _text(target) in targets else 0
    first = f"{condition}, {number}, {before}[{number}]"
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "pad":
        rest = [*value.args[1:], *(keyword.value for keyword in value.keywords)]
        if value.args and ast.unparse(value.args[0]) == name and all(map(_pure, rest)):
            function = ast.unparse(value.func)
            others = ast.unparse(ast.Call(ast.Name("f"), value.args[1:], value.keywords))[2:-1]
            return f"{name} = {_CUT}.padded({first}, {function}, {name}, {others})"
    copied = isinstance(value, ast.Call) and ast.unparse(value).endswith("].contiguous()")
    if isinstance(value, ast.Call) and copied and isinstance(value.func, ast.Attribute):
        value = value.func.value
    if isinstance(value, ast.Subscript) and ast.unparse(value.value) == name:
        index = value.slice
        if _pure(index) and any(isinstance(part, ast.Slice) for part in ast.walk(index)):
            chosen = f"{_CUT}.{ast.unparse(ast.Subscript(ast.Name('INDEX'), index))}"
            return f"{name} = {_CUT}.cropped({first}, {name}, {chosen}, copied={copied})"
    return None


def _targets(
    statements: Sequence[ast.stmt], *, top: bool = True
) -> list[ast.Name | ast.Subscript] | None:
    """What the statements assign to; None if they do anything else.

    Only those at the `top` of a side may pad or crop a tensor.
    """
    found: dict[str, ast.Name | ast.Subscript] = {}
    for statement in statements:
        if isinstance(statement, ast.Pass):
            continue
        if top and _cut_text(statement):
            assert isinstance(statement, ast.Assign)
            found |= {ast.unparse(t): t for t in statement.targets if isinstance(t, ast.Name)}
            continue
        if isinstance(statement, ast.If):
            inner = _targets([*statement.body, *statement.orelse], top=False)
            if inner is None or not _pure(statement.test):
                return None
            found |= {ast.unparse(target): target for target in inner}
            continue
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AugAssign):
            targets, value = [statement.target], statement.value
        else:
            return None
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple):
            targets = targets[0].elts
        for target in targets:
            if not isinstance(target, ast.Name | ast.Subscript) or not _pure(target):
                return None
            found[ast.unparse(target)] = target
        if not _pure(value):
            return None
    return list(found.values())


def _pure(node: ast.AST) -> bool:
    """Whether an expression changes nothing, as far as its text tells."""
    for part in ast.walk(node):
        if not isinstance(part, _PURE):
            return False
        if isinstance(part, ast.Call):
            function = part.func
            known = (isinstance(function, ast.Name) and function.id in _FUNCTIONS) or (
                isinstance(function, ast.Attribute) and function.attr in _METHODS
            )
            if not known or part.keywords:
                return False
    return True


def _condition(test: ast.expr) -> str:
    return f"{_SELECT}.condition(lambda: {_opened(test)}, lambda: {_text(test)})"


def _opened(test: ast.expr) -> str:
    """A condition in which each comparison may stay open."""
    if isinstance(test, ast.BoolOp):
        name = "every" if isinstance(test.op, ast.And) else "some"
        return f"{_SELECT}.{name}({', '.join(f'lambda: {_opened(v)}' for v in test.values)})"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return f"{_SELECT}.negated({_opened(test.operand)})"
    if isinstance(test, ast.Compare) and all(isinstance(op, _COMPARISONS) for op in test.ops):
        sides = [_text(side) for side in (test.left, *test.comparators)]
        parts = [
            f"{_SELECT}.compare('{type(op).__name__}', {left}, {right})"
            for op, left, right in zip(test.ops, sides[:-1], sides[1:], strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return f"{_SELECT}.every({', '.join(f'lambda: {part}' for part in parts)})"
    return f"{_SELECT}.truth({_text(test)})"
