"""An additive attention mask becomes a selection.

torch's exporter writes a boolean attention mask as ``Softmax(scores + Where(mask, 0, -3.4e38))``.
TensorRT 8.6 computes this silently wrong for scores of one query (decoding with a cache). It runs
them as one batch of batch * heads products, and reads the computed mask at the index of that
batch. So every row but the first gets the mask of another row, or memory after the mask. A
selection is computed correctly.

TensorRT is also wrong if other computed values are added to such scores: a product of the mask, a
bias beside a mask, masks that other nodes also read. No rewrite is known that fixes all of them.
They are refused, as a warning, since some forms are computed correctly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10
from pipeline.passes.graph_ops import drop_unused, is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.chain import Chain

# ops that move values of any dtype
_MOVES = ("Identity", "Unsqueeze", "Squeeze", "Slice", "Reshape", "Transpose", "Expand")
_MOST = 2  # masks in one sum, which is computed for each of their 2**2 outcomes
_PRODUCTS, _SUMS, _SCALES = ("MatMul", "Gemm", "Einsum"), ("Add", "Sub"), ("Mul", "Div")
_DEEP = 100  # longest chain of nodes that is followed
_DETAIL = (
    "adds the computed {names} to attention scores. With one query, values of {names} may reach "
    "other rows of the batch{more}. Pass {names} to the model as a float input, or compare the "
    "engine on a GPU (pipeline verify)"
)


@dataclass(frozen=True, eq=False)
class _Mask:
    """A Where of two constants, and the nodes that move its result, last node first."""

    on: gs.Tensor
    branches: list[np.ndarray]
    moves: list[gs.Node]

    def __str__(self) -> str:
        return f"{self.on.name}: {' or '.join(f'{b.item():g}' for b in self.branches)}"


@dataclass(frozen=True)
class _Sum:
    """``left + right``."""

    left: _Term
    right: _Term

    def masks(self) -> list[_Mask]:
        found: list[_Mask] = []
        for term in (self.left, self.right):
            found += term.masks() if isinstance(term, _Sum) else []
            found += [term] if isinstance(term, _Mask) else []
        return found

    def others(self) -> list[gs.Tensor]:
        """The added tensors that are not masks."""
        found: list[gs.Tensor] = []
        for term in (self.left, self.right):
            if not isinstance(term, _Mask):
                found += term.others() if isinstance(term, _Sum) else [term]
        return found


_Term: TypeAlias = _Sum | _Mask | gs.Tensor


def run(graph: gs.Graph) -> PassResult:
    """Rewrites ``Add(x, Where(mask, a, b))`` before a Softmax or a MatMul into ``Where(mask, x + a,
    x + b)``.

    a and b are constants of one element. A term that adds 0 is omitted. Nodes between the Where and
    the Add (a Slice, an Unsqueeze) move the mask instead. Casts before the Softmax are followed,
    and sums that nothing else reads: ``x + (m + bias)`` becomes ``Where(mask, x + (a + bias),
    x + (b + bias))``. If a sum has more than two masks, the others stay added.

    The result is equal to the bit, except for the sign of zeros. Refused, once per graph: any other
    computed value that is added to the scores of a Softmax that may have one query.
    """
    outputs = {id(tensor) for inner, _ in walk(graph) for tensor in inner.outputs}
    rewritten, left = [], []
    for inner, node in walk(graph):
        if not is_op(node, "Add") or not _is_weight(node):
            continue
        whole = _Sum(*(_term(tensor, outputs) for tensor in node.inputs))
        computed = _computed(node, whole)
        if computed:
            left.append((label(node), computed))
            continue
        masks = whole.masks()[-_MOST:]
        if not masks or (isinstance(whole.left, _Mask) and isinstance(whole.right, _Mask)):
            continue
        name, old = label(node), list(node.inputs)
        _write(inner, node, whole, masks)
        rewritten.append(Change(name, "Add", f"selects: {'; '.join(map(str, masks))}"))
        for tensor in old:
            if not tensor.outputs:
                drop_unused(graph, tensor)
    return PassResult(tuple(rewritten), _refused(left))


def _refused(left: Sequence[tuple[str, Sequence[str]]]) -> tuple[Change, ...]:
    if not left:
        return ()
    name, computed = left[0]
    more = f" ({len(left) - 1} more Adds have the same problem)" if len(left) > 1 else ""
    detail = _DETAIL.format(names=" and ".join(computed), more=more)
    return (Change(name, "Add", detail),)


def _is_weight(node: gs.Node, ops: Sequence[str] = ("Softmax", "MatMul")) -> bool:
    readers = list(node.outputs[0].outputs)
    for reader in list(readers):
        if is_op(reader, "Cast"):
            readers += reader.outputs[0].outputs
    return any(is_op(reader, op) for reader in readers for op in ops)


def _computed(node: gs.Node, whole: _Sum) -> list[str]:
    """Names of computed tensors that stay added to scores which may have one query."""
    shape = node.outputs[0].shape
    queries = shape[-2] if shape is not None and len(shape) > 1 else None
    if not _is_weight(node, ("Softmax",)) or (isinstance(queries, int) and queries > 1):
        return []
    known: dict[int, frozenset[str]] = {}
    roots = [(tensor.name, _roots(tensor, known)) for tensor in whole.others()]
    if not any("product" in kinds for _, kinds in roots):
        return []
    names = [name for name, kinds in roots if "computed" in kinds]
    return names + [mask.on.name for mask in whole.masks()[:-_MOST]]


def _roots(tensor: gs.Tensor, known: dict[int, frozenset[str]], depth: int = 0) -> frozenset[str]:
    """What a tensor is computed from: ``product``, ``computed``, or neither (only inputs and
    constants). A factor or divisor of a product is its scale, and does not count."""
    if values_of(tensor) is not None or not tensor.inputs:
        return frozenset()
    if id(tensor) not in known:
        maker, parts = tensor.inputs[0], list(tensor.inputs[0].inputs)
        kinds: frozenset[str] = frozenset({"computed"})
        if any(is_op(maker, op) for op in _PRODUCTS):
            kinds = frozenset({"product"})
        elif any(is_op(maker, op) for op in (*_SUMS, *_SCALES, *_MOVES, "Cast")) and depth < _DEEP:
            scaled = any(is_op(maker, op) for op in _SCALES)
            used = parts if scaled or any(is_op(maker, op) for op in _SUMS) else parts[:1]
            found = [_roots(t, known, depth + 1) for t in used]
            if scaled:
                found = [one for one in found if "product" in one]
            # an input that is only moved may be wrong too, so it counts as computed
            kinds = frozenset[str]().union(*found) or kinds
        known[id(tensor)] = kinds
    return known[id(tensor)]


def _term(tensor: gs.Tensor, outputs: set[int]) -> _Term:
    """The tensor as a mask, as a sum that contains masks and has no other reader, or unchanged."""
    mask = _mask(tensor)
    if mask is not None:
        return mask
    source = _uncast(tensor)
    alone = all(len(t.outputs) == 1 and id(t) not in outputs for t in (tensor, source))
    if not alone or len(source.inputs) != 1 or not is_op(source.inputs[0], "Add"):
        return tensor
    whole = _Sum(*(_term(part, outputs) for part in source.inputs[0].inputs))
    return whole if whole.masks() else tensor


def _uncast(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor before Casts that do not change its dtype."""
    while len(tensor.inputs) == 1 and is_op(tensor.inputs[0], "Cast"):
        source = tensor.inputs[0].inputs[0]
        if tensor.dtype is None or source.dtype != tensor.dtype:
            break
        tensor = source
    return tensor


def _mask(tensor: gs.Tensor) -> _Mask | None:
    """The Where that makes a tensor. None if its constants have a higher rank than its mask, since
    they then shape the result."""
    moves = []
    tensor = _uncast(tensor)
    while len(tensor.inputs) == 1 and any(is_op(tensor.inputs[0], op) for op in _MOVES):
        moves.append(tensor.inputs[0])
        tensor = _uncast(tensor.inputs[0].inputs[0])
    if len(tensor.inputs) != 1 or not is_op(tensor.inputs[0], "Where"):
        return None
    on, *branches = tensor.inputs[0].inputs
    values = [v for v in (_value(branch, on) for branch in branches) if v is not None]
    if len(values) != 2 or values[0].dtype.kind != "f":
        return None
    rank = max(v.ndim for v in values)
    if rank and (on.shape is None or rank > len(on.shape)):
        return None
    return _Mask(on, [v.reshape(()) for v in values], moves)


def _value(tensor: gs.Tensor, on: gs.Tensor) -> np.ndarray | None:
    """A constant of one element, also if it is expanded to the shape of the mask."""
    known = on.shape is not None and not {None, ""}.intersection(on.shape)
    if known and len(tensor.inputs) == 1 and tensor.shape == on.shape:
        source = tensor.inputs[0]
        if is_op(source, "ConstantOfShape"):
            filled = source.attrs.get("value")
            value = np.zeros(1, np.float32) if filled is None else values_of(filled)
            return value if value is not None and value.size == 1 else None
        if is_op(source, "Expand"):
            tensor = source.inputs[0]
    value = values_of(tensor)
    return value if value is not None and value.size == 1 else None


def _write(graph: gs.Graph, node: gs.Node, whole: _Sum, masks: Sequence[_Mask]) -> None:
    c, dtype = Chain(graph, node), masks[0].branches[0].dtype
    conditions = [_condition(c, mask) for mask in masks]

    def added(term: _Term, values: Mapping[_Mask, np.ndarray]) -> gs.Tensor | np.ndarray:
        if isinstance(term, _Mask):
            return values[term] if term in values else _where(c, term)
        if not isinstance(term, _Sum):
            return term
        left, right = added(term.left, values), added(term.right, values)
        for one, other in ((left, right), (right, left)):
            if isinstance(one, np.ndarray) and one.item() == 0:
                return other
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            with np.errstate(over="ignore"):  # two of the lowest floats are -inf
                return np.asarray(left + right)
        return c.op("Add", left, right, short="added", dtype=dtype)

    def selected(number: int, values: Mapping[_Mask, np.ndarray]) -> gs.Tensor | np.ndarray:
        if number == len(masks):
            return added(whole, values)
        mask = masks[number]
        made = [selected(number + 1, {**values, mask: value}) for value in mask.branches]
        return c.op("Where", conditions[number], *made, short="where", dtype=dtype)

    selected(0, {})
    c.finish()


def _condition(c: Chain, mask: _Mask) -> gs.Tensor:
    on = mask.on
    for move in reversed(mask.moves):
        on = c.op(
            move.op, on, *move.inputs[1:], short=f"mask_{move.op.lower()}", dtype=np.bool_,
            shape=move.outputs[0].shape, **move.attrs,
        )  # fmt: skip
    return on


def _where(c: Chain, mask: _Mask) -> gs.Tensor:
    """The mask as an additive term, as before the rewrite."""
    dtype = mask.branches[0].dtype
    return c.op("Where", _condition(c, mask), *mask.branches, short="mask", dtype=dtype)


PASS = Pass(
    name="select_additive_mask",
    run=run,
    targets=(BELOW_10,),
    summary="Softmax(x + Where(mask, 0, c)) -> Softmax(Where(mask, x, x + c)); before MatMul too",
    fault="if x is a product with one query, a row of the batch gets the mask of another row",
    tolerable=True,  # some forms are computed correctly
    evidence=("TensorRT 8.6.0: Llama decoding, all rows but the first are wrong; the cases",),
)
