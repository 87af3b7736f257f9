"""Computes on the whole tensor instead of the rows that a mask selects, for `replace_nonzero`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import is_op, maker, values_of
from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.sizes import dims_of, elements_of

# elementwise ops: a value outside the mask never reaches a value inside it, and cannot stop the
# run (an integer division by zero could)
_ELEMENTWISE = frozenset({
    "Abs", "Neg", "Relu", "LeakyRelu", "Elu", "Selu", "Sigmoid", "HardSigmoid", "HardSwish",
    "Tanh", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Ceil", "Floor", "Round", "Sign",
    "Softplus", "Cast", "Identity", "Not", "Clip", "Gelu", "Add", "Sub", "Mul", "Max", "Min",
    "Pow", "And", "Or", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Where"
})  # fmt: skip


def identity_perm(node: gs.Node) -> bool:
    """True for a Transpose that swaps the two axes of a matrix."""
    return is_op(node, "Transpose") and list(node.attrs.get("perm", (1, 0))) == [1, 0]


@dataclass(frozen=True)
class Selection:
    """A mask whose NonZero, transposed, is used as indices.

    Args:
        node: the NonZero.
        mask: its input. Elements that are not zero are selected.
    """

    node: gs.Node
    mask: gs.Tensor

    def over(self, data: gs.Tensor, chain: Chain) -> Lift:
        """Raises Refused if the mask's dims are not provably equal to the data's first dims."""
        return Lift(self, data, chain)

    def source_of(self, rows: gs.Tensor) -> gs.Tensor:
        """The tensor from which the rows are selected: the first GatherND's data."""
        if len(rows.inputs) == 1:
            node = rows.inputs[0]
            if is_op(node, "GatherND"):
                return node.inputs[0]
            for source in node.inputs if node.op in _ELEMENTWISE else ():
                try:
                    return self.source_of(source)
                except Refused:
                    continue
        raise Refused(f"{rows.name} is not made elementwise from a selection")


def selection_of(indices: gs.Tensor) -> Selection | None:
    """The selection whose transposed NonZero gives these indices.

    torch's exporter writes the indices of a mask with one axis as ``(k,)``, expands them to their
    own shape, and reshapes them to ``(k, 1)``.
    """
    node = maker(indices)
    if node is not None and is_op(node, "Unsqueeze") and _axes(node) in ([-1], [1]):
        node = maker(node.inputs[0])
        if node is not None and is_op(node, "Expand") and _is_own_shape(node):
            node = maker(node.inputs[0])
        if node is None or not is_op(node, "Squeeze") or _axes(node) not in ([-1], [1]):
            return None
        node = maker(node.inputs[0])
    places = None if node is None or not identity_perm(node) else maker(node.inputs[0])
    if places is None or not is_op(places, "NonZero"):
        return None
    return Selection(places, places.inputs[0])


def _is_own_shape(expand: gs.Node) -> bool:
    """True for an Expand of a tensor to its own shape. A Max of the shape alone may lie between."""
    data, shape = expand.inputs[0], maker(expand.inputs[1])
    if shape is None or not is_op(shape, "Shape") or shape.attrs.get("start", 0):
        return False
    source = shape.inputs[0]
    widest = maker(source)
    if widest is not None and is_op(widest, "Max") and len(widest.inputs) == 1:
        source = widest.inputs[0]
    return source is data and "end" not in shape.attrs


class Lift:
    """Computes rows on the whole of `data` instead, in a chain of new nodes.

    Rows are tensors of shape ``(k, *data.shape[r:])`` with k the number of elements that the
    mask, of rank r, selects.
    """

    def __init__(self, selection: Selection, data: gs.Tensor, chain: Chain) -> None:
        self.data, self.chain = data, chain
        dims = dims_of(data)
        if dims is None:
            raise Refused(f"the rank of {data.name} is not known")
        self.dims = dims
        self.mask, self.rank = self._aligned(selection.mask)
        self.row_rank = 1 + len(dims) - self.rank
        self._made: dict[int, gs.Tensor] = {}

    def _aligned(self, mask: gs.Tensor) -> tuple[gs.Tensor, int]:
        """The mask before an Expand to the data's shape, and the number of axes that it selects."""
        if len(mask.inputs) == 1 and is_op(mask.inputs[0], "Expand"):
            narrow, target = mask.inputs[0].inputs
            sizes, own = elements_of(target), dims_of(narrow)
            if (
                sizes is not None
                and own is not None
                and sizes.values == self.dims
                and len(own) <= len(self.dims)
                and all(
                    a in (1, b) for a, b in zip(own[::-1], self.dims[::-1], strict=False)
                )
            ):  # fmt: skip
                return _without_last_axes(narrow, len(self.dims))
        own = dims_of(mask)
        if own is None:
            raise Refused(f"the rank of {mask.name} is not known")
        if not own or own != self.dims[: len(own)]:
            raise Refused(
                f"the dims of the mask {mask.name} {mask.shape} are not provably equal to those of "
                f"{self.data.name} {self.data.shape}: give equal dims the same name"
            )
        return mask, len(own)

    def condition(self) -> gs.Tensor:
        """The mask as booleans that broadcast against the data."""
        c, mask = self.chain, self.mask
        if mask.dtype != np.bool_:
            mask = c.cast(mask, np.bool_, short="selected")
        missing = len(self.dims) - self.rank
        if not missing:
            return mask
        # 0 keeps a size; Unsqueeze would have another form below opset 13
        shape = [*[0] * self.rank, *[1] * missing]
        dims = [*(self.mask.shape or ()), *[1] * missing]
        return c.op(
            "Reshape", mask, np.array(shape), short="column", dtype=np.bool_, shape=dims
        )  # fmt: skip

    def count(self) -> gs.Tensor:
        """How many elements of the data are selected, an int64 scalar."""
        c = self.chain
        shape = c.op("Shape", self.data, short="shape", dtype=np.int64, shape=[len(self.dims)])
        every = c.op(
            "Expand", self.condition(), shape, short="every", dtype=np.bool_, shape=self.data.shape
        )
        ones = c.cast(every, np.int64, short="ones")
        return c.op("ReduceSum", ones, short="count", dtype=np.int64, shape=[], keepdims=0)

    def full(self, rows: gs.Tensor, *, written_back: bool = False) -> gs.Tensor:
        """The same arithmetic on the whole of the data.

        Args:
            rows: computed elementwise from selections of the same mask, and single numbers.
            written_back: the rows become the updates of a ScatterND with the same mask. So they
                must be k rows, or the rows' elements in order if that mask is expanded. An Expand,
                Reshape to one axis or Slice of rows then changes nothing.

        Raises:
            Refused: an op on the way is not elementwise, or uses another mask.
        """
        if id(rows) not in self._made:
            self._made[id(rows)] = self._lift(rows, written_back)
        return self._made[id(rows)]

    def _lift(self, rows: gs.Tensor, written_back: bool) -> gs.Tensor:
        if _is_number(rows):
            return rows
        node = rows.inputs[0] if len(rows.inputs) == 1 else None
        if node is None:
            raise Refused(f"{rows.name} is not made from a selection by the same mask")
        if is_op(node, "GatherND"):
            return self._gathered(node)
        if node.op in _ELEMENTWISE and is_op(node, node.op):
            return self._elementwise(node, written_back)
        if is_op(node, "Div"):
            if rows.dtype is not None and np.dtype(rows.dtype).kind == "f":
                return self._elementwise(node, written_back)
            raise Refused(f"integer division in {node.name!r} may divide by 0 outside the mask")
        if written_back and is_op(node, "Expand"):
            source = node.inputs[0]
            return source if self._is_tail(source) else self.full(source, written_back=True)
        # the rows in order are the elements that the expanded mask selects
        flat = is_op(node, "Reshape") and _is(node.inputs[1], [-1])
        if (flat and (written_back or self.row_rank == 1)) or (written_back and _keeps_start(node)):
            return self.full(node.inputs[0], written_back=written_back)
        raise Refused(
            f"{node.op} {node.name!r} between the selection and its use is not elementwise"
        )

    def _gathered(self, node: gs.Node) -> gs.Tensor:
        source, indices = node.inputs
        selection = selection_of(indices)
        if selection is None or node.attrs.get("batch_dims", 0):
            raise Refused(f"GatherND {node.name!r} does not select by a mask")
        if dims_of(source) != self.dims:
            raise Refused(f"{source.name} and {self.data.name} do not provably have the same shape")
        if self._aligned(selection.mask)[0] is not self.mask:
            raise Refused(f"GatherND {node.name!r} selects by another mask")
        return source

    def _elementwise(self, node: gs.Node, written_back: bool) -> gs.Tensor:
        given = [
            self.full(t, written_back=written_back) if t.name else t for t in node.inputs
        ]  # fmt: skip
        old = node.outputs[0]
        whole = old.dtype is not None and any(dims_of(t) == self.dims for t in given)
        shape = self.data.shape if whole else None
        return self.chain.op(
            node.op, *given, short=f"all_{node.op.lower()}", dtype=old.dtype, shape=shape,
            **node.attrs,
        )  # fmt: skip

    def _is_tail(self, tensor: gs.Tensor) -> bool:
        """True for one row: a tensor that broadcasts against the data's axes after the mask's."""
        own = dims_of(tensor)
        if own is None or len(own) > len(self.dims) - self.rank:
            return False
        return all(a in (1, b) for a, b in zip(own[::-1], self.dims[::-1], strict=False))


def _without_last_axes(mask: gs.Tensor, rank: int) -> tuple[gs.Tensor, int]:
    """The mask before a final Unsqueeze, and its rank. Without one, the rank is `rank`."""
    node = maker(mask)
    if node is not None and is_op(node, "Unsqueeze") and mask.shape is not None:
        own = len(mask.shape)
        axes = sorted(axis % own for axis in _axes(node))
        if own == rank and axes and axes == list(range(own - len(axes), own)):
            return node.inputs[0], own - len(axes)
    return mask, rank


def _axes(node: gs.Node) -> list[int]:
    """The constant axes of Squeeze and Unsqueeze; empty if they are computed."""
    if len(node.inputs) > 1:
        values = values_of(node.inputs[1])
        return [] if values is None else [int(v) for v in values.reshape(-1)]
    return list(node.attrs.get("axes", []))


def _is_number(tensor: gs.Tensor) -> bool:
    """True for one element whose rank adds no axes to rows."""
    values = values_of(tensor)
    shape = values.shape if values is not None else tensor.shape
    return shape is not None and len(shape) <= 1 and all(size == 1 for size in shape)


def _is(tensor: gs.Tensor, wanted: list[int]) -> bool:
    values = values_of(tensor)
    return values is not None and values.reshape(-1).tolist() == wanted


def _keeps_start(node: gs.Node) -> bool:
    """A Slice along the first axis from 0 in steps of 1."""
    if not is_op(node, "Slice") or len(node.inputs) < 4:
        return False
    return (
        _is(node.inputs[1], [0])
        and _is(node.inputs[3], [0])
        and (len(node.inputs) < 5 or _is(node.inputs[4], [1]))
    )
