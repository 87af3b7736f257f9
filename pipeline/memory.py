"""How much memory a run of an ONNX model takes at given input shapes, without running it.

The shapes of all tensors come from ONNX Runtime's symbolic shape inference with the inputs'
sizes put in; the estimate is the largest sum of tensors that are alive at once in graph order,
plus the weights. Kernels' own workspaces (im2col of a convolution) are not in it: `SLACK` is
what the measured peaks needed on top.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx import helper

from pipeline._onnx_file import nodes_of
from pipeline.dims import evaluate
from pipeline.errors import InputError, PipelineError
from pipeline.pools import with_true_pools

SLACK = 1.25
_SMALL = 1024  # elements; larger initializers can't be a shape and are not carried along


@dataclass(frozen=True)
class Estimate:
    """Peak memory in bytes, output shapes where known, how many tensors' sizes stayed unknown.

    `failure` says in words why shape inference gave up, if it did.
    """

    peak_bytes: int
    output_shapes: Mapping[str, tuple[int | str, ...]]
    unknown: int
    failure: str = ""


def default_limit() -> int:
    """Half of the memory that is free here, at most 6 GiB: a comparison must not choke a laptop."""
    return min(available_memory() // 2, 6 * 2**30)


def available_memory() -> int:
    """Bytes that can be allocated here without swapping, as far as the system says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 * 2**30


class Estimator:
    """Estimates one ONNX model at many shapes; the file is read once, its weights left outside.

    Args:
        path: the ONNX file.
    """

    def __init__(self, path: Path) -> None:
        self._model = _without_functions(onnx.load(path, load_external_data=False))
        self._inputs = {value.name for value in self._model.graph.input}
        self._weights = _shed_weights(self._model)
        self._model = with_true_pools(self._model)

    def at(
        self, shapes: Mapping[str, Sequence[int]], symbols: Mapping[str, int] | None = None
    ) -> Estimate:
        """The estimate at these input shapes.

        Args:
            shapes: by input name.
            symbols: sizes of the names in the file's own ``dim_param``s; what those say is
                taken where shape inference gives up (older ONNX Runtimes do on opset 18), and
                no output shapes are known then.

        Raises:
            PipelineError: shape inference gives up, and there are no `symbols`.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        del model.graph.value_info[:]
        for value in model.graph.input:
            if value.name in shapes:
                dims = value.type.tensor_type.shape.dim
                if len(dims) != len(shapes[value.name]):
                    raise PipelineError(
                        f"{value.name}: rank {len(shapes[value.name])}, expected {len(dims)}"
                    )
                for dim, size in zip(dims, shapes[value.name], strict=True):
                    dim.Clear()
                    dim.dim_value = size
        for value in model.graph.output:
            value.type.tensor_type.shape.Clear()
            value.type.tensor_type.ClearField("shape")
        try:
            inferred = _infer(model, shapes)
        except PipelineError as error:
            if symbols is None:
                raise
            table = _table(self._model.graph, symbols)
            peak, unknown = _peak(self._model.graph, table, self._inputs)
            return Estimate(self._weights + int(peak * SLACK), {}, unknown, str(error))
        # of an op that it does not know, inference says that the result is a scalar
        known = {"", "ai.onnx", "com.microsoft"}
        lost = {name for n in inferred.graph.node if n.domain not in known for name in n.output}
        table = _table(inferred.graph)
        peak, unknown = _peak(inferred.graph, table, self._inputs)
        outputs = {
            v.name: tuple(_dims(v))
            for v in inferred.graph.output
            if v.type.tensor_type.HasField("shape") and v.name not in lost
        }
        return Estimate(self._weights + int(peak * SLACK), outputs, unknown)


def _without_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its functions inlined; ONNX Runtime's inference knows none, nor Constants
    with ``value_int`` and the like, which are given as tensors."""
    if not model.functions:
        return model
    inlined = onnx.inliner.inline_local_functions(model)
    for node in nodes_of(inlined.graph):
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                value = helper.get_attribute_value(attribute)
                dtype = np.int64 if "int" in attribute.name else np.float32
                tensor = onnx.numpy_helper.from_array(np.array(value, dtype))
                attribute.CopyFrom(helper.make_attribute("value", tensor))
    return inlined


def _infer(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # what SymbolicShapeInference.infer_shapes does, but that leaves a file in the
            # current folder where a shape stays unknown
            inference = SymbolicShapeInference(2**31 - 1, False, False, 0)
            for op in ("Max", "Min", "L1", "L2", "SumSquare"):  # of opset 18: axes as an input
                inference.dispatcher_[f"Reduce{op}"] = inference._infer_ReduceMean
            inference._preprocess(model)
            while inference.run_:
                inference._infer_impl()
            inference._update_output_from_vi()
            inferred = inference.out_mp_
    except Exception as error:  # it raises bare Exception
        first = (str(error).strip() or "the sizes do not fit each other").splitlines()[0]
        raise PipelineError(f"shape inference fails at {dict(shapes)}: {first}") from error
    assert isinstance(inferred, onnx.ModelProto)
    return inferred


def _shed_weights(model: onnx.ModelProto) -> int:
    """Turns large initializers into inputs, in place; returns the bytes of all initializers."""
    total = 0
    kept = []
    for tensor in model.graph.initializer:
        count = int(np.prod(tensor.dims, dtype=np.int64))
        total += _bytes(tensor.data_type, count)
        if count <= _SMALL:
            kept.append(tensor)
        else:
            model.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    names = {t.name for t in kept}
    small = [t for t in model.graph.initializer if t.name in names]
    copies = [onnx.TensorProto() for _ in small]
    for copy, tensor in zip(copies, small, strict=True):
        copy.CopyFrom(tensor)
    del model.graph.initializer[:]
    model.graph.initializer.extend(copies)
    for node in model.graph.node:
        del node.metadata_props[:]
    return total


def _bytes(elem_type: int, count: int) -> int:
    return count * int(helper.tensor_dtype_to_np_dtype(elem_type).itemsize) if elem_type else 0


def _dims(value: onnx.ValueInfoProto) -> Iterator[int | str]:
    for dim in value.type.tensor_type.shape.dim:
        yield dim.dim_value if dim.HasField("dim_value") else dim.dim_param


def _table(
    graph: onnx.GraphProto, symbols: Mapping[str, int] | None = None
) -> dict[str, int | None]:
    """Bytes by tensor name; None where a size is unknown.

    Args:
        graph: the graph.
        symbols: what names in sizes stand for; without them a name is an unknown size.
    """
    table: dict[str, int | None] = {}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        sizes = [_known(size, symbols or {}) for size in _dims(value)]
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or any(not isinstance(s, int) for s in sizes):
            table[value.name] = None
        else:
            count = int(np.prod(np.array(sizes, dtype=np.float64)))
            table[value.name] = _bytes(tensor.elem_type, count)
    return table


def _known(size: int | str, symbols: Mapping[str, int]) -> int | str:
    if isinstance(size, str) and symbols:
        with contextlib.suppress(InputError):
            return evaluate(size, symbols)
    return size


def _peak(
    graph: onnx.GraphProto, table: Mapping[str, int | None], inputs: Collection[str]
) -> tuple[int, int]:
    """(largest sum of live tensors in bytes, number of tensors of unknown size)."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in _reads(node):
            last[name] = index
    for value in graph.output:
        last[value.name] = len(graph.node)
    alive = {name: table.get(name) or 0 for name in inputs if name in last}
    total = sum(alive.values())
    peak, unknown = total, 0
    for index, node in enumerate(graph.node):
        inner = 0
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs]:
                if body.node:
                    body_inputs = [v.name for v in body.input]
                    body_peak, body_unknown = _peak(body, _table(body), body_inputs)
                    inner, unknown = max(inner, body_peak), unknown + body_unknown
        for name in node.output:
            size = table.get(name)
            unknown += size is None and bool(name)
            alive[name] = size or 0
            total += alive[name]
        peak = max(peak, total + inner)
        for name in {*_reads(node), *node.output}:
            if name in alive and last.get(name, -1) <= index:
                total -= alive.pop(name)
    return peak, unknown


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for body in [attribute.g, *attribute.graphs]:
            for inner in body.node:
                yield from _reads(inner)
