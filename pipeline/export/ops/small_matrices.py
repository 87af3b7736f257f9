"""inv, solve, det and slogdet of matrices up to 4x4, by elimination with row exchanges.

torch's exporter has only ``Det``, which TensorRT lacks. These graphs take the largest value of a
column as the pivot, as LAPACK does, so their rounding errors are of the same size. torch raises an
error for a singular matrix. An engine can't: it gives infinities or NaNs. The determinant of a
singular matrix is 0 in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from onnx import TensorProto

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import Value, floats, ints, op, rank

aten: Any = torch.ops.aten
_LARGEST = 4
_OUTSIDE = "compute it before or after the engine, and pass its result as an input"


@dataclass
class _Eliminated:
    """An upper triangle and its right-hand sides.

    Args:
        rows: the rows of the triangle, [..., n] each; below the diagonal they are not valid.
        sides: the rows of the right-hand sides, [..., m] each; empty without any.
        sign: -1 or 1, [..., 1]: whether the number of exchanges is odd.
    """

    rows: list[Value]
    sides: list[Value]
    sign: Value


def inv_ex(A: Value, check_errors: bool = False) -> tuple[Value, Value]:
    """``linalg_inv_ex``: [..., n, n], and a placeholder for the error code."""
    del check_errors
    return inv(A), _no_error()


def inv(A: Value) -> Value:
    """``linalg_inv``: [..., n, n]."""
    count = _count(A)
    unit = [op.Constant(value_floats=[float(i == j) for j in range(count)]) for i in range(count)]
    return _solved(A, unit)


def solve_ex(
    A: Value,
    B: Value,
    left: bool = True,
    check_errors: bool = False,
) -> tuple[Value, Value, Value, Value]:
    """``_linalg_solve_ex``: the solution, and placeholders for the factors and the error code."""
    del check_errors
    return solve(A, B, left), _no_error(), _no_error(), _no_error()


def solve(A: Value, B: Value, left: bool = True) -> Value:
    """``linalg_solve``: [..., n, m], or [..., n] for vectors."""
    count = _count(A)
    of_vectors = rank(B) == 1 or (rank(B) == rank(A) - 1 and _same(B.shape, A.shape[:-1]))
    if of_vectors:
        B = op.Unsqueeze(B, ints(-1))
    elif not left:
        A, B = _transposed(A), _transposed(B)
    found = _solved(A, _rows(B, count))
    if of_vectors:
        found = op.Squeeze(found, ints(-1))
    elif not left:
        found = _transposed(found, rank(A))
    return found


def det(A: Value) -> Value:
    """``linalg_det``: [...]."""
    done = _eliminated(A, [], _count(A))
    product = done.sign
    for n, row in enumerate(done.rows):
        product = op.Mul(product, _at(row, n))
    return op.Squeeze(product, ints(-1))


def slogdet(A: Value) -> tuple[Value, Value, Value, Value]:
    """``_linalg_slogdet``: sign and logarithm of the determinant, [...], and placeholders."""
    done = _eliminated(A, [], _count(A))
    sign, total = done.sign, None
    for n, row in enumerate(done.rows):
        sign = op.Mul(sign, op.Sign(_at(row, n)))
        part = op.Log(op.Abs(_at(row, n)))
        total = part if total is None else op.Add(total, part)
    squeezed = (op.Squeeze(t, ints(-1)) for t in (sign, total))
    return *squeezed, _no_error(), _no_error()


def _count(matrix: Value) -> int:
    """The number of rows.

    Raises:
        ExportError: the matrix is too large, of a dynamic size, or not float32.
    """
    rows, columns = matrix.shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ExportError(f"only matrices of a fixed size can be exported; {_OUTSIDE}")
    if rows > _LARGEST:
        raise ExportError(
            f"only matrices up to {_LARGEST}x{_LARGEST} can be exported, and this is "
            f"{rows}x{columns}; {_OUTSIDE}"
        )
    if matrix.dtype != TensorProto.FLOAT:
        raise ExportError(f"a matrix of {matrix.dtype.name} can't be exported; cast to float32")
    return rows


def _eliminated(matrix: Value, sides: list[Value], count: int) -> _Eliminated:
    done = _Eliminated(_rows(matrix, count), list(sides), op.Constant(value_floats=[1.0]))
    for n in range(count):
        for other in range(n + 1, count):
            _exchange(done, n, other)
        pivot = _at(done.rows[n], n)
        # a column of zeros: nothing to eliminate, and 0 / 0 would spread
        divisor = op.Where(op.Equal(pivot, floats(0.0)), floats(1.0), pivot)
        for other in range(n + 1, count):
            factor = op.Div(_at(done.rows[other], n), divisor)
            for rows in (done.rows, done.sides):
                if rows:
                    rows[other] = op.Sub(rows[other], op.Mul(factor, rows[n]))
    return done


def _exchange(done: _Eliminated, n: int, other: int) -> None:
    """Exchanges two rows where the lower one has the larger value in column n."""
    mine, its = (op.Abs(_at(done.rows[i], n)) for i in (n, other))
    larger = op.Greater(its, mine)
    for rows in (done.rows, done.sides):
        if rows:
            upper, lower = rows[n], rows[other]
            rows[n], rows[other] = op.Where(larger, lower, upper), op.Where(larger, upper, lower)
    done.sign = op.Where(larger, op.Neg(done.sign), done.sign)


def _solved(matrix: Value, sides: list[Value]) -> Value:
    """The solution, [..., n, m]."""
    count = len(sides)
    done = _eliminated(matrix, sides, count)
    found: list[Value] = []
    for n in reversed(range(count)):
        rest = done.sides[n]
        for column, row in zip(range(n + 1, count), reversed(found), strict=True):
            rest = op.Sub(rest, op.Mul(_at(done.rows[n], column), row))
        found.append(op.Div(rest, _at(done.rows[n], n)))
    return op.Concat(*(op.Unsqueeze(row, ints(-2)) for row in reversed(found)), axis=-2)


def _rows(matrix: Value, count: int) -> list[Value]:
    rows = (op.Slice(matrix, ints(n), ints(n + 1), ints(-2)) for n in range(count))
    return [op.Squeeze(row, ints(-2)) for row in rows]


def _at(row: Value, n: int) -> Value:
    """One value of a row, [..., 1]."""
    return op.Slice(row, ints(n), ints(n + 1), ints(-1))


def _transposed(matrix: Value, dims: int | None = None) -> Value:
    dims = rank(matrix) if dims is None else dims
    new = op.Transpose(matrix, perm=[*range(dims - 2), dims - 1, dims - 2])
    if matrix.shape is not None:
        new.shape = type(matrix.shape)([*matrix.shape[:-2], matrix.shape[-1], matrix.shape[-2]])
    new.dtype = matrix.dtype
    return new


def _same(one: Any, other: Any) -> bool:
    return [str(s) for s in one] == [str(s) for s in other]


def _no_error() -> Value:
    """A placeholder: `pipeline.export.ops.exporter` refuses programs that read it."""
    return op.Constant(value_int=0)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.inverse.default: inv,
    aten.linalg_inv.default: inv,
    aten.linalg_inv_ex.default: inv_ex,
    aten.linalg_solve.default: solve,
    aten._linalg_solve_ex.default: solve_ex,
    aten.det.default: det,
    aten.linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
}
# for each op, the number of outputs that are valid
VALID_OUTPUTS = {
    aten.linalg_inv_ex.default: 1,
    aten.linalg_solve_ex.default: 1,
    aten._linalg_solve_ex.default: 1,
    aten._linalg_slogdet.default: 2,
}
