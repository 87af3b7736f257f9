"""Fingerprints of all values of a run: shape, least and largest number, norm and a sample.

All inner values of a model together are much larger than memory. A `Print` of a value has 16 KiB,
whatever the value's size. The graph itself computes the ONNX prints. So one run gives all prints,
and keeps no value longer than the model needs it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.compare.divergence.flow import reads
from pipeline.graph.files import infer_shapes
from pipeline.graph.session import open_session
from pipeline.spec.closeness import Difference

_HALF = 2048
_PREFIX = "pipeline/probe/"
# half of the sample is the beginning of the value, which is all of a small one; the rest is random
PLACES = np.concatenate(
    [np.arange(_HALF), np.random.default_rng(0).integers(0, 1 << 40, _HALF)]
).astype(np.int64)
_NORM_NOISE = 1e-3  # the error of a sum of squares over millions of float32
_REAL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE,
)  # fmt: skip
_NO_NUMBERS = (
    TensorProto.UNDEFINED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128,
)  # fmt: skip
# ONNX Runtime names the failed node only in its messages
_STOPPED = "terminate flag"
_WAS_RUNNING = re.compile(r"while running (?P<op>\S+) node\. Name:'(?P<name>[^']*)'")
_LOADING = re.compile(r"Node ?(?:\(|:|name: ?)(?P<name>[^()\s]+)\)?")


@dataclass(frozen=True, eq=False)
class Print:
    """The fingerprint of a value.

    Args:
        shape: The value's shape.
        numbers: float32 [4099]: the sample, then the least, the largest, and the norm. The sample
            is of the flat value with a zero at its end, so that an empty value has a sample too.
    """

    shape: tuple[int, ...]
    numbers: np.ndarray

    @property
    def sample(self) -> np.ndarray:
        return self.numbers[:-3]

    @cached_property
    def scale(self) -> float:
        return float(np.abs(self.numbers[-3:-1]).max())

    @cached_property
    def even(self) -> bool:
        """True if all elements in the sample are equal: such values are easy to confuse."""
        count = int(np.prod(self.shape))
        inside = self.sample[PLACES % (count + 1) < count]
        return not inside.size or bool((inside == inside[0]).all())

    def bound(self, other: Print) -> float:
        """Returns a fast lower bound of `apart` for equal shapes."""
        (low, high), scale = self.numbers[-3:-1], self.scale
        with np.errstate(invalid="ignore", over="ignore"):  # infinity less infinity is NaN
            far = max(abs(low - other.numbers[-3]), abs(high - other.numbers[-2]))
        return float(far) / scale * 0.999 if scale and np.isfinite([far, scale]).all() else 0.0

    def apart(self, other: Print) -> float:
        """Returns the difference to `other`, as a share of this value's largest element. Infinity
        if the shapes, or the places of NaN or infinity, differ."""
        if self.shape != other.shape:
            return float("inf")
        difference = Difference(self.numbers[:-1], other.numbers[:-1])
        far = difference.largest
        if far == float("inf"):
            return far
        largest = difference.scale
        norms = [float(p.numbers[-1]) for p in (self, other)]
        rest = abs(norms[0] - norms[1]) / norms[0] if norms[0] and np.isfinite(norms).all() else 0.0
        near = far / largest if largest else (float("inf") if far else 0.0)
        return max(near, rest if rest > _NORM_NOISE else 0.0)


@dataclass(frozen=True)
class OnnxPrints:
    """The prints of an ONNX model's values by name, or why it did not run.

    Args:
        values: The prints of the computed values.
        real: The names of the floating-point values.
        failed: The name of the node at which ONNX Runtime failed, and its message.
    """

    values: Mapping[str, Print]
    real: Collection[str] = ()
    failed: tuple[str, str] | None = None


def onnx_prints(
    model: onnx.ModelProto, folder: Path, feed: Mapping[str, np.ndarray], seconds: float
) -> OnnxPrints:
    """Returns the print of every tensor of the main graph, in ONNX Runtime without optimisations.

    If a node fails at these sizes, only the values that do not depend on the node have prints.

    Args:
        model: The model; its nodes have names. It may lack its external weights.
        folder: The folder of the external weights.
        feed: The inputs by name.
        seconds: The time limit; there are no prints if the run takes longer.
    """
    types = _tensor_types(model)
    real = {name for name, kind in types.items() if kind in _REAL}
    failed: tuple[str, str] | None = None
    left = model
    for _ in range(8):  # remove what fails and try again: a second branch may fail too
        try:
            return OnnxPrints(_run(_probed(left, types), folder, feed, seconds), real, failed)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            text = " ".join(str(error).split())
            if _STOPPED in text:
                return OnnxPrints({}, real)
            match = _WAS_RUNNING.search(text) or _LOADING.search(text)
            name = match["name"] if match else ""
            failed = failed or (name, text.split("Status Message: ")[-1])
            left = _without(left, name)
            if not left.graph.node:
                break
    return OnnxPrints({}, real, failed)


def _run(
    model: onnx.ModelProto, folder: Path, feed: Mapping[str, np.ndarray], seconds: float
) -> dict[str, Print]:
    import onnxruntime

    names = [value.name for value in model.graph.output]
    if not names:
        return {}
    session = open_session(model.SerializeToString(), weights=folder, by_priority=True)
    known = {value.name for value in session.get_inputs()}
    given = {name: array for name, array in feed.items() if name in known}
    how = onnxruntime.RunOptions()
    timer = threading.Timer(seconds, setattr, (how, "terminate", True))
    timer.start()
    try:
        results = dict(zip(names, session.run(names, given, how), strict=True))
    finally:
        timer.cancel()
    return {
        name.removeprefix(f"{_PREFIX}shape/"): Print(
            tuple(map(int, shape)), results[name.replace("/shape/", "/numbers/", 1)]
        )
        for name, shape in results.items()
        if name.startswith(f"{_PREFIX}shape/")
    }


def _probed(model: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """Returns a copy of the model whose outputs are the prints of its main graph's tensors."""
    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    graph = probed.graph
    del graph.output[:], graph.value_info[:], graph.node[:]
    constants: dict[str, np.ndarray] = {
        "flat": np.array([-1], np.int64),
        "zero": np.zeros(1, np.float32),
    }
    for name, array in {**constants, "places": PLACES}.items():
        graph.initializer.append(numpy_helper.from_array(array, _PREFIX + name))
    for node in model.graph.node:
        graph.node.append(node)
        for name in node.output:
            if name in types:
                graph.node.extend(_probe(name, types[name], graph))
    return probed


def _probe(name: str, kind: int, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Returns the nodes that compute a value's print, placed after the value's node."""
    nodes = []

    def op(op_type: str, inputs: list[str], short: str, **attributes: Any) -> str:
        output = f"{_PREFIX}{short}/{name}"
        nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    shape = op("Shape", [name], "shape")
    wide = name
    if kind != TensorProto.FLOAT:
        wide = op("Cast", [name], "wide", to=TensorProto.FLOAT)
    flat = op("Reshape", [wide, f"{_PREFIX}flat"], "flattened")
    longer = op("Concat", [flat, f"{_PREFIX}zero"], "longer", axis=0)
    size = op("Size", [longer], "size")
    places = op("Mod", [f"{_PREFIX}places", size], "at")
    sample = op("Gather", [longer, places], "sample")
    facts = [op(f"Reduce{kind}", [longer], kind.lower()) for kind in ("Min", "Max", "L2")]
    numbers = op("Concat", [sample, *facts], "numbers", axis=0)
    graph.output.append(helper.make_tensor_value_info(shape, TensorProto.INT64, None))
    graph.output.append(helper.make_tensor_value_info(numbers, TensorProto.FLOAT, None))
    return nodes


def _tensor_types(model: onnx.ModelProto) -> dict[str, int]:
    """Returns the types of the main graph's values that are known to be tensors of numbers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    infer_shapes(copy)
    graph = copy.graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}
    return {name: kind for name, kind in types.items() if kind not in _NO_NUMBERS}


def _without(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Returns a copy without a node and its dependents; without any node if it is not found."""
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    del rest.graph.node[:], rest.graph.output[:]
    gone: set[str] = set()
    for node in model.graph.node:
        if (name and node.name == name) or gone.intersection(reads(node)):
            gone.update(node.output)
        else:
            rest.graph.node.append(node)
    if not gone:
        del rest.graph.node[:]
    return rest
