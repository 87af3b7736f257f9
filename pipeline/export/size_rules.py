"""Guards of torch.export on several dims, as rules on sizes that the user can paste."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import numpy as np

from pipeline.errors import InputError
from pipeline.export.guards import Broken
from pipeline.probe.evaluate import result_of
from pipeline.probe.grid import size_grid
from pipeline.spec.dims import SizeRule, kept_rules
from pipeline.spec.rules import Rule

_COMPARED = {"Ne": ast.NotEq, "Eq": ast.Eq}
_OPERATORS = {
    "FloorDiv": ast.FloorDiv, "CleanDiv": ast.FloorDiv, "Mod": ast.Mod, "PythonMod": ast.Mod,
}  # fmt: skip


def by_size_rule(guard: Broken, rules: Sequence[str]) -> Rule | None:
    """The rule of a guard in the size language, such as ``h*w != 1155``.

    A rule with ``!=`` leaves out few sizes, so the pipeline may add it by itself. Any other rule
    may leave out one side of a branch, so the user decides.

    Args:
        guard: the guard, in the dims.
        rules: the rules that the sizes keep already.

    Returns:
        The rule; None if the size language has none that leaves out the same sizes.
    """
    text = size_rule(guard.words)
    if not text or len(guard.dims) < 2 or not _leaves_out(text, guard, rules):
        return None
    first, *others = [dim.name for dim in guard.dims]
    has_opt = kept_rules([text], {dim.name: dim.opt for dim in guard.dims})
    if SizeRule(text).sign == "!=" and has_opt:
        return Rule("relation", first, tuple(others), size_rule=text)
    opt = None if has_opt else guard.dims[0].opt
    return Rule("guard", first, tuple(others), formula=text, opt=opt)


def size_rule(words: str) -> str:
    """A guard in torch's words (``Ne(w*h, 1155)``) as a rule on sizes; empty if there is none."""
    try:
        tree = ast.parse(words, mode="eval")
        text = ast.unparse(ast.fix_missing_locations(_Plain().visit(tree)))
        text = text.replace(" * ", "*")
        SizeRule(text)
    except (SyntaxError, ValueError, RecursionError, InputError):
        return ""
    return text


def _leaves_out(text: str, guard: Broken, rules: Sequence[str]) -> bool:
    """True if exactly the sizes that break the guard break the rule."""
    grid = size_grid(guard.dims, tuple(rules))
    kept = result_of(text, dict(zip((dim.name for dim in guard.dims), grid.T, strict=True)))
    if kept is None:
        return False
    out = grid[~np.broadcast_to(np.asarray(kept, bool), len(grid))]
    return np.array_equal(np.unique(out, axis=0), np.unique(guard.sizes, axis=0))


class _Plain(ast.NodeTransformer):
    """Operators in place of torch's functions, and the factors of a product by their names."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if len(node.args) == 2 and name in _COMPARED:
            return ast.Compare(node.args[0], [_COMPARED[name]()], [node.args[1]])
        if len(node.args) == 2 and name in _OPERATORS:
            return ast.BinOp(node.args[0], _OPERATORS[name](), node.args[1])
        if isinstance(node.func, ast.Name) and name in ("Min", "Max"):
            node.func.id = name.lower()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        first, *others = sorted(_factors(node), key=_place)
        product = first
        for factor in others:
            product = ast.BinOp(product, ast.Mult(), factor)
        return product


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _place(factor: ast.expr) -> tuple[bool, bool, str]:
    """Numbers before names, and names before longer factors."""
    plain = isinstance(factor, ast.Name)
    return not isinstance(factor, ast.Constant), not plain, ast.unparse(factor) if plain else ""
