"""Bitwise ops and shifts of integers become arithmetic.

TensorRT has no BitwiseAnd, Or, Xor, Not and no BitShift: the parsers of RTX 1.7 and 8.6 refuse
them. RTX also has no uint32 and uint64. The arithmetic is exact for every value:

- not x is -1 - x; x or z is x + (z - (x and z)); x xor z is (x - (x and z)) + (z - (x and z)).
- "x and z" multiplies the bits. Each operand without its sign is divided by the powers of two.
  This adds an axis of up to 30 elements, which takes memory unless TensorRT fuses it. A constant
  mask that is not negative needs one element per bit.
- torch writes shifts of int32 and int64 as BitShift between casts to unsigned and back, and a
  Where that restores the sign. x << k becomes a multiplication. x >> k becomes a division of x,
  or of not x if x is negative.

Only numbers that are not negative are divided, so truncation equals floor. No constant exceeds
2**30, except the smallest integer. So results are also right on TensorRT 8.6, which computes
int64 as int32 and clamps constants, for every value that fits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import drop_unused, holder, is_op, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import reduce, unsqueeze, widen, work_dtype

_LIMB = 30  # bits processed at a time
_BITWISE = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
# unsigned dtype -> the signed dtype that torch casts to it, bits
_SIGNED = {
    int(onnx.TensorProto.UINT32): (np.int32, 32),
    int(onnx.TensorProto.UINT64): (np.int64, 64),
}


def run(graph: gs.Graph) -> PassResult:
    """Rewrites BitwiseAnd, Or, Xor, Not of int32, int64 and uint8, and BitShift by constants.

    BitShift: of uint8, and of int32 and int64 as torch exports it. uint8 is computed in int32.
    Refused: other dtypes, an unknown dtype, computed shift amounts, and a shift of unsigned
    numbers that is not torch's shift of signed numbers.
    """
    shifts = each(graph, "BitShift", lambda inner, node: _shift(graph, inner, node))
    others = each(graph, _BITWISE, _bitwise)
    return PassResult(shifts.rewritten + others.rewritten, shifts.refused + others.refused)


def _bitwise(inner: gs.Graph, node: gs.Node) -> str:
    dtype = work_dtype(node.inputs[0], (np.int32, np.int64, np.uint8))
    op, chain = node.op, Chain(inner, node)
    work = np.dtype(np.int32) if dtype == np.uint8 else dtype
    x, *others = (widen(chain, tensor, work) for tensor in node.inputs)
    ones = np.array(255 if dtype == np.uint8 else -1, work)
    if op == "BitwiseNot":
        y = chain.op("Sub", ones, x, dtype=work)
    else:
        (z,) = others
        y = both = _and(chain, x, z, 8 if dtype == np.uint8 else work.itemsize * 8 - 1)
        if op != "BitwiseAnd":
            y = chain.op("Sub", z, both, dtype=work)
            more = chain.op("Sub", x, both, dtype=work) if op == "BitwiseXor" else x
            y = chain.op("Add", more, y, dtype=work)
    if dtype == np.uint8:
        y = chain.cast(y, dtype, short="narrowed")
    chain.finish(y)
    return f"arithmetic in {work.name}"


def _and(chain: Chain, x: gs.Tensor, z: gs.Tensor, bits: int) -> gs.Tensor:
    """Bitwise "x and z". `bits` is the number of bits without the sign (uint8 has no sign)."""
    dtype = x.dtype
    masks = [values_of(tensor) for tensor in chain.node.inputs]
    signed = bits > 8 and not any(mask is not None and (mask >= 0).all() for mask in masks)
    for mask in masks:
        if mask is not None and mask.size and (mask >= 0).all():
            bits = min(bits, max(int(mask.max()).bit_length(), 1))
    lowest = np.array(np.iinfo(dtype).min, dtype)
    negative, rest = [], []
    for tensor in (x, z):
        below = chain.op("Less", tensor, np.array(0, dtype), short="negative", dtype=np.bool_)
        lifted = chain.op("Sub", tensor, lowest, dtype=dtype)
        negative.append(below)
        rest.append(chain.op("Where", below, lifted, tensor, short="rest", dtype=dtype))
    limb = np.array(2**_LIMB, dtype)
    total = None
    for start in range(0, bits, _LIMB):
        digits = []
        for n, tensor in enumerate(rest):
            above = chain.op("Div", tensor, limb, short="above", dtype=dtype)
            whole = chain.op("Mul", above, limb, dtype=dtype)
            digits.append(chain.op("Sub", tensor, whole, short="limb", dtype=dtype))
            rest[n] = above
        part = _limb_and(chain, digits, min(_LIMB, bits - start))
        for _ in range(start // _LIMB):
            part = chain.op("Mul", part, limb, dtype=dtype)
        total = part if total is None else chain.op("Add", total, part, dtype=dtype)
    if signed:
        sign = chain.op("And", *negative, dtype=np.bool_)
        lowered = chain.op("Add", total, lowest, dtype=dtype)
        total = chain.op("Where", sign, lowered, total, dtype=dtype)
    return total


def _limb_and(chain: Chain, digits: list[gs.Tensor], bits: int) -> Any:
    """Bitwise "and" of two numbers from 0 to 2**30 - 1, with the bits along a new last axis."""
    dtype = digits[0].dtype
    powers = 2 ** np.arange(bits).astype(dtype)
    two = np.array([2], dtype)
    found = []
    for tensor in digits:
        shifted = chain.op("Div", unsqueeze(chain, tensor, -1), powers, dtype=dtype)
        half = chain.op("Div", shifted, two, dtype=dtype)
        even = chain.op("Mul", half, two, dtype=dtype)
        found.append(chain.op("Sub", shifted, even, short="bits", dtype=dtype))
    both = chain.op("Mul", *found, dtype=dtype)
    return reduce(chain, "ReduceSum", chain.op("Mul", both, powers, dtype=dtype), -1)


def _shift(root: gs.Graph, inner: gs.Graph, node: gs.Node) -> str:
    amount = values_of(node.inputs[1])
    if amount is None:
        raise Refused(f"the shift amount {node.inputs[1].name} is computed: use a constant")
    left = node.attrs["direction"] in ("LEFT", b"LEFT")
    data = node.inputs[0]
    if data.dtype is None:
        raise Refused(f"the dtype of {data.name} is not known: declare it in value_info")
    kind = int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(data.dtype)))
    bits = 8 if kind == onnx.TensorProto.UINT8 else _SIGNED.get(kind, (None, 0))[1]
    if not bits:
        raise Refused(f"TensorRT has no {np.dtype(data.dtype).name} ({data.name}): use int32")
    if (amount >= bits).any():
        raise Refused(f"{bits} bits cannot be shifted by {amount.max()}: shift by less than {bits}")
    amount = amount.astype(np.int64)
    if bits == 8:
        return _shift_bytes(inner, node, amount, left)
    return _shift_signed(root, inner, node, amount, left)


def _shift_bytes(inner: gs.Graph, node: gs.Node, amount: np.ndarray, left: bool) -> str:
    chain = Chain(inner, node)
    wide = chain.cast(node.inputs[0], np.int32)
    powers = (2**amount).astype(np.int32)
    shifted = chain.op("Mul" if left else "Div", wide, powers, dtype=np.int32)
    if left:
        size = np.array(256, np.int32)
        above = chain.op("Div", shifted, size, dtype=np.int32)
        lost = chain.op("Mul", above, size, dtype=np.int32)
        shifted = chain.op("Sub", shifted, lost, dtype=np.int32)
    chain.finish(chain.cast(shifted, np.uint8, short="narrowed"))
    return "arithmetic in int32"


def _shift_signed(
    root: gs.Graph, inner: gs.Graph, node: gs.Node, amount: np.ndarray, left: bool
) -> str:
    kind = int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(node.inputs[0].dtype)))
    dtype, bits = _SIGNED[kind]
    x = _cast_from(node.inputs[0], dtype)
    if x is None:
        raise Refused(
            f"TensorRT has no {np.dtype(node.inputs[0].dtype).name}: shift {np.dtype(dtype).name}"
        )
    output = node.outputs[0]
    readers = list(output.outputs)
    if left:
        # reads in a body of If or Loop count too: they read the same tensor
        kept = not readers or any(other is output for other in inner.outputs)
        if kept or not all(_casts_to(reader, dtype) for reader in readers):
            name = np.dtype(dtype).name
            raise Refused(f"{output.name} is not only read by Casts to {name}: shift {name}")
        for reader in readers:
            chain = Chain(holder(root, reader), reader)
            chain.finish(_scale(chain, "Mul", x, amount, dtype))
        drop_unused(root, output)
        return f"multiplication in {np.dtype(dtype).name}"
    choice = _sign_put_back(output, x, amount, dtype, bits)
    if choice is None:
        raise Refused(
            f"{output.name} is a shift of unsigned numbers, which TensorRT lacks: "
            f"shift {np.dtype(dtype).name}"
        )
    leftover = list(choice.inputs)
    chain = Chain(holder(root, choice), choice)
    ones = np.array(-1, dtype)
    inverse = chain.op("Sub", ones, x, dtype=dtype)
    negative = chain.op("Less", x, np.array(0, dtype), dtype=np.bool_)
    magnitude = chain.op("Where", negative, inverse, x, dtype=dtype)
    divided = _scale(chain, "Div", magnitude, amount, dtype)
    back = chain.op("Sub", ones, divided, dtype=dtype)
    chain.finish(chain.op("Where", negative, back, divided, dtype=dtype))
    for tensor in leftover:
        drop_unused(root, tensor)
    return f"division in {np.dtype(dtype).name}"


def _scale(chain: Chain, op: str, x: gs.Tensor, amount: np.ndarray, dtype: Any) -> gs.Tensor:
    """x multiplied or divided by 2**amount, in steps of up to 2**30."""
    while True:
        step = np.minimum(amount, _LIMB)
        x = chain.op(op, x, (2**step).astype(dtype), dtype=dtype)
        amount = amount - step
        if not amount.any():
            return x


def _sign_put_back(
    output: gs.Tensor, x: gs.Tensor, amount: np.ndarray, dtype: Any, bits: int
) -> gs.Node | None:
    """The Where at the end of torch's shift to the right: Where(x < 0, Cast(output | mask),
    Cast(output)). None if another node reads `output`."""
    casts = [reader for reader in output.outputs if _casts_to(reader, dtype)]
    masks = [reader for reader in output.outputs if is_op(reader, "BitwiseOr")]
    if len(output.outputs) != 2 or len(casts) != 1 or len(masks) != 1:
        return None
    (mask,) = (values_of(t) for t in masks[0].inputs if t is not output)
    above = (1 << bits) - 1
    right = np.array([above ^ (above >> int(n)) for n in amount.reshape(-1)], object)
    if mask is None or mask.size != right.size or (mask.reshape(-1).astype(object) != right).any():
        return None
    choices = casts[0].outputs[0].outputs
    filled = masks[0].outputs[0].outputs
    if len(choices) != 1 or len(filled) != 1 or not is_op(choices[0], "Where"):
        return None
    condition, one, other = choices[0].inputs
    compared = condition.inputs[0] if condition.inputs else None
    if (
        other is not casts[0].outputs[0]
        or not _casts_to(filled[0], dtype)
        or one is not filled[0].outputs[0]
        or compared is None
        or not is_op(compared, "Less")
        or compared.inputs[0] is not x
    ):
        return None
    zero = values_of(compared.inputs[1])
    return choices[0] if zero is not None and not zero.any() else None


def _cast_from(tensor: gs.Tensor, dtype: Any) -> gs.Tensor | None:
    """The source of the Cast that made the tensor, if the source has this dtype."""
    if len(tensor.inputs) != 1 or not is_op(tensor.inputs[0], "Cast"):
        return None
    source = tensor.inputs[0].inputs[0]
    return source if source.dtype == dtype else None


def _casts_to(node: gs.Node, dtype: Any) -> bool:
    to = int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    return is_op(node, "Cast") and int(node.attrs["to"]) == to


PASS = Pass(
    name="expand_bitwise",
    run=run,
    targets=EVERY,
    summary="BitwiseAnd, Or, Xor, Not, BitShift of integers -> arithmetic",
    fault="TensorRT lacks these ops: the parser refuses them",
    evidence=(
        "cases: rtx-1.7 does not parse any of them",
        "onnx-tensorrt's operators.md lists BitShift as unsupported, and omits the others",
    ),
)
