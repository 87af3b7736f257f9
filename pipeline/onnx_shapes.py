"""Sizes in an ONNX file: torch's symbols renamed to the dims, shapes at given dim sizes.

torch names sizes by its own symbols (``s17``, ``8*s17``, ``(s17//2)``). They are replaced by
the dims' names, so that the file says ``h`` where the spec says ``h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import sympy
import torch
from sympy.printing.str import StrPrinter

from pipeline.dims import Dim, DimExpr
from pipeline.errors import ExportError, InputError
from pipeline.spec import Input


@dataclass(frozen=True)
class SymbolNames:
    """For each of torch's symbols, the text that stands for it: ``h``, or ``h/8``."""

    texts: Mapping[str, str]

    @staticmethod
    def of(program: torch.export.ExportedProgram, inputs: Sequence[Input]) -> SymbolNames:
        """Reads the symbols off the program's inputs.

        Raises:
            ExportError: torch fixed a dim, or tied it to another one.
        """
        values = _user_inputs(program)
        texts: dict[str, str] = {}
        for value, declared in zip(values, inputs, strict=True):
            for axis, (got, want) in enumerate(zip(value.shape, declared.shape, strict=True)):
                if not isinstance(want, Dim) or want.static:
                    continue
                where = f"{declared.name} axis {axis}"
                if isinstance(got, int):
                    raise ExportError(f"{where}: torch.export fixed {want.name} at {got}")
                expr = got.node.expr
                symbols = sorted(expr.free_symbols, key=str)
                factor = expr / symbols[0] if len(symbols) == 1 else None
                if factor is None or not factor.is_Integer:
                    raise ExportError(f"{where}: torch.export turned {want.name} into {expr}")
                text = want.name if factor == 1 else f"{want.name}/{factor}"
                if texts.setdefault(str(symbols[0]), text) != text:
                    raise ExportError(
                        f"{where}: torch.export takes {want.name} to equal {texts[str(symbols[0])]}"
                    )
        return SymbolNames(texts)

    def size(self, expr: Any) -> int | str:
        """A size of torch's (a number or a sympy expression) in terms of the dims."""
        if isinstance(expr, int) or getattr(expr, "is_Integer", False):
            return int(expr)
        subs = {}
        for symbol in expr.free_symbols:
            name, _, step = self.texts.get(str(symbol), "").partition("/")
            if not name:
                return self.text(str(expr))  # a size that only the data decide
            new = sympy.Symbol(name, integer=True, positive=True)
            subs[symbol] = new / int(step or 1)
        text: str = _Printer().doprint(sympy.together(expr.subs(subs)))
        try:
            DimExpr(text)
        except InputError:
            return self.text(str(expr))
        return text

    def text(self, text: str) -> str:
        """`text` with the symbols replaced, not simplified."""

        def replacement(match: re.Match[str]) -> str:
            name = self.texts.get(match[0], match[0])
            return f"({name})" if "/" in name else name

        return re.sub(r"\b[a-z]\d+\b", replacement, text)


class _Printer(StrPrinter):  # type: ignore[misc]
    """Writes expressions as `DimExpr` reads them."""

    def _print_floor(self, expr: Any) -> str:
        top, bottom = sympy.fraction(sympy.together(expr.args[0]))
        return f"(({self._print(top)})//{self._print(bottom)})"

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
        ExportError: an output is not a tensor.
    """
    (node,) = (n for n in program.graph.nodes if n.op == "output")
    wanted = list(program.graph_signature.user_outputs)
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    shapes = []
    for name in wanted:
        value = values.get(str(name))
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"output {name} of the model is not a tensor ({node.name})")
        shapes.append([names.size(s if isinstance(s, int) else s.node.expr) for s in value.shape])
    return shapes


def apply_names(
    model: onnx.ModelProto, names: SymbolNames, outputs: Mapping[str, Sequence[int | str]]
) -> None:
    """Renames every symbolic size of the graph, in place; outputs get the given shapes.

    Raises:
        ExportError: the graph has a number where an output's size is no number.
    """
    cache: dict[str, str] = {}
    for value in values_of(model.graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if value.name in outputs:
                size = outputs[value.name][axis]
                if isinstance(size, str) and dim.HasField("dim_value"):
                    raise ExportError(
                        f"output {value.name} axis {axis}: {size} is baked in as {dim.dim_value}"
                    )
                if isinstance(size, str):
                    dim.dim_param = size
            elif dim.dim_param:
                text = dim.dim_param
                if text not in cache:
                    cache[text] = _input_name(names, text)
                dim.dim_param = cache[text]


def _input_name(names: SymbolNames, text: str) -> str:
    """``8*s17`` is ``h`` where s17 is ``h/8``; other texts get the symbols replaced."""
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z]\d+)", text)
    if match:
        name, _, step = names.texts.get(match[2], "").partition("/")
        if name and (match[1] or "1") == (step or "1"):
            return name
    return names.text(text)


def values_of(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Every value of a graph and its subgraphs that carries a type."""
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                if inner.node:
                    yield from values_of(inner)
