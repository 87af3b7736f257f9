"""Renames torch's symbols in sizes to the dims of the spec.

torch names sizes by its own symbols (``s17``, ``8*s17``, ``(s17//2)``). They are replaced by the
dims' names, so that the ONNX file says ``h`` where the spec says ``h``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import sympy
from sympy.printing.str import StrPrinter

from pipeline.errors import ConstraintError, ExportError, InputError, SizeError
from pipeline.graph.names import values_of
from pipeline.probe.evaluate import result_of
from pipeline.probe.fit import LARGEST_DIVISOR, fit_quotient
from pipeline.probe.grid import legal_sizes
from pipeline.spec.dims import Dim, DimExpr, size_text
from pipeline.spec.rules import Rule
from pipeline.spec.tensors import Input

if TYPE_CHECKING:
    import torch

_ROUNDED = ("TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt")
_MOST = 1 << 14  # most sizes of a dim at which a quotient is fitted
_DIVISOR = 1000  # its largest divisor: factors of a size have few decimals
_MOST_TRIED = 1 << 14  # most combinations of sizes in the check that an expression is constant


@dataclass(frozen=True)
class SymbolNames:
    """The names of torch's symbols in terms of the dims.

    Args:
        texts: for each symbol, the text that replaces it: ``h``, or ``h/8``.
        dims: the dims by name; needed only to write floating-point sizes as integer quotients.
    """

    texts: Mapping[str, str]
    dims: Mapping[str, Dim] = field(default_factory=dict)

    @staticmethod
    def of(program: torch.export.ExportedProgram, inputs: Sequence[Input]) -> SymbolNames:
        """Reads the symbols from the program's inputs.

        Raises:
            SizeError: torch fixed a dim, or replaced it by another expression.
            ConstraintError: torch made two dims equal.
        """
        values = _user_inputs(program)
        texts: dict[str, str] = {}
        exprs: dict[str, str] = {}
        owners: dict[str, str] = {}
        for value, declared in zip(values, inputs, strict=True):
            for axis, (got, want) in enumerate(zip(value.shape, declared.shape, strict=True)):
                if isinstance(want, int) or all(dim.static for dim in want.dims):
                    continue
                where = f"{declared.name} axis {axis}"
                if isinstance(got, int):
                    raise SizeError(f"{where}: torch.export fixed {size_text(want)} at {got}")
                if isinstance(want, DimExpr):
                    symbol = str(got.node._expr)
                    if re.fullmatch(r"[a-z]+\d+", symbol):
                        exprs[symbol] = want.text
                    continue
                expr = got.node.expr
                symbols = sorted(expr.free_symbols, key=str)
                factor = expr / symbols[0] if len(symbols) == 1 else None
                if factor is None or not factor.is_Integer:
                    raise SizeError(f"{where}: torch.export turned {want.name} into {expr}")
                text = want.name if factor == 1 else f"{want.name}/{factor}"
                owners.setdefault(str(symbols[0]), want.name)
                if texts.setdefault(str(symbols[0]), text) != text:
                    rule = Rule("equal", owners[str(symbols[0])], (want.name,))
                    raise ConstraintError(f"{where}: {rule}", rules=(rule,))
        texts = {**exprs, **texts}
        return SymbolNames(texts, {dim.name: dim for i in inputs for dim in i.dims})

    def size(self, expr: Any) -> int | str:
        """Writes a size (a number or torch's sympy expression) in terms of the dims."""
        if isinstance(expr, int) or getattr(expr, "is_Integer", False):
            return int(expr)
        subs = {}
        expr = expr.replace(lambda e: type(e).__name__ in _ROUNDED, self._quotient)
        for symbol in expr.free_symbols:
            known = self.texts.get(str(symbol))
            if not known:
                return self.text(str(expr))  # a size that depends on the data
            subs[symbol] = _symbolic(known)
        text: str = SizePrinter().doprint(sympy.together(expr.subs(subs)))
        try:
            DimExpr(text)
        except InputError:
            return self.text(str(expr))
        return text

    def _quotient(self, expr: Any) -> Any:
        """``TruncToInt(1.5*ToFloat(s))`` as ``(3*s)//2``, if both are equal at every size."""
        if len(expr.free_symbols) != 1:
            return expr
        (symbol,) = expr.free_symbols
        name, _, step = self.texts.get(str(symbol), "").partition("/")
        if name not in self.dims:  # also an expression of dims
            return expr
        sizes = np.array(legal_sizes(self.dims[name], _MOST)) // int(step or 1)
        values = result_of(exact(expr), {str(symbol): sizes})
        largest = _DIVISOR if len(sizes) < _MOST else LARGEST_DIVISOR
        found = None if values is None else fit_quotient(sizes, values, largest)
        if found is None:
            return expr
        from torch.utils._sympy.functions import FloorDiv

        return FloorDiv(found.a * symbol + found.b, found.c)

    def text(self, text: str) -> str:
        """The text with its symbols replaced, not simplified."""

        def replacement(match: re.Match[str]) -> str:
            name = self.texts.get(match[0], match[0])
            return name if re.fullmatch(r"\w+", name) else f"({name})"

        return re.sub(r"\b[a-z]\d+\b", replacement, text)


def _symbolic(text: str) -> Any:
    """An expression of dims as a sympy expression."""
    names = {n: sympy.Symbol(n, integer=True, positive=True) for n in DimExpr(text).names}
    code = compile(text, "<size>", "eval")  # DimExpr allows only arithmetic, min and max
    words = {"min": sympy.Min, "max": sympy.Max}
    return eval(code, {"__builtins__": {}}, {**words, **names})


class _Exact(StrPrinter):  # type: ignore[misc]
    """Prints all digits of a float: sympy prints 15, and then ``n * (1/3) == 20`` never holds."""

    def _print_Float(self, number: Any) -> str:
        return repr(float(number))


def exact(expression: Any) -> str:
    """torch's text of a sympy expression, as `pipeline.probe.evaluate` reads it."""
    text: str = _Exact().doprint(expression)
    return text


class SizePrinter(StrPrinter):  # type: ignore[misc]
    """Prints sympy expressions in the form that `DimExpr` reads."""

    def _print_floor(self, expr: Any) -> str:
        top, bottom = sympy.fraction(sympy.together(expr.args[0]))
        return f"(({self._print(top)})//({self._print(bottom)}))"

    def _print_Pow(self, expr: Any, rational: bool = False) -> str:
        if not expr.exp.is_Integer or expr.exp < 0:
            return str(super()._print_Pow(expr, rational))
        return f"({'*'.join([f'({self._print(expr.base)})'] * int(expr.exp))})"

    def _print_FloorDiv(self, expr: Any) -> str:
        top, bottom = sympy.fraction(sympy.together(expr.args[0] / expr.args[1]))
        return f"(({self._print(top)})//({self._print(bottom)}))"

    def _print_Max(self, expr: Any) -> str:
        return f"max({', '.join(self._print(a) for a in expr.args)})"

    def _print_Min(self, expr: Any) -> str:
        return f"min({', '.join(self._print(a) for a in expr.args)})"

    def _print_Mod(self, expr: Any) -> str:
        left, right = (self._print(a) for a in expr.args)
        return f"(({left}) % ({right}))"

    _print_PythonMod = _print_Mod


def _user_inputs(program: torch.export.ExportedProgram) -> list[Any]:
    names = program.graph_signature.user_inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    return [values[str(name)] for name in names]


def output_shapes(
    program: torch.export.ExportedProgram, names: SymbolNames
) -> list[list[int | str]]:
    """The shape of every output in terms of the dims, in order.

    Raises:
        ExportError: an output is not a tensor, or is complex.
    """
    import torch

    (node,) = (n for n in program.graph.nodes if n.op == "output")
    wanted = list(program.graph_signature.user_outputs)
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    shapes = []
    for name in wanted:
        value = values.get(str(name))
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"output {name} of the model is not a tensor ({node.name})")
        if value.dtype.is_complex:
            raise ExportError(
                f"output {name} of the model is complex, and TensorRT has no complex numbers: "
                "return torch.view_as_real(output)"
            )
        shapes.append([names.size(s if isinstance(s, int) else s.node.expr) for s in value.shape])
    return shapes


_NOT_IN_PLACE = (
    "if a branch on a size cuts or pads this tensor, and it is then changed in place (y += 1), "
    "write the step without the change in place (y = y + 1)"
)


def apply_names(
    model: onnx.ModelProto,
    names: SymbolNames,
    outputs: Mapping[str, Sequence[int | str]],
    dims: Mapping[str, Dim] | None = None,
) -> None:
    """Renames every symbolic size of the graph, in place; outputs get the given shapes.

    Args:
        model: the model to change.
        names: the symbols' names.
        outputs: the shape of each output in terms of the dims, by its name.
        dims: the dims by name. An output's size that is the same at all their sizes may be a
            number in the graph.

    Raises:
        SizeError: the graph has a number where an output's size varies or is another number.
    """
    cache: dict[str, str] = {}
    for value in values_of(model.graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if value.name in outputs:
                size = outputs[value.name][axis]
                if isinstance(size, str) and dim.HasField("dim_value"):
                    if _always(size, dims or {}) == dim.dim_value:
                        continue
                    raise SizeError(
                        f"output {value.name} axis {axis}: {size} is baked in as {dim.dim_value}",
                        do=_NOT_IN_PLACE,
                    )
                if isinstance(size, str):
                    dim.dim_param = size
                elif dim.dim_param:
                    dim.dim_value = size
            elif dim.dim_param:
                text = dim.dim_param
                if text not in cache:
                    cache[text] = _input_name(names, text)
                dim.dim_param = cache[text]


def _always(size: str, dims: Mapping[str, Dim]) -> int | None:
    """The one value of an expression at every size of its dims; None if it varies or is unknown."""
    expression = DimExpr(size)
    used = sorted(expression.names)
    if not dims.keys() >= expression.names:
        return None
    ranges = [range(dims[n].min, dims[n].max + 1, dims[n].multiple_of) for n in used]
    if math.prod(map(len, ranges)) > _MOST_TRIED:
        return None
    try:
        every = (dict(zip(used, sizes, strict=True)) for sizes in product(*ranges))
        values = {expression.value(sizes) for sizes in every}
    except InputError:  # a division that is not exact
        return None
    return values.pop() if len(values) == 1 else None


def _input_name(names: SymbolNames, text: str) -> str:
    """``8*s17`` becomes ``h`` where s17 is ``h/8``; in other texts the symbols are replaced."""
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z]\d+)", text)
    if match:
        stands_for = names.texts.get(match[2], "")
        name, _, step = stands_for.partition("/")
        if step.isdigit() or re.fullmatch(r"\w+", stands_for):  # a dim, or the part of one
            if (match[1] or "1") == (step or "1"):
                return name
        elif stands_for and not match[1]:
            return stands_for
    return names.text(text)
