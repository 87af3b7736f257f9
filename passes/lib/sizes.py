"""Sizes of tensors as sympy expressions: from their dims, and along the arithmetic on shapes.

A dim that is text (``8*s17``) is an expression of positive integer symbols, as torch's exporter
writes it. Any other text is one symbol, since equal names are equal sizes in the ONNX standard. A
dim without a name is a symbol of its tensor and axis. A small parser reads the text. It is never
evaluated as Python, since it comes from a file.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import sympy

from pipeline.passes.graph_ops import values_of

_INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
# denominator of float factors whose product with any size below 2**16 is exact in float32
_STEP = 256
_SIGNS: dict[type[ast.operator], Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Mod: sympy.Mod,
}
_CALLS: dict[str, Callable[..., sympy.Expr]] = {
    "floor": sympy.floor,
    "min": sympy.Min,
    "max": sympy.Max,
}


Dims = list[sympy.Expr]


@dataclass(frozen=True)
class Elements:
    """The elements of a tensor of rank 0 or 1."""

    values: list[sympy.Expr]
    rank: int
    floating: bool = False


def dims_of(tensor: gs.Tensor) -> Dims | None:
    """The tensor's dims, or None if its rank is not known."""
    if tensor.shape is None:
        return None
    return [_dim(tensor.name, axis, size) for axis, size in enumerate(tensor.shape)]


def elements_of(tensor: gs.Tensor) -> Elements | None:
    """The elements of a tensor that is computed from shapes; None if they cannot be followed.

    These ops are followed if they are exact for all sizes: Shape, Gather, Slice, Concat, Squeeze,
    Unsqueeze, Reshape, Cast, Floor, Identity, Add, Sub, Mul, Div. A float division such as
    ``h / 3 * 3`` is not exact: float32 may round it to less than h.
    """
    if tensor.shape is not None and len(tensor.shape) > 1:
        return None
    values = values_of(tensor)
    if values is not None:
        return _constants(values)
    if len(tensor.inputs) != 1 or (tensor.inputs[0].domain or "") not in ("", "ai.onnx"):
        return None
    node = tensor.inputs[0]
    if node.op == "Shape":
        dims = dims_of(node.inputs[0])
        start, end = node.attrs.get("start", 0), node.attrs.get("end")
        return None if dims is None else Elements(dims[start:end], 1)
    inputs = []
    for source in node.inputs:
        elements = elements_of(source)
        if elements is None:
            return None
        inputs.append(elements)
    return _apply(node, inputs) if inputs else None


class ChainSizes:
    """Dims along a chain of reshapes, in terms of the dims of the chain's input."""

    def __init__(self) -> None:
        self.known: dict[sympy.Symbol, sympy.Expr] = {}

    def learn(self, tensor: gs.Tensor, dims: Dims | None) -> Dims | None:
        """Records which expressions the tensor's names for its dims stand for."""
        names = dims_of(tensor)
        if names is not None and dims is not None and len(names) == len(dims):
            for name, value in zip(names, dims, strict=True):
                if name.is_Symbol and name not in value.free_symbols:
                    self.known.setdefault(name, value)
        return dims

    def after(self, view: gs.Node, dims: Dims | None) -> Dims | None:
        """The dims after a reshape of these dims; None if they cannot be followed."""
        if dims is None:
            return None
        if view.op == "Reshape":
            return self.learn(view.outputs[0], self.reshaped(view, dims))
        given = view.attrs.get("axes") if len(view.inputs) < 2 else values_of(view.inputs[1])
        if given is None:
            return None
        axes = [int(axis) for axis in np.ravel(given)]
        if view.op == "Squeeze":
            drop = {axis % len(dims) for axis in axes}
            dims = [size for axis, size in enumerate(dims) if axis not in drop]
        else:
            rank = len(dims) + len(axes)
            rest = iter(dims)
            ones = {axis % rank for axis in axes}
            dims = [sympy.Integer(1) if axis in ones else next(rest) for axis in range(rank)]
        return self.learn(view.outputs[0], dims)

    def reshaped(self, view: gs.Node, dims: Dims) -> Dims | None:
        """The dims after a Reshape of these dims; None if they cannot be followed."""
        followed = elements_of(view.inputs[1])
        if followed is None:
            return None
        sizes = [value.subs(self.known) for value in followed.values]
        for axis, size in enumerate(sizes):
            if size == 0:
                if view.attrs.get("allowzero", 0) or axis >= len(dims):
                    return None
                sizes[axis] = dims[axis]
        if sizes.count(sympy.Integer(-1)) == 1:
            place = sizes.index(sympy.Integer(-1))
            others = sympy.prod([size for axis, size in enumerate(sizes) if axis != place])
            sizes[place] = sympy.cancel(sympy.prod(dims) / others)
        return sizes


def _constants(values: np.ndarray) -> Elements | None:
    small = values.ndim <= 1 and values.size <= 64
    if not small or values.dtype.kind not in "if" or not np.isfinite(values).all():
        return None
    numbers = [sympy.Rational(value) for value in values.reshape(-1).tolist()]
    return Elements(numbers, values.ndim, values.dtype.kind == "f")


def _apply(node: gs.Node, inputs: list[Elements]) -> Elements | None:
    first = inputs[0]
    result: Elements | None = None
    if node.op == "Concat" and all(e.rank == 1 for e in inputs):
        joined = [value for elements in inputs for value in elements.values]
        result = Elements(joined, 1, first.floating)
    elif node.op == "Identity":
        result = first
    elif node.op == "Unsqueeze" and first.rank == 0:
        result = Elements(first.values, 1, first.floating)
    elif node.op == "Squeeze" and len(first.values) == 1:
        result = Elements(first.values, 0, first.floating)
    elif node.op == "Reshape" and inputs[1].values in ([], [-1], [len(first.values)]):
        result = Elements(first.values, len(inputs[1].values), first.floating)
    elif node.op == "Floor":
        result = Elements([sympy.floor(value) for value in first.values], first.rank, True)
    elif node.op == "Cast":
        result = _cast(first, int(node.attrs["to"]))
    elif node.op == "Gather" and first.rank == 1 and node.attrs.get("axis", 0) == 0:
        picked = _pick(first.values, inputs[1].values)
        result = None if picked is None else Elements(picked, inputs[1].rank, first.floating)
    elif node.op == "Slice":
        result = _slice(first, [e.values for e in inputs[1:]])
    elif node.op in ("Add", "Sub", "Mul", "Div"):
        result = _arithmetic(node.op, *inputs)
    return result


def _cast(elements: Elements, to: int) -> Elements | None:
    if to in _FLOATS:
        return Elements(elements.values, elements.rank, True)
    # truncation is floor where nothing is negative
    if to not in _INTEGERS or not all(v.is_integer or v.is_nonnegative for v in elements.values):
        return None
    return Elements([sympy.floor(value) for value in elements.values], elements.rank)


def _pick(values: list[sympy.Expr], indices: list[sympy.Expr]) -> list[sympy.Expr] | None:
    if not all(i.is_Integer and -len(values) <= i < len(values) for i in indices):
        return None
    return [values[int(i)] for i in indices]


def _slice(data: Elements, bounds: list[list[sympy.Expr]]) -> Elements | None:
    if not all(len(bound) == 1 and bound[0].is_Integer for bound in bounds):
        return None
    numbers = [int(bound[0]) for bound in bounds]
    if len(numbers) < 2 or (len(numbers) > 3 and numbers[3] != 1):
        return None
    return Elements(data.values[numbers[0] : numbers[1]], 1, data.floating)


def _arithmetic(op: str, left: Elements, right: Elements) -> Elements | None:
    a, b = left.values, right.values
    if len(a) != len(b) and 1 not in (len(a), len(b)):
        return None
    length = max(len(a), len(b))
    pairs = zip(a if len(a) == length else a * length, b if len(b) == length else b * length)  # noqa: B905
    values = [_binary(op, x, y, left.floating) for x, y in pairs]
    if any(value is None for value in values):
        return None
    return Elements(values, max(left.rank, right.rank), left.floating)


def _binary(op: str, a: sympy.Expr, b: sympy.Expr, floating: bool) -> sympy.Expr | None:
    if op == "Div":
        if b.is_zero is not False:
            return None
        ratio = sympy.cancel(a / b)
        if floating:
            power = b.is_Integer and int(b) & (int(b) - 1) == 0
            return ratio if ratio.is_Integer or power else None
        # ONNX truncates, which is floor where nothing is negative
        return sympy.floor(ratio) if a.is_nonnegative and b.is_positive else None
    if floating and not all((x * _STEP).is_integer for x in (a, b)):
        return None
    if op == "Mul":
        return a * b
    return a + b if op == "Add" else a - b


def _dim(tensor: str, axis: int, size: int | str | None) -> sympy.Expr:
    if isinstance(size, (int, np.integer)):
        return sympy.Integer(int(size))
    if not size:
        return _symbol(f"{tensor}[{axis}]")
    try:
        found = _expression(ast.parse(size, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, ZeroDivisionError):
        return _symbol(size)
    return found if found.is_finite is not False and found is not sympy.nan else _symbol(size)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def _expression(node: ast.expr) -> sympy.Expr:
    """Raises ValueError if the text is not integer arithmetic of names."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        return _symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_expression(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_expression(node.left), _expression(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _CALLS.get(node.func.id.lower())
        if function is not None:
            return function(*map(_expression, node.args))
    raise ValueError(f"not integer arithmetic: {ast.unparse(node)}")
