"""A linear map along each of the last axes of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import TensorProto

from pipeline.export.ops.sizes import Value, op, rank

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = (TensorProto.FLOAT, *_NARROW)


def in_float32(x: Value, function: Callable[[Value], Value]) -> Value:
    """Computes in float32 and returns the result in the tensor's own dtype.

    In half precision, weights such as 1/7 have a relative error of 5e-4, all in one direction.

    Raises:
        TypeError: the tensor is not float32, float16 or bfloat16; TensorRT has no other floats.
    """
    if x.dtype not in FLOATS:
        raise TypeError(
            f"a tensor of {x.dtype.name} can't be computed: use float32, float16 or bfloat16"
        )
    if x.dtype not in _NARROW:
        return function(x)
    wide: Value = op.Cast(x, to=TensorProto.FLOAT)
    wide.shape = x.shape
    return op.Cast(function(wide), to=int(x.dtype))


def apply_matrices(x: Value, matrices: Sequence[Value | None]) -> Value:
    """Multiplies the last axes by matrices.

    Args:
        x: the tensor, [..., a, b, c], with one to three axes at the end to map.
        matrices: for each of these axes a matrix [out, in], or None to leave the axis.
    """
    dims = rank(x)
    *outer, rows, columns = [None, None, *matrices][-max(len(matrices), 2) :]
    if columns is not None:
        x = op.MatMul(x, op.Transpose(columns, perm=[1, 0]))
    if rows is not None:
        x = op.MatMul(rows, x)
    for matrix in outer:  # the third axis from the end: swap it with the second
        if matrix is not None:
            order = [*range(dims - 3), dims - 2, dims - 3, dims - 1]
            x = op.Transpose(op.MatMul(matrix, op.Transpose(x, perm=order)), perm=order)
    return x
