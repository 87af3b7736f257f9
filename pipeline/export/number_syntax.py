"""Writes branches that only choose numbers, pad or crop as arithmetic, in Python's syntax tree.

Calls that would make a Python number of a size are written so that it stays symbolic.

The text that is written calls `pipeline.export.select` and `pipeline.export.cut`. What a branch
may contain is decided by its text alone; what its values are, when it runs.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Sequence
from textwrap import indent
from typing import Any

_SELECT = "__import__('pipeline.export.select', None, None, ['select'])"
_CUT = "__import__('pipeline.export.cut', None, None, ['cut'])"
_PURE = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Call, ast.expr_context,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip
_FUNCTIONS = ("min", "max", "abs", "len", "int")  # calls of these change nothing
_METHODS = ("size", "dim", "numel")
_REFLECTION = ("NameError", "UnboundLocalError", "locals", "vars", "eval", "exec")
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class NumberBranches(ast.NodeTransformer):
    """Writes the branches and numbers at some lines as arithmetic.

    Attributes:
        count: The number of branches and numbers that were written so.
    """

    def __init__(self, lines: Collection[int]) -> None:
        self.count = 0
        self._at = lines
        # of the function that is visited: names that may hold numbers, and that must not change
        self._numbers: frozenset[str] = frozenset()
        self._seen: frozenset[str] = frozenset()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        outer = self._numbers, self._seen
        self._numbers, self._seen = _only_ends(node), _seen(node)
        self.generic_visit(node)
        self._numbers, self._seen = outer
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        """``int(n * 0.75)`` and ``x.shape[2:].numel()``: the size stays symbolic."""
        self.generic_visit(node)
        if node.keywords or not self._meets(node):
            return node
        match node.func, node.args:
            case ast.Attribute(value=sizes, attr="numel"), []:
                text = f"{_SELECT}.product({_text(sizes)})"
            case ast.Name(id="int"), [value] if not isinstance(value, ast.Starred):
                text = f"{_SELECT}.whole_number(int, {_text(value)})"
            case _:
                return node
        self.count += 1
        return _placed(ast.parse(text, mode="eval").body, node)

    def _meets(self, node: ast.expr) -> bool:
        last = node.end_lineno or node.lineno
        return any(n in self._at for n in range(node.lineno, last + 1))

    def _is_meant(self, node: ast.If | ast.IfExp) -> bool:
        return self._meets(node.test) and _pure(node.test)

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
        names = {target.id for target in targets or () if isinstance(target, ast.Name)}
        meant = self._is_meant(node) and bool(targets) and not names & self._seen
        test = _condition(node.test)
        self.generic_visit(node)
        if not meant:
            return node
        self.count += 1
        assert targets is not None
        text = _branch(
            test, node.body, node.orelse or [ast.Pass()], targets, self._numbers, self.count
        )
        return [_placed(statement, node) for statement in ast.parse(text).body]


def _branch(
    test: str,
    side: Sequence[ast.stmt],
    other: Sequence[ast.stmt],
    targets: Sequence[ast.Name | ast.Subscript],
    numbers: Collection[str],
    number: int,
) -> str:
    """A branch that is arithmetic if its condition is open, and as it was if not.

    If a side fails, or if a value can't be chosen, the values from before are put back.

    Args:
        test: the text of its condition.
        side, other: the statements of its sides.
        targets: what they assign to.
        numbers: names whose value may be a number where the model has a tensor.
        number: the number of the branch in its file.
    """
    texts = [_text(target) for target in targets]
    values = f"[{', '.join(f'{_SELECT}.read(lambda: {text})' for text in texts)}]"
    lists = "".join(f"{_text(t.value)}, " for t in targets if isinstance(t, ast.Subscript))
    known = [k for k, text in enumerate(texts) if text[1:-1] in numbers]
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
if {_SELECT}.is_open({chosen}) and {_SELECT}.are_lists(lambda: ({lists})):
    {before} = {values}
    try:
{_block(_with_numbers(side, chosen, before, texts), 8)}
        {one} = {values}
        {start} = {_SELECT}.start_of_second({chosen}, {one}, {before})
{restored(start)}
{_block(_with_numbers(other, f"{_SELECT}.negated({chosen})", start, texts), 8)}
        {one} = {_SELECT}.joined({chosen}, {before}, {one}, {values}, {known})
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
        if _pure(index) and _has_slice(index):
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
        targets, value = _assigned(statement)
        if not targets or not all(map(_pure, [*targets, value])):
            return None
        for target in targets:
            if not isinstance(target, ast.Name | ast.Subscript) or not _is_place(target):
                return None
            found[ast.unparse(target)] = target
    # a place that moves when another target gets a value can't be put back
    parts = {ast.unparse(p) for t in found.values() for p in ast.walk(t) if p is not t}
    return None if parts & found.keys() else list(found.values())


def _assigned(statement: ast.stmt) -> tuple[list[ast.expr], ast.expr]:
    """What a statement assigns to, and the value; nothing for another statement."""
    if isinstance(statement, ast.AugAssign):
        return [statement.target], statement.value
    if not isinstance(statement, ast.Assign):
        return [], ast.Constant(None)
    first = statement.targets[0]
    if isinstance(first, ast.Tuple) and len(statement.targets) == 1:
        return first.elts, statement.value
    return statement.targets, statement.value


def _is_place(target: ast.Name | ast.Subscript) -> bool:
    """False for a place that may depend on an element of a list, and for several places."""
    parts = [p for child in ast.iter_child_nodes(target) for p in ast.walk(child)]
    return not any(isinstance(part, ast.Subscript | ast.Slice | ast.Call) for part in parts)


def _seen(function: ast.FunctionDef) -> frozenset[str]:
    """The names of a function whose identity or absence its code can see.

    They are operands of ``is`` with anything but None, and all names beside ``locals()`` and an
    ``except NameError``.
    """
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in _REFLECTION:
            return frozenset(n.id for n in ast.walk(function) if isinstance(n, ast.Name))
        sides: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "id":
            sides = node.args
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            sides = [node.left, *node.comparators]
        if not any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            found |= {n.id for side in sides for n in ast.walk(side) if isinstance(n, ast.Name)}
    return frozenset(found)


def _has_slice(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Slice) for part in ast.walk(node))


def _only_ends(function: ast.FunctionDef) -> frozenset[str]:
    """The names of a function whose values only go into pads and ends of slices.

    They may be added and subtracted on the way. A number and an int64 tensor of it do the same
    there.
    """
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    loads: dict[str, list[ast.Name]] = {}
    other: set[str] = set()  # names with another use
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            loads.setdefault(node.id, []).append(node)
        if isinstance(node, ast.AugAssign | ast.ClassDef | ast.Delete):
            places = [node.target] if isinstance(node, ast.AugAssign) else [node]
            other |= {n.id for p in places for n in ast.walk(p) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Global | ast.Nonlocal):
            other |= {*node.names}

    def is_end(node: ast.AST, known: Collection[str]) -> bool:
        parent = parents[node]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub):
            return is_end(parent, known)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            target = parent.targets[0]
            return isinstance(target, ast.Name) and target.id in known
        if isinstance(parent, ast.Tuple | ast.List):
            return _is_pad(parents[parent], but=parent)
        return isinstance(parent, ast.Slice) and node is not parent.step

    left = {*loads} - other
    while True:
        found = {name for name in left if all(is_end(node, left) for node in loads[name])}
        if found == left:
            return frozenset(found)
        left = found


def _is_pad(node: ast.AST, but: ast.AST) -> bool:
    """True for a call such as ``F.pad(x, ...)`` with `but` after the first argument."""
    function = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else []
    named = len(function) > 1 and function[-2] in ("F", "functional") and function[-1] == "pad"
    return named and isinstance(node, ast.Call) and but is not node.args[0]


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
