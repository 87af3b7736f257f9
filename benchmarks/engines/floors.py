"""Computes how fast a model could be: its operations and bytes, divided by the chip's rates.

    python benchmarks/engines/floors.py count ARTIFACT [--shape h=440,w=1024 ...]
        [--rates FILE] [--json]
    python3 benchmarks/engines/floors.py measure --out FILE  # a Python that has torch with CUDA

`count` needs no GPU. It reads model.onnx at the given sizes. A Loop's body counts once for each
iteration. It prints for each size:

- the operations of the matrix products and convolutions (2 for a multiply-add)
- the least bytes: inputs, outputs and weights, each once, as if all other tensors stayed on the
  chip
- all bytes: also every other tensor, written once and read once, as if nothing were fused. Views,
  and values that are known before the run, are left out.
- the times: operations over the rate of the matrix units, and bytes over the bandwidth. The floor
  is the larger time of operations and least bytes: no run is faster. "layer by layer" is a sum over
  the products and convolutions. Each counts with the larger time of its operations and of its
  inputs, weights and outputs. This is not a floor, because a tensor may stay in the cache. It is a
  goal for a runtime that does not fuse these layers.

Other nodes count by their bytes only. A float has 2 bytes in fp16, otherwise 4. --rates gives the
rates. The default rates of fp16 and of the bandwidth were measured on an H200. tf32 has half the
rate of fp16, and the rate of fp32 comes from the datasheet.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_rates import RATES, measured_rates, stored_rates

FLOAT_BYTES = {"fp16": 2, "tf32": 4, "fp32": 4}
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
NOT_COUNTED = ("LSTM", "GRU", "RNN", "Attention", "DeformConv", "QLinearConv", "MatMulInteger")


@dataclass
class Amount:
    """The number of float elements, and the bytes of all other elements."""

    floats: float = 0.0
    others: float = 0.0

    def add(self, kind: Any, times: float) -> None:
        from onnx import helper

        from pipeline.graph.sizes.carried import element_count

        dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
        count = (element_count(kind) or 0) * times
        if dtype.kind == "f":
            self.floats += count
        else:
            self.others += count * dtype.itemsize

    def bytes(self, precision: str) -> float:
        return self.floats * FLOAT_BYTES[precision] + self.others


@dataclass
class Work:
    """The work of one call.

    Args:
        operations: The operations of products and convolutions.
        least: The bytes of inputs, outputs and weights.
        every: The bytes if every tensor is written and read once.
        layers: The count of each (operations, floats in and out) of a product or convolution.
        by_op: [nodes, operations, floats written] by op, for nodes that run.
        unknown: The parts that could not be counted.
    """

    operations: float = 0.0
    least: Amount = field(default_factory=Amount)
    every: Amount = field(default_factory=Amount)
    layers: Counter[tuple[float, float]] = field(default_factory=Counter)
    by_op: dict[str, list[float]] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)

    def record(self) -> dict[str, Any]:
        """The work for JSON and for `times`."""
        return {
            "operations": self.operations,
            "least": vars(self.least),
            "every": vars(self.every),
            "layers": [[*layer, count] for layer, count in self.layers.items()],
            "by_op": self.by_op,
            "unknown": dict(self.unknown),
        }


def times(
    record: Mapping[str, Any], precision: str, rates: Mapping[str, float]
) -> dict[str, float]:
    """Milliseconds of the operations, the least bytes, all bytes, layer by layer, and the floor."""
    rate, bandwidth = rates[precision], rates["bandwidth"]
    size = FLOAT_BYTES[precision]
    found = {
        "operations": record["operations"] / rate,
        "least bytes": Amount(**record["least"]).bytes(precision) / bandwidth,
        "all bytes": Amount(**record["every"]).bytes(precision) / bandwidth,
        "layer by layer": sum(
            count * max(operations / rate, floats * size / bandwidth)
            for operations, floats, count in record["layers"]
        ),
    }
    found["floor"] = max(found["operations"], found["least bytes"])
    return {name: seconds * 1e3 for name, seconds in found.items()}


def count(path: Path, shapes: Mapping[str, Sequence[int]], trips: int | None = None) -> Work:
    """Counts one model at these input shapes. `trips`: the count of loops that an input counts."""
    from pipeline.graph.memory import Estimator

    estimator = Estimator(path)
    graph, sizes = estimator.graph, estimator.sizes(shapes)
    work = Work()
    weights = {t.name for t in graph.initializer}
    weights |= {v.name for v in graph.input} - set(estimator.inputs)
    read = _Walk(work, trips).graph(graph, sizes, weights, 1.0)
    for name in [*(n for n in estimator.inputs), *read, *(v.name for v in graph.output)]:
        work.least.add(sizes.types[name], 1)
    for name in [*(n for n in estimator.inputs), *read]:
        work.every.add(sizes.types[name], 1)
    for value in graph.output:
        work.every.add(sizes.types[value.name], -1)  # no later node reads it
    return work


class _Walk:
    def __init__(self, work: Work, trips: int | None) -> None:
        self.work, self.trips = work, trips

    def graph(self, graph: Any, sizes: Any, weights: Collection[str], runs: float) -> set[str]:
        """Adds the work of a graph, `runs` times. Returns the weights that the graph reads."""
        fixed, read = set(weights), set()
        fixed |= {t.name for t in graph.initializer}
        for node in graph.node:
            known = all(name in fixed or name in sizes.values for name in node.input if name)
            bodies = [a for a in node.attribute if a.g.node]
            if known and not bodies:
                fixed |= set(node.output)  # computed before the run
                continue
            read |= {n for n in node.input if n in fixed and n not in sizes.values}
            for attribute in bodies:
                read |= self._body(node, attribute, sizes, fixed, runs)
            if not bodies:
                self._node(node, sizes, runs)
        return {n for n in read if n in sizes.types}

    def _body(
        self, node: Any, attribute: Any, sizes: Any, fixed: Collection[str], runs: float
    ) -> set[str]:
        from pipeline.graph.sizes.carried import body_key, known_dims

        body = sizes.bodies.get(body_key(node, attribute.name))
        if body is None or not body.types:  # a branch that does not run
            return set()
        trips: int | None = 1
        if node.op_type == "Loop":
            number = sizes.values.get(node.input[0]) if node.input[0] else None
            trips = int(number[0].item()) if number and len(number) == 1 else self.trips
        elif node.op_type == "Scan":
            trips = known_dims(sizes.types[node.input[-1]])[0]
        if trips is None:
            self.work.unknown[f"{node.op_type} (say --trips)"] += 1
            trips = 1
        inner = {v.name for v in attribute.g.input}
        return self.graph(attribute.g, body, set(fixed) - inner, runs * trips) & set(sizes.types)

    def _node(self, node: Any, sizes: Any, runs: float) -> None:
        from pipeline.graph.sizes.carried import element_count

        kinds = [sizes.types.get(name) for name in node.output if name]
        if any(kind is None or element_count(kind) is None for kind in kinds):
            self.work.unknown[node.op_type] += 1
            return
        if all(name in sizes.values for name in node.output if name):
            return  # arithmetic on sizes
        written = Amount()
        for kind in kinds:
            written.add(kind, runs)
        if node.op_type not in VIEWS:
            for kind in kinds:
                self.work.every.add(kind, 2 * runs)
        operations = _operations(node, sizes)
        if operations is None or (node.domain not in ("", "ai.onnx")):
            self.work.unknown[node.op_type] += 1
        if operations:
            self.work.operations += operations * runs
            moved = Amount()
            for name in {*node.input, *node.output}:
                if name:
                    moved.add(sizes.types[name], 1)
            self.work.layers[(operations, moved.floats)] += int(runs)
        row = self.work.by_op.setdefault(node.op_type, [0, 0, 0])
        row[0] += runs
        row[1] += (operations or 0) * runs
        row[2] += 0 if node.op_type in VIEWS else written.floats


def _operations(node: Any, sizes: Any) -> float | None:
    """The operations of a product or convolution; 0 for another node; None if they are unknown."""

    def dims(place: int) -> list[int]:
        from pipeline.graph.sizes.carried import known_dims

        return [n or 0 for n in known_dims(sizes.types[node.input[place]])]

    if node.op_type in NOT_COUNTED:
        return None
    result = sizes.types[next(filter(None, node.output))].tensor_type.shape.dim
    each = 0.0  # multiply-adds per element of the result
    match node.op_type:
        case "Conv":
            each = math.prod(dims(1)[1:])
        case "ConvTranspose":  # per element of the input
            result, each = sizes.types[node.input[0]].tensor_type.shape.dim, math.prod(dims(1)[1:])
        case "MatMul":
            each = dims(0)[-1]
        case "Gemm":
            across = next((a.i for a in node.attribute if a.name == "transA"), 0)
            each = dims(0)[0 if across else 1]
        case "Einsum":
            return _einsum(node, [dims(n) for n in range(len(node.input))])
    return 2.0 * each * math.prod(d.dim_value for d in result)


def _einsum(node: Any, shapes: Sequence[Sequence[int]]) -> float | None:
    equation = next(a.s for a in node.attribute if a.name == "equation").decode().replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation or [len(term) for term in terms] != [len(shape) for shape in shapes]:
        return None
    sizes = dict(zip("".join(terms), (n for shape in shapes for n in shape), strict=True))
    return 0.0 if len(terms) == 1 else 2.0 * math.prod(sizes.values())


def count_artifact(place: Path, shapes: Sequence[str], trips: int | None) -> list[dict[str, Any]]:
    """One record for each size of an artifact's model."""
    from pipeline.artifact.artifact import Artifact
    from pipeline.spec.dims import shape_at
    from pipeline.spec.profiles import sizes_to_time

    artifact = Artifact.open(place)
    manifest = artifact.manifest
    found = []
    declared = manifest.interface
    for point in sizes_to_time(declared.dims, declared.profiles, declared.rules, shapes):
        actual = {i.name: shape_at(i.shape, point.sizes) for i in declared.inputs}
        work = count(artifact.model, actual, trips)
        found.append({"model": manifest.name, "sizes": dict(point.sizes), "work": work.record()})
    return found


def table(records: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> str:
    """All records at every precision, as Markdown."""
    lines = [
        "| model | sizes | precision | Gop | least MB | all MB | floor ms | operations ms "
        "| least bytes ms | all bytes ms | layer by layer ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        work = record["work"]
        words = ",".join(f"{k}={v}" for k, v in record["sizes"].items())
        for precision in ("fp16", "tf32", "fp32"):
            ms = times(work, precision, rates)
            least, every = (Amount(**work[k]).bytes(precision) / 1e6 for k in ("least", "every"))
            lines.append(
                f"| {record['model']} | {words} | {precision} | {work['operations'] / 1e9:.3g} "
                f"| {least:.3g} | {every:.3g} | {ms['floor']:.3g} | {ms['operations']:.3g} "
                f"| {ms['least bytes']:.3g} | {ms['all bytes']:.3g} | {ms['layer by layer']:.3g} |"
            )
        if work["unknown"]:
            what = ", ".join(f"{op} {n}" for op, n in work["unknown"].items())
            lines.append(f"\nnot counted at {words}: {what}\n")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser("count")
    counting.add_argument("artifact", type=Path)
    counting.add_argument("--shape", action="append", default=[], metavar="DIM=SIZE,...")
    counting.add_argument("--rates", type=Path, metavar="FILE", help="a file from `measure`")
    counting.add_argument("--trips", type=int, help="the count of loops whose count is an input")
    counting.add_argument("--json", action="store_true")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        rates = measured_rates()
        if arguments.out:
            arguments.out.write_text(json.dumps(rates, indent=2))
        print(json.dumps(rates))
        return 0
    from pipeline.errors import PipelineError

    try:
        rates = {**RATES, **(stored_rates(arguments.rates) if arguments.rates else {})}
        records = count_artifact(arguments.artifact, arguments.shape, arguments.trips)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(records) if arguments.json else table(records, rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
