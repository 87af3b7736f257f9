"""ONNX files of any size: checking, copying, and saving with external data."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.errors import InputError, RewriteError

# protobuf's limit is 2 GiB; this leaves room for the graph
EXTERNAL_ABOVE = 3 << 29
_HEAVY = 1 << 16  # bytes; smaller tensors cost little, and larger ones are never shapes
_OUTSIDE_FROM = 1024


def copy_model(source: Path, destination: Path, external: tuple[str, ...]) -> None:
    """Copies a model's file, and the files of its external data under the same names."""
    shutil.copyfile(source, destination)
    if source.parent.resolve() == destination.parent.resolve():
        return
    for name in external:
        (destination.parent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, destination.parent / name)


def save_model(model: onnx.ModelProto, path: Path, *, external: bool) -> None:
    """Writes a model.

    If `external` is true, or the weights are above `EXTERNAL_ABOVE`, they are written to
    ``<name>.data``. The weights of `model` are then no longer in memory.

    Raises:
        RewriteError: The model is not valid.
    """
    try:
        check(model)
    except onnx.checker.ValidationError as error:
        raise RewriteError(f"{path}: onnx.checker refuses the model", detail=str(error)) from error
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
        write_model(model, path)


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model as one file, tensor by tensor.

    SerializeToString needs twice the size of the model in memory. This function needs twice the
    size of the largest tensor. Source: https://protobuf.dev/programming-guides/encoding
    """
    light, heavy = _split(model, is_heavy)
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
    """The tag and the length of an embedded message, as varints."""
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
    """Runs onnx.checker on a model of any size (see `lightened`).

    Raises:
        onnx.checker.ValidationError: The model is not valid.
    """
    onnx.checker.check_model(lightened(model))


def infer_shapes(model: onnx.ModelProto) -> None:
    """Adds dtypes and shapes from ONNX's shape inference to the model's value_info.

    The bodies of If, Loop and Scan get them too. Existing entries are kept.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(lightened(model), data_prop=True)
    except Exception:  # errors of onnx or protobuf; the model stays the same
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


def is_heavy(tensor: onnx.TensorProto) -> bool:
    """True for weights of 64 KiB or more in the model's file."""
    return len(tensor.raw_data) >= _HEAVY


def is_outside(tensor: onnx.TensorProto) -> bool:
    """True for weights that are in an external data file."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def lightened(
    model: onnx.ModelProto, heavy: Callable[[onnx.TensorProto], bool] = is_heavy
) -> onnx.ModelProto:
    """A copy in which graph inputs of the same type replace the heavy weights.

    Use the copy where a model is serialised: protobuf can't do this above 2 GiB, and it costs
    memory. Shape inference also works with the copy, because it needs only small weights.

    Args:
        model: The model. Its heavy weights are not copied.
        heavy: True for each weight to leave out.
    """
    light, left_out = _split(model, heavy)
    have = {value.name for value in light.graph.input}
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in left_out
        if tensor.name not in have
    )
    return light


def _split(
    model: onnx.ModelProto, heavy: Callable[[onnx.TensorProto], bool]
) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """A copy of the model without its heavy weights, and the original heavy weights."""
    light, left_out = onnx.ModelProto(), []
    for field, value in model.ListFields():
        if field.name != "graph":
            light.MergeFrom(onnx.ModelProto(**{field.name: value}))
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            light.graph.MergeFrom(onnx.GraphProto(**{field.name: value}))
    for tensor in model.graph.initializer:
        if heavy(tensor):
            left_out.append(tensor)
        else:
            light.graph.initializer.append(tensor)
    return light, left_out


def with_weights(light: onnx.ModelProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """Puts the heavy weights of `model` back into `light`, which `lightened` made from it."""
    heavy = [t for t in model.graph.initializer if is_heavy(t)]
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


def inner_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and the bodies of its If, Loop and Scan."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from inner_graphs(inner)


def inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The nodes in the subgraphs of a node."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from nodes_of(graph)


def tensors_in(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from tensors_in(inner)


def bad_weight(path: Path) -> str:
    """The name of a weight of an ONNX file that has a NaN; empty if none has.

    Infinity is not searched: a mask may have it.
    """
    model = onnx.load(path)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    for tensor in tensors_in(model.graph):
        if tensor.data_type in floats and np.isnan(numpy_helper.to_array(tensor)).any():
            return tensor.name
    return ""


OLDEST_OPSET = 11  # older opsets write many ops in another way; no pass was tested on them


def check_source(model: onnx.ModelProto, source: Path) -> int:
    """The model's opset.

    Raises:
        InputError: The checker refuses the model (the message names the node), or the opset is
            not supported.
    """
    opset, newest = opset_of(model), onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        what = f"Export with an opset from {OLDEST_OPSET} to {newest} (18 is best)"
        if 0 < opset < OLDEST_OPSET:
            what += ", or use onnx.version_converter.convert_version(model, 17)"
        elif opset > newest:
            what += f", or install a newer onnx than {onnx.__version__}"
        raise InputError(f"{source}: opset {opset} is not supported. {what}")
    if model.graph.sparse_initializer:
        name = model.graph.sparse_initializer[0].values.name
        raise InputError(f"{source}: {name} is a sparse initializer. Make it dense")
    try:
        check(model)
    except onnx.checker.ValidationError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        node = next((line for line in lines if "Bad node spec" in line), "")
        where = f" ({node.removeprefix('==> Context: ')})" if node else ""
        raise InputError(
            f"{source}: onnx.checker refuses it: {lines[0]}{where}", detail=str(error)
        ) from error
    return opset


def opset_of(model: onnx.ModelProto) -> int:
    """The opset version of the standard ONNX domain; 0 if the model does not state one."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def check_model(path: Path) -> None:
    """Runs onnx's checker on a file.

    Raises:
        InputError: The file is not valid. The message names the node if the checker names one.
    """
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:  # an error of the checker or of protobuf
        text = str(error)
        node = re.search(r"[Nn]ame: (?P<name>.*?) ?OpType: (?P<op>\w+)", text)
        who = f"{node['op']} node {node['name'] or 'without a name'}: " if node else ""
        words = " ".join(text.partition("==> Context")[0].split())
        raise InputError(
            f"{path.name}: not a valid ONNX model: {who}{words}", detail=text
        ) from None
