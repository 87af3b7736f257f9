"""Pixel shuffle and unshuffle spelled as Reshape, Transpose, Reshape become one op.

``view(n, c, r, r, h, w).permute(0, 1, 4, 2, 5, 3).view(n, c, h * r, w * r)`` and similar chains
are a DepthToSpace (CRD, or DCR if the blocks come first) or a SpaceToDepth. torch's exporters
write nn.PixelShuffle as DepthToSpace. They write nn.PixelUnshuffle, and views in the model, as
reshapes. TensorRT must then follow the dynamic sizes through Shape, Div, Mul and Concat
(pytorch/TensorRT#1568). TensorRT-RTX 1.7.1 builds all of them unchanged.

The pass follows the sizes symbolically from the input of the chain. It rewrites only if they prove
the meaning for every size. A size ``h // r`` counts as ``h / r``. Reshapes keep the number of
elements, and no factor is larger than in the full product. So each factor must be equal.
SpaceToDepth puts the blocks before the channels. A Gather over the channels, whose number must be
known, restores torch's order.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from pipeline.machine.target import Versions
from pipeline.passes.graph_ops import drop_unused, is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.sizes import ChainSizes, Dims, dims_of

_VIEWS = ("Reshape", "Unsqueeze", "Squeeze")
_SHUFFLES: dict[tuple[int, ...], str] = {(0, 1, 4, 2, 5, 3): "CRD", (0, 3, 4, 1, 5, 2): "DCR"}
_UNSHUFFLES: dict[tuple[int, ...], str] = {(0, 1, 3, 5, 2, 4): "CRD", (0, 3, 5, 1, 2, 4): "DCR"}


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every such chain on float data of rank 4 (opset 11 and later); refuses none.

    Left alone: channel shuffles, window partitions, patch embeddings, chains whose sizes are not
    proven, and chains whose sizes are all constant (``0`` and ``-1`` included).
    """
    rewritten = []
    for inner, node in walk(graph):
        if graph.opset >= 11 and is_op(node, "Transpose"):
            change = _rewrite(graph, inner, node)
            if change is not None:
                rewritten.append(change)
    return PassResult(tuple(rewritten))


def _rewrite(root: gs.Graph, graph: gs.Graph, transpose: gs.Node) -> Change | None:
    perm = tuple(int(axis) for axis in transpose.attrs.get("perm", ()))
    if perm not in _SHUFFLES and perm not in _UNSHUFFLES:
        return None
    sizes = ChainSizes()
    above = _views_above(transpose)
    start = above[0].inputs[0] if above else transpose.inputs[0]
    if start.dtype not in (np.float32, np.float16):
        return None
    dims = dims_of(start)
    images: list[tuple[gs.Tensor, Dims]] = []
    for view in above:
        if dims is not None and len(dims) == 4:
            images.append((view.inputs[0], dims))
        dims = sizes.after(view, dims)
    if not images or dims is None or len(dims) != 6:
        return None
    # the first tensor with the sizes that are split: reshapes before it change nothing
    data, split = next(image for image in images if _all_same(image[1], images[-1][1]))
    last, joined = _views_below(graph, transpose, [dims[axis] for axis in perm], sizes)
    if joined is None or not any(_computed(view) for view in (*above, last)):
        return None
    block = _block(perm, split, dims, joined)
    if block is None:
        return None
    return _replace(root, graph, last, data, perm, block, split[1])


def _replace(
    root: gs.Graph,
    graph: gs.Graph,
    last: gs.Node,
    data: gs.Tensor,
    perm: tuple[int, ...],
    block: int,
    channels: sympy.Expr,
) -> Change | None:
    name, op, dtype = label(last), last.op, last.outputs[0].dtype
    sources = list(last.inputs)
    c = Chain(graph, last)
    if perm in _SHUFFLES:
        mode = _SHUFFLES[perm]
        c.op("DepthToSpace", data, dtype=dtype, blocksize=block, mode=mode)
        detail = f"DepthToSpace {mode}, block {block}"
    else:
        made = c.op("SpaceToDepth", data, dtype=dtype, blocksize=block)
        detail = f"SpaceToDepth, block {block}"
        if _UNSHUFFLES[perm] == "CRD":
            if not channels.is_Integer:
                return None
            order = np.arange(int(channels) * block * block).reshape(block * block, -1)
            c.op("Gather", made, order.T.reshape(-1), dtype=dtype, axis=1)
            detail += ", channels reordered"
    c.finish()
    dropped = sum(drop_unused(root, source) for source in sources)
    return Change(name, op, f"{detail}; {dropped} nodes dropped")


def _views_above(transpose: gs.Node) -> list[gs.Node]:
    """The reshapes that lead to the Transpose, the first one first."""
    found: list[gs.Node] = []
    tensor = transpose.inputs[0]
    while len(tensor.inputs) == 1 and any(is_op(tensor.inputs[0], op) for op in _VIEWS):
        found.insert(0, tensor.inputs[0])
        tensor = tensor.inputs[0].inputs[0]
    return found


def _views_below(
    graph: gs.Graph, transpose: gs.Node, dims: Dims, sizes: ChainSizes
) -> tuple[gs.Node, Dims | None]:
    """The last reshape after the Transpose, and its dims if they are of rank 4.

    A further reshape that changes nothing counts too: torch's PixelUnshuffle has one.
    """
    last, found = transpose, sizes.learn(transpose.outputs[0], dims)
    while True:
        readers = [reader for reader in last.outputs[0].outputs if not is_op(reader, "Shape")]
        given_out = any(output is last.outputs[0] for output in graph.outputs)
        if len(readers) != 1 or given_out or not _view_in(graph, readers[0]):
            break
        made = sizes.after(readers[0], found)
        whole = found is not None and len(found) == 4
        if made is None or (whole and not _all_same(made, found)):
            break
        last, found = readers[0], made
    return last, found if found is not None and len(found) == 4 else None


def _computed(view: gs.Node) -> bool:
    return len(view.inputs) > 1 and values_of(view.inputs[1]) is None


def _all_same(one: Dims, other: Dims | None) -> bool:
    if other is None or len(one) != len(other):
        return False
    return all(sympy.simplify(a - b) == 0 for a, b in zip(one, other, strict=True))


def _view_in(graph: gs.Graph, node: gs.Node) -> bool:
    return any(other is node for other in graph.nodes) and any(is_op(node, op) for op in _VIEWS)


def _block(perm: tuple[int, ...], before: Dims, split: Dims, after: Dims) -> int | None:
    """The block size if the sizes prove that the chain is a shuffle or an unshuffle."""
    n, c, h, w = before
    mode = _SHUFFLES.get(perm) or _UNSHUFFLES[perm]
    place = 3 if perm in _UNSHUFFLES else 2 if mode == "CRD" else 1
    r = split[place]
    if not (r.is_Integer and r > 1):
        return None
    if perm in _UNSHUFFLES:
        expected = [n, c, h / r, r, w / r, r]
        result = [n, c * r * r, h / r, w / r]
    else:
        rest = c / r**2
        expected = [n, rest, r, r, h, w] if mode == "CRD" else [n, r, r, rest, h, w]
        result = [n, rest, h * r, w * r]
    pairs = [*zip(split, expected, strict=True), *zip(after, result, strict=True)]
    return int(r) if all(_same(found, wanted) for found, wanted in pairs) else None


def _same(found: sympy.Expr, wanted: sympy.Expr) -> bool:
    """True if equal, or rounded down from it (see the module's docstring)."""
    return bool(found == sympy.floor(wanted) or sympy.simplify(found - wanted) == 0)


PASS = Pass(
    name="fuse_pixel_shuffle",
    run=run,
    targets=(Versions("tensorrt", below=(10,), basis="read"),),
    summary="Reshape, Transpose, Reshape that shuffle pixels -> DepthToSpace, SpaceToDepth",
    fault="TensorRT may fail to follow the computed sizes of the reshapes",
    evidence=("https://github.com/pytorch/TensorRT/issues/1568",),
)
