"""ONNX files of any size: checking, copying and saving with weights outside."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx

from pipeline.errors import RewriteError

# protobuf ends at 2 GiB; the rest is room for the graph itself
EXTERNAL_ABOVE = 3 << 29
_HEAVY = 1 << 16  # bytes; no smaller tensor is worth leaving out, no larger one is a shape
_OUTSIDE_FROM = 1024


def copy_model(source: Path, destination: Path, external: tuple[str, ...]) -> None:
    """Copies a model's file and its external data, byte by byte, the latter by its own name."""
    shutil.copyfile(source, destination)
    if source.parent.resolve() == destination.parent.resolve():
        return
    for name in external:
        (destination.parent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, destination.parent / name)


def save_model(model: onnx.ModelProto, path: Path, *, external: bool) -> None:
    """Writes a model, with its weights in ``<name>.data`` if `external` or if they are many.

    The weights of `model` are not in memory afterwards if they went outside.

    Raises:
        RewriteError: it is not a valid model.
    """
    try:
        check(model)
    except onnx.checker.ValidationError as error:
        raise RewriteError(f"{path}: not valid", detail=str(error)) from error
    if external or weight_bytes(model) > EXTERNAL_ABOVE:
        location = f"{path.name}.data"
        (path.parent / location).unlink(missing_ok=True)  # onnx would append to it
        onnx.save_model(
            model,
            path,
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=location,
            size_threshold=_OUTSIDE_FROM,
        )
    else:
        _write(model, path)


def _write(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model as one file, tensor by tensor.

    SerializeToString needs twice the model's size on top of the model; this needs twice the
    largest tensor's. Source: https://protobuf.dev/programming-guides/encoding
    """
    light, heavy = _split(model)
    graph = onnx.GraphProto()
    graph.CopyFrom(light.graph)
    light.ClearField("graph")
    small = graph.SerializeToString()
    fields = onnx.GraphProto.DESCRIPTOR.fields_by_name
    heads = [_head(fields["initializer"].number, tensor.ByteSize()) for tensor in heavy]
    size = len(small) + sum(len(h) + t.ByteSize() for h, t in zip(heads, heavy, strict=True))
    with path.open("wb") as file:
        file.write(light.SerializeToString())
        file.write(_head(onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number, size))
        file.write(small)
        for head, tensor in zip(heads, heavy, strict=True):
            file.write(head)
            file.write(tensor.SerializeToString())


def _head(number: int, size: int) -> bytes:
    """Tag and length of an embedded message, as varints."""
    data = bytearray()
    for value in (number << 3 | 2, size):
        rest = value
        while rest > 0x7F:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
    return bytes(data)


def weight_bytes(model: onnx.ModelProto) -> int:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def check(model: onnx.ModelProto) -> None:
    """onnx.checker on a model of any size (see `lightened`).

    Raises:
        onnx.checker.ValidationError: the model is not valid.
    """
    onnx.checker.check_model(lightened(model))


def infer_shapes(model: onnx.ModelProto) -> None:
    """Adds the dtypes and shapes that ONNX's own shape inference finds to the model's value_info.

    Values in the bodies of If, Loop and Scan too. What stands there already is kept.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(lightened(model), data_prop=True)
    except Exception:  # its own errors, and protobuf's: then nothing more is known than before
        return
    _take_values(model.graph, inferred.graph)


def _take_values(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> None:
    have = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
    constants = {tensor.name for tensor in graph.initializer}
    for value in inferred.value_info:
        known = have.get(value.name)
        if known is None and value.name not in constants:
            graph.value_info.append(value)
        elif known is not None and not known.type.tensor_type.HasField("shape"):
            known.type.CopyFrom(value.type)
    for node, other in zip(graph.node, inferred.node, strict=True):
        for attribute, another in zip(node.attribute, other.attribute, strict=True):
            if attribute.HasField("g"):
                _take_values(attribute.g, another.g)


def lightened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without large weights, which stand as graph inputs of the same type instead: for
    what has to serialise a model, which protobuf can't above 2 GiB, and which costs memory."""
    light, heavy = _split(model)
    have = {value.name for value in light.graph.input}
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in heavy
        if tensor.name not in have
    )
    return light


def _split(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """A copy of the model without its large weights, and these, which are not copied."""
    light, heavy = onnx.ModelProto(), []
    for field, value in model.ListFields():
        if field.name != "graph":
            light.MergeFrom(onnx.ModelProto(**{field.name: value}))
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            light.graph.MergeFrom(onnx.GraphProto(**{field.name: value}))
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) < _HEAVY:
            light.graph.initializer.append(tensor)
        else:
            heavy.append(tensor)
    return light, heavy


def with_weights(light: onnx.ModelProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """`light`, changed since `lightened` made it of `model`, with the large weights put back."""
    heavy = [t for t in model.graph.initializer if len(t.raw_data) >= _HEAVY]
    names = {t.name for t in heavy} - {value.name for value in model.graph.input}
    for place in reversed(range(len(light.graph.input))):
        if light.graph.input[place].name in names:
            del light.graph.input[place]
    light.graph.initializer.extend(heavy)
    return light


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the bodies of its If, Loop and Scan."""
    for node in graph.node:
        yield node
        yield from inner_nodes(node)


def inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The nodes in the subgraphs of a node."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from nodes_of(graph)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
