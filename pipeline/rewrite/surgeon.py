"""Opens a model in graph-surgeon, runs passes on it, and writes the graph back.

Graph-surgeon keeps the graph, but loses metadata of nodes, values and the model, and attribute
types that it does not know. So its nodes are written back into the source's model. A node that no
pass changed stays identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.importers.onnx_importer import (
    get_onnx_tensor_dtype,
    get_onnx_tensor_shape,
)
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from pipeline.errors import RewriteError, first_line
from pipeline.graph.files import check, infer_shapes, inner_nodes, lightened, nodes_of
from pipeline.passes import Change, Pass, PassResult
from pipeline.rewrite.new_names import KnownNames

# attribute types that graph-surgeon drops with a warning
_LOST = ("TENSORS", "GRAPHS", "SPARSE_TENSOR", "SPARSE_TENSORS", "TYPE_PROTO", "TYPE_PROTOS")


class Surgeon:
    """A model open in graph-surgeon, with the data that writing it back needs.

    Shape inference runs when the model is opened, and after every pass that changed something. So
    passes see the dtypes and shapes that ONNX can infer. Graph-surgeon's output on stdout is
    suppressed.

    Args:
        model: changed in place, or replaced by the result of a pass of level ``model``.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        with G_LOGGER.suppress():
            self._open()

    def _open(self) -> None:
        infer_shapes(self.model)
        try:
            self.graph = gs.import_onnx(self.model)
        except MemoryError:
            raise
        except Exception as error:
            raise RewriteError(f"onnx-graphsurgeon cannot read the model: {error}") from error
        self.interface = _interface(self.graph)
        # the source's nodes by name (for metadata), and the graph's nodes that did not change
        self.sources = {node.name: _copy_of(node) for node in nodes_of(self.model.graph)}
        self.untouched = {
            id(node): (node, _state(node), self.sources[node.name]) for node in self.graph.nodes
        }
        self.state = _fingerprint(self.graph)
        self.known = KnownNames(self.graph)

    def run(self, p: Pass, done: Sequence[str]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Runs one pass and checks the graph. Returns the changes and the refusals.

        Raises:
            RewriteError: the pass failed, or broke the graph or its contract (docs/design/laws.md).
        """

        def fail(what: str, cause: Exception | None = None) -> RewriteError:
            error = RewriteError(
                f"pass {p.name}: {what} (run before it: {', '.join(done) or 'none'})",
                detail=str(cause or ""),
            )
            error.__cause__ = cause
            return error

        with G_LOGGER.suppress():
            return self._run(p, fail)

    def _run(
        self, p: Pass, fail: Callable[..., RewriteError]
    ) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        dynamic = _dynamic_axes(self.model) if p.own else {}
        result = self._apply(p, fail)
        if result.modified and p.own:
            for tensor, axis, size in _lost(dynamic, self.model):
                raise fail(
                    f"law 3: axis {axis} of {tensor} was dynamic and is now {size}"
                    f"{_maker_of(tensor, self.model)}"
                )
            again = self._apply(p, fail)
            if again.modified:
                first = again.rewritten[0]
                raise fail(
                    "law 3: the pass is not idempotent. A second run changed the graph again: "
                    f"{first.op} {first.node!r}: {first.detail}"
                )
        return result.rewritten, result.refused

    def _apply(self, p: Pass, fail: Callable[..., RewriteError]) -> PassResult:
        on_model = p.level == "model"
        before = _nodes_hash(self.model) if on_model else self.state
        try:
            result = p.run(self.model if on_model else self.graph)
        except MemoryError:  # is no fault of the pass
            raise
        except Exception as error:
            raise fail(f"failed with {type(error).__name__}: {error}", error) from error
        if not isinstance(result, PassResult):
            raise fail(f"returned {type(result).__name__}, not a PassResult")
        after = _nodes_hash(self.model) if on_model else _fingerprint(self.graph)
        if result.modified != (before != after):
            which = "" if on_model or result.modified else _first_changed(before, after)
            did = "did not change" if result.modified else "changed"
            raise fail(f"reports modified={result.modified}, but the graph {did}{which}")
        if not result.modified:
            return result
        interface = self.interface
        if not on_model:
            _hold(interface, _interface(self.graph), fail)
            self.known.rename_new(self.graph, (t.name for t in self.model.graph.initializer))
            self.known = KnownNames(self.graph)
        try:
            if on_model:
                check(self.model)
                self._open()
            else:
                self.write_back()
                check(self.model)
                self._learn()
                self.state = _fingerprint(self.graph)
        except RewriteError as error:
            raise fail(str(error)) from error
        except MemoryError:
            raise
        except Exception as error:
            first = first_line(error)
            raise fail(f"made an invalid graph: {first}", error) from error
        _hold(interface, self.interface, fail)
        return result

    def _learn(self) -> None:
        """Sets dtypes and shapes that tensors lack and ONNX can infer."""
        infer_shapes(self.model)
        known = {value.name: value for value in self.model.graph.value_info}
        for name, tensor in self.graph.tensors().items():
            if name in known and isinstance(tensor, gs.Variable):
                if tensor.dtype is None:
                    tensor.dtype = get_onnx_tensor_dtype(known[name])
                if tensor.shape is None:
                    tensor.shape = get_onnx_tensor_shape(known[name])

    def write_back(self) -> None:
        """Writes nodes, new constants, new values and the opset into the model."""
        graph = self.model.graph
        for opset in self.model.opset_import:
            if opset.domain in ("", "ai.onnx"):
                opset.version = self.graph.opset
        nodes = [self._export(node) for node in self.graph.nodes]
        tensors = self.graph.tensors()
        outer = set(tensors) | {t.name for t in graph.initializer}
        for node in nodes:
            _drop_outer(node, outer)
        del graph.node[:]
        graph.node.extend(nodes)
        old = {t.name: t for t in graph.initializer}
        for tensor in tensors.values():
            if not isinstance(tensor, gs.Constant):
                continue
            if tensor.name not in old:
                graph.initializer.append(OnnxExporter.export_tensor_proto(tensor))
            elif not isinstance(tensor._values, LazyValues) and not _same(tensor, old[tensor.name]):
                raise RewriteError(f"changed {tensor.name} in place. Give new constants new names")
        used = {name for node in nodes_of(graph) for name in node.input}
        used |= {value.name for value in (*graph.input, *graph.output)}
        for place in reversed(range(len(graph.initializer))):
            if graph.initializer[place].name not in used:
                del graph.initializer[place]
        self._write_values(tensors)

    def _write_values(self, tensors: dict[str, gs.Tensor]) -> None:
        """Removes the types of removed values, and adds those of new values."""
        graph = self.model.graph
        known = {value.name for value in (*graph.value_info, *graph.input, *graph.output)}
        for place in reversed(range(len(graph.value_info))):
            if graph.value_info[place].name not in tensors:
                del graph.value_info[place]
        for name, tensor in tensors.items():
            if isinstance(tensor, gs.Variable) and tensor.dtype is not None and name not in known:
                graph.value_info.append(OnnxExporter.export_value_info_proto(tensor, False))

    def _export(self, node: gs.Node) -> onnx.NodeProto:
        _, state, proto = self.untouched.get(id(node), (None, None, None))
        if proto is not None and state == _state(node):
            return proto
        new: onnx.NodeProto = OnnxExporter.export_node(node)
        for inner in (new, *inner_nodes(new)):
            self._inherit(inner)
        return new

    def _inherit(self, node: onnx.NodeProto) -> None:
        name, source = node.name, self.sources.get(node.name)
        while source is None and "/" in name:
            name = name.rpartition("/")[0]
            source = self.sources.get(name)
        if source is None:
            return
        node.metadata_props.extend(source.metadata_props)
        node.doc_string = node.doc_string or source.doc_string
        if source.name == node.name and source.op_type == node.op_type:
            node.overload = source.overload
            kept = {attribute.name for attribute in node.attribute}
            kinds = [onnx.AttributeProto.AttributeType.Value(kind) for kind in _LOST]
            node.attribute.extend(
                a for a in source.attribute if a.type in kinds and a.name not in kept
            )


def _state(node: gs.Node) -> tuple[Any, ...]:
    """Everything that graph-surgeon knows about a node, to compare. Never equal if a subgraph of
    the node changed."""

    def attribute(value: Any) -> Any:
        if isinstance(value, gs.Graph):
            return tuple(_state(inner) for inner in value.nodes)
        if isinstance(value, (int, float, str, bytes)):
            return value
        return tuple(value) if isinstance(value, list) else id(value)

    return (
        node.op,
        node.domain,
        node.name,
        # a body reads outer tensors, and must be written again when one becomes a constant
        tuple((tensor.name, isinstance(tensor, gs.Constant)) for tensor in node.inputs),
        tuple(tensor.name for tensor in node.outputs),
        tuple(sorted((key, attribute(value)) for key, value in node.attrs.items())),
    )


def _fingerprint(graph: gs.Graph) -> tuple[Any, ...]:
    return (graph.opset, *(_state(node) for node in graph.nodes))


def _first_changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """Names the first node that only one of the two fingerprints has."""
    for mine, other in ((after, before), (before, after)):
        for state in mine[1:]:
            if state not in other[1:]:
                return f": {state[0]} {state[2]!r}"
    return ""


def _nodes_hash(model: onnx.ModelProto) -> tuple[Any, ...]:
    opsets = tuple((opset.domain, opset.version) for opset in model.opset_import)
    nodes = [node.SerializeToString(deterministic=True) for node in model.graph.node]
    functions = [f.SerializeToString(deterministic=True) for f in model.functions]
    return (opsets, tuple(nodes), tuple(functions))


def _dynamic_axes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """Sizes of every tensor by name, as ONNX infers them from the inputs alone. None is dynamic."""
    bare = lightened(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    return {
        value.name: [d.dim_value if d.HasField("dim_value") else None for d in dims]
        for value in (*inferred.value_info, *inferred.output)
        if (dims := value.type.tensor_type.shape.dim)
    }


def _lost(
    before: dict[str, list[int | None]], model: onnx.ModelProto
) -> Iterator[tuple[str, int, int]]:
    """Tensors with an axis that was dynamic and is now static: name, axis, size."""
    for name, sizes in _dynamic_axes(model).items():
        for axis, (old, new) in enumerate(zip(before.get(name, ()), sizes, strict=False)):
            if old is None and new is not None:
                yield name, axis, new


def _maker_of(tensor: str, model: onnx.ModelProto) -> str:
    for node in nodes_of(model.graph):
        if tensor in node.output:
            return f", made by {node.op_type} {node.name!r}"
    return ""


def _interface(graph: gs.Graph) -> tuple[list[str], list[str]]:
    inputs, outputs = (
        [f"{t.name}: {t.dtype} {None if t.shape is None else list(t.shape)}" for t in tensors]
        for tensors in (graph.inputs, graph.outputs)
    )
    return inputs, outputs


def _hold(
    before: tuple[list[str], list[str]],
    after: tuple[list[str], list[str]],
    fail: Callable[..., RewriteError],
) -> None:
    """Raises the error of `fail` if inputs or outputs changed."""
    for kind, old, new in zip(("inputs", "outputs"), before, after, strict=True):
        if old != new:
            raise fail(f"law 3: changed the graph's {kind} from {old} to {new}")


def _same(tensor: gs.Constant, proto: onnx.TensorProto) -> bool:
    """Whether a constant still has the values, dtype and shape of the file."""
    now = onnx.numpy_helper.to_array(OnnxExporter.export_tensor_proto(tensor))
    was = onnx.numpy_helper.to_array(proto)
    same = now.dtype == was.dtype and now.shape == was.shape
    return same and now.tobytes() == was.tobytes()


def _copy_of(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _drop_outer(node: onnx.NodeProto, outer: set[str]) -> None:
    """Removes copies of outer tensors: graph-surgeon adds them to subgraphs that read them."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for values in (graph.initializer, graph.value_info):
                for place in reversed(range(len(values))):
                    if values[place].name in outer:
                        del values[place]
            own = {value.name for value in (*graph.initializer, *graph.input)}
            own |= {name for inner in graph.node for name in inner.output}
            for inner in graph.node:
                _drop_outer(inner, outer | own)
