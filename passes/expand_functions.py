"""Ops that an opset lacks, and that the ONNX standard defines as functions, become their bodies.

The ops: Attention, RMSNormalization, RotaryEmbedding, Swish (opsets 23 and 24), Gelu (20), Mish,
CenterCropPad (18). onnx.inliner takes the bodies from onnx's schemas. Each node is expanded in a
model that holds only this node, so that weights are never copied. There, whatever follows from
static sizes is folded: TensorRT needs constant axes and head sizes, which the bodies compute. The
nodes of a body have the graph's opset; `lower_opset` lowers them afterwards.

Attention is a context-dependent function: its body depends on types and on which inputs exist. It
needs its inputs' types, which the rewrite stage infers.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from onnx.defs import OpSchema
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from pipeline.errors import first_line
from pipeline.machine.target import BELOW_10, FROM_10, RTX, Versions
from pipeline.passes.graph_ops import is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult, Refused
from pipeline.passes.lower_opset import schema
from pipeline.passes.lowering import CONVERTERS, SAME
from pipeline.passes.lowering._fold import fold, type_number

# integer inputs with at most this many values become constants in the body
_SMALL = 64
# ops with wrong bodies, which have their own passes: AffineGrid's body squeezes a batch axis of
# size 1 away, and one form of it has an If that depends on sizes
_UNSOUND = frozenset({"AffineGrid"})
# ops that later opsets extended, without a change for nodes written before
_GROWN = frozenset({"Cast", "CastLike", "Pad", "ReduceMax", "ReduceMin"})


def expand(graph: gs.Graph, level: int, lacking: frozenset[str]) -> PassResult:
    """Expands functions that are newer than `level`, and those in `lacking` at every opset."""
    rewritten, refused = [], []
    for inner, node in walk(graph):
        new = schema(node.op, graph.opset) if is_op(node, node.op) else None
        if new is None or node.op in CONVERTERS or node.op in _UNSOUND:
            continue
        later = graph.opset > level and schema(node.op, level) is None
        if not (later or node.op in lacking) or not (
            new.has_function or new.has_context_dependent_function  # type: ignore[attr-defined]
        ):
            continue
        name, op = label(node), node.op
        try:
            count = _expand(inner, node, new, graph.opset)
        except Refused as reason:
            refused.append(Change(name, op, str(reason)))
        else:
            detail = f"the {count} nodes of its function body in opset {new.since_version}"
            rewritten.append(Change(name, op, detail))
    return PassResult(tuple(rewritten), tuple(refused))


def _expand(graph: gs.Graph, node: gs.Node, new: OpSchema, opset: int) -> int:
    model = _alone(node, new)
    try:
        inferred = _inferred(model)
        if any(not name for name in model.graph.node[0].input):
            body = _inline_with_gaps(inferred, new)
        else:
            body = onnx.inliner.inline_selected_functions(inferred, [("", node.op)], False, True)
        if any(other.op_type == node.op for other in body.graph.node):
            raise Refused(
                "the ONNX standard has no function body for these inputs and attributes: "
                "write the op out in the model"
            )
        for _ in range(2):  # the second folding uses sizes that the first one found
            inner = gs.import_onnx(_inferred(body))
            fold(inner)
            body = gs.export_onnx(inner, do_type_check=False)
    except Refused:
        raise
    except Exception as error:  # onnx raises C++ exceptions that pybind converted
        first = first_line(error)
        raise Refused(f"onnx cannot expand the op: {first}") from error
    for other in inner.nodes:
        made, there = schema(other.op, new.since_version), schema(other.op, opset)
        if made is None or there is None or not _as_before(other.op, made, there):
            raise Refused(
                f"its function body has {other.op} in a form older than opset {opset}: export "
                f"with opset {new.since_version}"
            )
    _splice(graph, node, inner)
    return len(inner.nodes)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def _as_before(op: str, made: OpSchema, there: OpSchema) -> bool:
    """Whether a node written for one opset means the same at a later one."""
    return made.since_version == there.since_version or op in SAME or op in _GROWN


def _inline_with_gaps(model: onnx.ModelProto, new: OpSchema) -> onnx.ModelProto:
    """Inlines the model's only node if an omitted input precedes another one.

    onnx.inliner fails with an assertion, since it needs a type for omitted inputs too. The schema
    does not."""
    (node,) = model.graph.node
    types = {value.name: value.type for value in model.graph.input}
    given = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
    body = onnx.FunctionProto()
    body.ParseFromString(
        new.get_context_dependent_function_with_opset_version(  # type: ignore[attr-defined]
            new.since_version, node.SerializeToString(), given
        )
    )
    model.functions.append(body)
    return onnx.inliner.inline_local_functions(model)


def _alone(node: gs.Node, new: OpSchema) -> onnx.ModelProto:
    """A model of this one node. Its default attributes are written out, since a body may refer to
    them."""
    proto = OnnxExporter.export_node(node)
    given = {attribute.name for attribute in proto.attribute}
    proto.attribute.extend(
        attribute.default_value
        for key, attribute in new.attributes.items()
        if key not in given and attribute.default_value.name
    )
    given_names, made_names = _names(node)
    for names, field, tensors in (
        (given_names, proto.input, node.inputs),
        (made_names, proto.output, node.outputs),
    ):
        del field[:]
        field.extend(names.get(id(tensor), "") for tensor in tensors)
    inputs, constants = {}, []
    for tensor in node.inputs:
        name = given_names.get(id(tensor))
        if name is None or name in inputs:
            continue
        number, values = type_number(tensor), values_of(tensor)
        if number is None:
            raise Refused(f"the type of {tensor.name} is not known: declare it in value_info")
        inputs[name] = onnx.helper.make_tensor_value_info(name, number, tensor.shape)
        if values is not None and values.size <= _SMALL and values.dtype.kind in "iu":
            constants.append(onnx.numpy_helper.from_array(values, name))
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in made_names.values()]
    made = onnx.helper.make_graph([proto], "one", [*inputs.values()], outputs, constants)
    return onnx.helper.make_model(
        made, opset_imports=[onnx.helper.make_opsetid("", new.since_version)], ir_version=10
    )


def _names(node: gs.Node) -> tuple[dict[int, str], dict[int, str]]:
    """Names for the node's inputs and outputs, by id, that occur in no body."""
    given, made = (
        {
            id(tensor): f"{word}_{place}"
            for place, tensor in enumerate(tensors)
            if isinstance(tensor, gs.Constant) or not tensor.is_empty()
        }
        for word, tensors in (("given", node.inputs), ("made", node.outputs))
    )
    return given, made


def _splice(graph: gs.Graph, node: gs.Node, inner: gs.Graph) -> None:
    """Replaces the node by the nodes of `inner`, under new names."""
    name = label(node)
    given_names, made_names = _names(node)
    outer = {given_names[id(t)]: t for t in node.inputs if id(t) in given_names}
    results = {made_names[id(t)]: t for t in node.outputs if id(t) in made_names}
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    node.outputs.clear()
    node.inputs.clear()
    for tensor in inner.outputs:
        _exchange(tensor, results[tensor.name])
    read = {id(tensor): tensor for new in inner.nodes for tensor in new.inputs}
    for tensor in read.values():
        if tensor.name in outer and not tensor.inputs:
            _exchange(tensor, outer[tensor.name])
    own = {id(tensor): tensor for new in inner.nodes for tensor in (*new.inputs, *new.outputs)}
    for known in (*outer.values(), *results.values()):
        own.pop(id(known), None)
    ends = {id(tensor) for tensor in results.values()}
    for tensor in own.values():
        if isinstance(tensor, gs.Constant):  # a new one, since imported values are read lazily
            values = values_of(tensor)
            assert values is not None
            _exchange(tensor, gs.Constant(f"{name}/{tensor.name}", np.array(values)))
        elif tensor.name:
            tensor.name = f"{name}/{tensor.name}"
    taken_names: set[str] = set()
    for new in inner.nodes:
        first = new.outputs[0]
        short = first.name.removeprefix(f"{name}/").partition("__")[0]
        short = new.op.lower() if id(first) in ends else short.replace("/", "_")
        new.name = _unique(f"{name}/{short}", taken_names)
    graph.nodes[place : place + 1] = inner.nodes


def _exchange(old: gs.Tensor, new: gs.Tensor) -> None:
    """Replaces `old` by `new` wherever a node reads or makes it."""
    for reader in list(old.outputs):
        for n, given in enumerate(reader.inputs):
            if given is old:
                reader.inputs[n] = new
    for maker in list(old.inputs):
        for n, made in enumerate(maker.outputs):
            if made is old:
                maker.outputs[n] = new


def _unique(name: str, taken: set[str]) -> str:
    number, found = 0, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found


def _pass(
    level: int, lacking: frozenset[str], targets: tuple[Versions, ...], fault: str, *evidence: str
) -> Pass:
    def run(graph: gs.Graph) -> PassResult:
        """Expands each node; refuses a node whose types are not known."""
        return expand(graph, level, lacking)

    return Pass(
        name=f"expand_functions_{level}",
        run=run,
        targets=targets,
        summary=f"standard functions newer than opset {level} -> the nodes of their bodies",
        fault=fault,
        evidence=evidence,
    )


TO_17 = _pass(
    17,
    frozenset(),
    (BELOW_10,),
    "TensorRT 8.6 does not know ops of opset 18 and later",
    "onnx-tensorrt 8.6 documents opset 17: Gelu-20 and Mish-18 fail in its parser (source)",
)
TO_19 = _pass(
    19,
    frozenset({"CenterCropPad"}),
    (RTX, FROM_10),
    "Attention does not build; CenterCropPad, and Attention with several outputs, do not parse",
    "tensorrt-rtx 1.7.1: Attention-23 and -24 stop the builder ('composite_op->is_decomposable()'),"
    " or the parser with a softcap or several outputs; CenterCropPad-18 is not parsed (cases)",
)
