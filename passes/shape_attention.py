"""Attention gets the form that TensorRT fuses.

The form is ``MatMul(Softmax(MatMul(Q * scale, K^T) + mask), V)``. Q, K and V have the shape
``[batch, heads, length, channels]``, and one Transpose makes K^T. Exporters write other forms:

- the scale after the first product, or its root on both Q and K
- K transposed in 3-D, between two Reshapes to computed sizes (torch.export)
- Q, K and V of ``nn.MultiheadAttention``, with the sequence first, through 5-D
- products in 3-D, with batch times heads as the first axis

TensorRT computes all of them correctly, but as separate kernels. The rewrite changes numbers only
by rounding. Masks, softmax, and guards against NaN stay, and read the same scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10, Versions
from pipeline.passes.graph_ops import drop_unused, is_op, label, walk
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.attention import Attention, Operand, Plan, find, operand, saved
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import unsqueeze
from pipeline.passes.lib.heads import Rise, plan_rise
from pipeline.passes.lib.layout import Layout, Step, product, write
from pipeline.passes.lib.sizes import dims_of
from pipeline.passes.lib.views import can_follow, data_of, factor_of, is_weighted

_VIEWS = ("Reshape", "Identity")
_LARGEST = 2.0**12  # Q keeps its digits in half precision if it is multiplied by this or 1/this


def run(graph: gs.Graph) -> PassResult:
    """Rewrites attention in float32 and float16, from opset 13 on; refuses none.

    Left alone: a softmax over another axis, a sum of several products, a scale that is computed
    from data. A scale stays if a mask is added before it, or if something else reads the scores
    before it. A 3-D product stays 3-D if its heads are not proven, or if something else reads what
    is between the products.
    """
    rewritten: list[Change] = []
    if graph.opset < 13:
        return PassResult(())
    graphs = (graph, *graph.subgraphs(recursive=True))
    outputs = {id(tensor) for inner in graphs for tensor in inner.outputs}
    seen: set[int] = set()
    for inner, node in walk(graph):
        found = find(node) if node.outputs and is_op(node, "Softmax") else None
        if found is None or id(found.scores) in seen:
            continue
        seen.add(id(found.scores))
        held = {id(other) for other in inner.nodes}
        if id(found.scores) in held and id(found.weighted) in held:
            name = label(found.scores)
            words = _Rewrite(graph, inner, found, outputs).run()
            if words:
                rewritten.append(Change(name, "MatMul", "; ".join(words)))
    return PassResult(tuple(rewritten))


class _Rewrite:
    """The rewrite of one attention."""

    def __init__(
        self, root: gs.Graph, graph: gs.Graph, found: Attention, outputs: set[int]
    ) -> None:
        self.root, self.graph, self.outputs = root, graph, outputs
        self.scores, self.weighted = found.scores, found.weighted
        self.q, self.k = (operand(tensor) for tensor in self.scores.inputs)
        self.v = operand(self.weighted.inputs[1], peel=False)
        self.after = self._scales_after()
        self.dtype = self.scores.inputs[0].dtype

    def run(self) -> list[str]:
        """Rewrites if anything is gained. Returns what was done."""
        held = (self.scores, self.weighted)
        rise = plan_rise(self.graph, held, (self.q, self.k, self.v), self.outputs)
        if rise is None:
            self._plan()
        parts = {"Q": self.q, "K^T": self.k, "V": self.v}
        scale = self.q.scale * self.q.inner_scale * self.k.scale * self.k.inner_scale
        for node in self.after:
            scale *= factor_of(node) or 1.0
        if not 1 / _LARGEST <= abs(scale) <= _LARGEST:
            return []
        moves = bool(self.after) or self.k.scale * self.k.inner_scale != 1.0
        words = ["" if rise is None else f"[batch, {rise.dims[1]}, length, channels]"]
        words += [f"scale {scale:g} on Q" if moves else ""]
        words += [f"{name} in {p.plan.nodes} nodes" for name, p in parts.items() if p.plan]
        if rise is not None:
            self._write_4d(rise, scale)
        else:
            self._write_operands(scale, moves)
            words.append(self._write_result())
        return [word for word in words if word]

    def _scales_after(self) -> list[gs.Node]:
        """The nodes that scale the scores before anything else reads them."""
        found, tensor = [], self.scores.outputs[0]
        while len(tensor.outputs) == 1 and id(tensor) not in self.outputs:
            reader = tensor.outputs[0]
            if not self._holds(reader) or not reader.outputs:
                break
            if factor_of(reader) is not None and data_of(reader) is tensor:
                found.append(reader)
            elif not any(is_op(reader, op) for op in _VIEWS) or reader.inputs[0] is not tensor:
                break
            tensor = reader.outputs[0]
        return found

    def _holds(self, node: gs.Node) -> bool:
        return any(other is node for other in self.graph.nodes)

    # ------------------------------------------------------------ operands

    def _plan(self) -> None:
        """Plans operands that need fewer nodes: each alone, or all together if that saves more."""
        parts, readers = (self.q, self.k, self.v), (self.scores, self.weighted)
        found = [list(p.plans(lambda x: x.axes, scales=p is not self.v)) for p in parts]
        alone: list[tuple[Operand, Plan]] = []
        most = 0
        for part, plans in zip(parts, found, strict=True):
            gains = [saved([(part, plan)], readers, self.outputs) for plan in plans]
            if gains and max(gains) > 0:
                most += max(gains)
                last = max(n for n, gain in enumerate(gains) if gain == max(gains))
                alone.append((part, plans[last]))
        together = [(part, plans[0]) for part, plans in zip(parts, found, strict=True) if plans]
        best = together if saved(together, readers, self.outputs) > most else alone
        for part, plan in best:
            part.plan = plan if plan.start < len(part.chain) else None

    def _written(self, c: Chain, part: Operand) -> gs.Tensor:
        """The operand without its scale."""
        if part.plan is None:
            return part.source
        return write(c, part.plan.base, part.plan.steps, self.dtype)

    def _scaled(self, c: Chain, tensor: gs.Tensor, scale: float) -> gs.Tensor:
        if scale == 1.0:
            return tensor
        return c.op("Mul", tensor, np.array(scale, self.dtype), short="scale", dtype=self.dtype)

    def _write_operands(self, scale: float, moves: bool) -> None:
        old = [*self.scores.inputs, self.weighted.inputs[1]]
        c = Chain(self.graph, self.scores)
        if moves or self.q.plan is not None:
            self.scores.inputs[0] = self._scaled(c, self._written(c, self.q), scale)
        if moves or self.k.plan is not None:
            self.scores.inputs[1] = self._written(c, self.k)
        c.insert()
        for node in self.after:
            (source,), (output,) = data_of(node).inputs, node.outputs
            old += node.inputs
            node.inputs.clear()
            node.outputs.clear()
            source.outputs = [output]
            place = next(n for n, other in enumerate(self.graph.nodes) if other is node)
            del self.graph.nodes[place]
        c = Chain(self.graph, self.weighted)
        if self.v.plan is not None:
            self.weighted.inputs[1] = self._written(c, self.v)
        c.insert()
        self._drop(old)

    def _drop(self, tensors: Sequence[gs.Tensor]) -> None:
        for tensor in tensors:
            if tensor.inputs and not tensor.outputs:
                drop_unused(self.root, tensor)

    # ------------------------------------------------------------ result

    def _write_result(self) -> str:
        """Writes the views of the result in fewer nodes. Returns what was done."""
        result = self.weighted.outputs[0]
        dims = dims_of(result)
        if dims is None or len(dims) != 4:
            return ""
        v = dims_of(self.v.tensor) if self.v.plan is None else self.v.plan.layout.dims()
        layout = Layout([*dims[:-1], v[-1] if v else dims[-1]])
        layout.sizes.learn(result, layout.dims())
        nodes, steps = self._after_result(layout)
        if not steps or sum(step.nodes for step in steps) >= len(nodes):
            return ""
        last = nodes[-1]
        old = last.inputs[0]
        c = Chain(self.graph, last)
        write(c, result, steps, self.dtype)
        c.finish()
        drop_unused(self.root, old)
        return f"the result in {len(steps)} nodes"

    def _after_result(self, layout: Layout) -> tuple[list[gs.Node], list[Step]]:
        """The views of the result that can be written anew, and the nodes that replace them."""
        nodes: list[gs.Node] = []
        tensor = self.weighted.outputs[0]
        best: tuple[list[gs.Node], list[Step]] = [], []
        first: list[Step] = []  # the nodes before a product with a weight
        while len(tensor.outputs) == 1 and id(tensor) not in self.outputs:
            node = tensor.outputs[0]
            if not self._holds(node) or not can_follow(node) or data_of(node) is not tensor:
                break
            if is_weighted([node]) and not is_op(node, "Add"):
                merged = None if first else _merged(layout)
                if merged is None:
                    break
                first, layout = merged
            output = node.outputs[0]
            if len(node.outputs) > 1 or not layout.follow(node, output) or layout.scale != 1.0:
                break
            nodes.append(node)
            steps = layout.steps(layout.axes)
            if steps is not None and (not first or is_op(node, "Transpose")):
                best = list(nodes), first + steps
            tensor = output
        return best

    # ------------------------------------------------------------ 3-D

    def _risen(self, c: Chain, mask: gs.Tensor, plan: Plan | None, heads: int) -> gs.Tensor:
        """A mask with batch times heads as its first axis, in 4-D."""
        if plan is not None:
            return write(c, plan.base, plan.steps, mask.dtype)
        wide = unsqueeze(c, mask, 1)
        sizes = np.array([-1, heads, 0, 0])
        return c.op("Reshape", wide, sizes, short="mask", dtype=mask.dtype)

    def _write_4d(self, rise: Rise, scale: float) -> None:
        c, dtype = Chain(self.graph, self.weighted), self.dtype
        heads = int(rise.dims[1])
        layout = Layout(rise.dims)
        layout.axes = [layout.before[0] + layout.before[1], *layout.before[2:]]
        layout.sizes.learn(self.weighted.outputs[0], layout.dims())
        nodes, steps = self._after_result(layout)
        q = self._scaled(c, self._written(c, self.q), scale)
        scores = c.op("MatMul", q, self._written(c, self.k), dtype=dtype)
        made = {id(self.scores.outputs[0]): scores}
        for node, masks in rise.nodes:
            output = node.outputs[0]
            if id(node) in rise.views or any(node is other for other in self.after):
                made[id(output)] = made[id(data_of(node))]
                continue
            inputs = [made.get(id(tensor), tensor) for tensor in node.inputs]
            for n, tensor in enumerate(node.inputs):
                if id(tensor) in masks:
                    inputs[n] = self._risen(c, tensor, masks[id(tensor)], heads)
            attrs = {**node.attrs, **({"axis": -1} if node.op == "Softmax" else {})}
            made[id(output)] = c.op(node.op, *inputs, dtype=output.dtype, **attrs)
        weights = made[id(self.weighted.inputs[0])]
        result = c.op("MatMul", weights, self._written(c, self.v), dtype=dtype)
        joined = c.op("Reshape", result, np.array([-1, 1, 0, 0]), short="joined", dtype=dtype)
        c.op("Squeeze", joined, np.array([1]), dtype=dtype)
        old = [self.scores.outputs[0], *self.weighted.inputs]
        c.finish()
        if steps and sum(step.nodes for step in steps) < len(nodes) + 2:
            old.append(nodes[-1].inputs[0])
            last = Chain(self.graph, nodes[-1])
            write(last, result, steps, dtype)
            last.finish()
        self._drop(old)


def _merged(layout: Layout) -> tuple[list[Step], Layout] | None:
    """The nodes that make ``[batch, length, heads * channels]`` of the result, and the layout from
    there on; None if a product with a weight does not read just that, in any order of the rows."""
    batch, heads, length, channels = layout.before
    rows = [factor for axis in layout.axes[:-1] for factor in axis]
    if layout.axes[-1] != heads + channels or len(batch) > 1 or len(length) > 1:
        return None
    steps = layout.steps([batch, length, heads + channels])
    if steps is None or len(rows) != len(batch + length):
        return None
    after = Layout([product(batch), product(length), product(heads + channels)])
    new = dict(zip(batch + length, after.before[0] + after.before[1], strict=True))
    after.axes = [[new[factor] for factor in axis] for axis in layout.axes[:-1]]
    after.axes.append(list(after.before[2]))
    after.sizes = layout.sizes
    return steps, after


PASS = Pass(
    name="shape_attention",
    run=run,
    targets=(
        BELOW_10,
        Versions("tensorrt", since=(10,), basis="read"),
        Versions("tensorrt_rtx", basis="read"),
    ),
    clean_up=True,
    summary="attention -> Q * scale, one Transpose for K^T, products on [batch, heads, ...]",
    fault="attention runs as separate kernels instead of one",
    evidence=(
        'TensorRT documentation, "Fused Attention": the form that is fused',
        "TensorRT 8.6.0 on an H200, four layers of ViT-B in half precision, batch 32 and 1: 1.56 "
        "and 0.33 ms with fused kernels, 2.75 and 0.83 ms as torch.export writes it",
        "the same in tf32: 2.88 and 0.52 ms, against 3.74 and 1.33 ms",
    ),
)
