"""A graph of a newer opset is lowered to an opset that the target reads correctly.

TensorRT's parsers do not reject opsets above the one that they were written for. They read a node
whose form changed by the rules of the older form, often without a warning. The tables in
`pipeline.passes.lowering` say how to write such a node in the older form. The pass rewrites every
node whose schema differs between both opsets, and sets the graph's opset to the level. If any node
cannot be lowered, that node is refused and nothing changes.

`expand_functions` expands ops that the level lacks and the standard defines as functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx.defs import OpSchema

from pipeline.machine.target import BELOW_10, FROM_10, RTX, Versions
from pipeline.passes.graph_ops import is_op, label, walk
from pipeline.passes.infra import Change, Pass, PassResult, Refused
from pipeline.passes.lowering import CONVERTERS, NEWEST, SAME, THROUGH_FLOAT32, Site
from pipeline.passes.lowering._site import Converter, type_name

_HALVES = ("tensor(float16)", "tensor(bfloat16)")


@dataclass(frozen=True)
class _Lowering:
    """The plan for a node: the attributes to drop, whether it computes in float32, and the rest
    of its converter."""

    site: Site
    dropped: tuple[str, ...]
    widened: bool
    steps: Iterator[str]
    detail: str

    def apply(self) -> None:
        for key in self.dropped:
            del self.site.node.attrs[key]
        if self.widened:
            _through_float32(self.site)
        next(self.steps, None)


def schema(op: str, opset: int) -> OpSchema | None:
    """The standard's schema of an op at an opset, or None if the opset lacks the op."""
    try:
        return onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None


def lower(graph: gs.Graph, level: int) -> PassResult:
    """Lowers the graph to an opset, or refuses every node that cannot be lowered."""
    if graph.opset <= level:
        return PassResult(())
    plans, refused = [], []
    for inner, node in walk(graph):
        new = schema(node.op, graph.opset) if is_op(node, node.op) else None
        old = schema(node.op, level) if new is not None else None
        if new is None or (old is not None and old.since_version == new.since_version):
            continue
        try:
            plans.append(_plan(Site(inner, node, old, new, level)))
        except Refused as reason:
            refused.append(Change(label(node), node.op, str(reason)))
    if refused or not graph.nodes:
        return PassResult((), tuple(refused))
    rewritten = []
    for plan in plans:
        if plan.detail:
            node = plan.site.node
            rewritten.append(Change(label(node), node.op, plan.detail))
    first = graph.nodes[0]
    if not rewritten:
        what = f"the graph's opset is now {level}, not {graph.opset}; all nodes keep their meaning"
        rewritten.append(Change(label(first), first.op, what))
    for plan in plans:
        plan.apply()
    for each in (graph, *graph.subgraphs(recursive=True)):
        _set_opset(each, level)
    return PassResult(tuple(rewritten))


def _plan(site: Site) -> _Lowering:
    node, old, new = site.node, site.old, site.new
    if new.since_version > NEWEST:
        raise Refused(
            f"its form of opset {new.since_version} is not known: export with opset {NEWEST}"
        )
    converter = CONVERTERS.get(node.op)
    if converter is None and old is None:
        raise Refused(
            f"it is new in opset {new.since_version}, and opset {site.level} has no form of it: "
            "write it with older ops"
        )
    if converter is None and node.op not in SAME:
        raise Refused(
            f"it changed in opset {new.since_version}, and its older form is not known: "
            "export with a lower opset"
        )
    dropped: tuple[str, ...] = ()
    widened = False
    if old is not None:
        dropped = _superfluous(node, old, new, converter)
        widened = _needs_float32(node, old, converter)
    steps = converter.steps(site) if converter else iter(())
    details = [f"{key} dropped: it has its default value" for key in dropped]
    details += ["computed in float32: the older form lacks the dtype"] if widened else []
    details += [detail for detail in (next(steps, ""),) if detail]
    return _Lowering(site, dropped, widened, steps, "; ".join(details))


def _superfluous(
    node: gs.Node, old: OpSchema, new: OpSchema, converter: Converter | None
) -> tuple[str, ...]:
    """Attributes that the old schema lacks and that have their default values.

    Raises:
        Refused: the node has others, or inputs that the old schema lacks.
    """
    handled = converter.attrs if converter else ()
    dropped: list[str] = []
    for key, value in node.attrs.items():
        if key in old.attributes or key in handled:
            continue
        default = new.attributes[key].default_value
        if not default.name or _plain(onnx.helper.get_attribute_value(default)) != _plain(value):
            raise Refused(f"its attribute {key} is newer than opset {old.since_version}")
        dropped.append(key)
    most = max(old.max_input, converter.inputs if converter else 0)
    for place, given in enumerate(node.inputs):
        if place >= most and not (isinstance(given, gs.Variable) and given.is_empty()):
            raise Refused(f"its input {place} is newer than opset {old.since_version}")
    return tuple(dropped)


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _needs_float32(node: gs.Node, old: OpSchema, converter: Converter | None) -> bool:
    """Whether the old schema lacks a half-precision dtype of the node.

    An unknown dtype is accepted here: the checker runs afterwards.

    Raises:
        Refused: the old schema lacks another dtype of the node.
    """
    missing = set()
    formals = (old.inputs, old.outputs)
    for tensors, formal in zip((node.inputs, node.outputs), formals, strict=True):
        for place, tensor in enumerate(tensors):
            name = type_name(tensor.dtype)
            if name and formal and name not in formal[min(place, len(formal) - 1)].types:
                missing.add(name)
    kind = node.attrs.get("to", node.attrs.get("dtype"))
    value = node.attrs.get("value")
    if value is not None and node.op in ("Constant", "ConstantOfShape"):
        kind = value.dtype
    if kind is not None and type_name(kind) not in old.outputs[0].types:
        missing.add(type_name(kind))
    missing -= set(converter.types if converter else ())
    if not missing:
        return False
    if node.op in THROUGH_FLOAT32 and missing <= set(_HALVES):
        return True
    raise Refused(f"the dtype {', '.join(sorted(missing))} is newer than opset {old.since_version}")


def _through_float32(site: Site) -> None:
    """Inserts Casts before and after the node, for tensors that the older form does not accept."""
    assert site.old is not None
    node, name, at = site.node, label(site.node), site.graph.nodes
    place = next(i for i, other in enumerate(at) if other is node)
    before, after = [], []
    casts: dict[int, gs.Variable] = {}
    for n, tensor in enumerate(list(node.inputs)):
        if type_name(tensor.dtype) not in _HALVES:
            continue
        if id(tensor) not in casts:
            short = f"{name}/to_float32_{n}"
            casts[id(tensor)] = gs.Variable(short, np.float32, tensor.shape)
            to = {"to": int(onnx.TensorProto.FLOAT)}
            before.append(gs.Node("Cast", short, to, [tensor], [casts[id(tensor)]]))
        node.inputs[n] = casts[id(tensor)]
    for n, tensor in enumerate(list(node.outputs)):
        kind = type_name(tensor.dtype)
        if kind not in _HALVES:
            continue
        short = f"{name}/from_float32_{n}"
        wide = gs.Variable(f"{name}/float32_{n}", np.float32, tensor.shape)
        node.outputs[n] = wide
        number = onnx.TensorProto.DataType.Value(kind[len("tensor(") : -1].upper())
        after.append(gs.Node("Cast", short, {"to": int(number)}, [wide], [tensor]))
    at[place : place + 1] = [*before, node, *after]


def _set_opset(graph: gs.Graph, level: int) -> None:
    graph.opset = level
    imports = []
    for given in graph.import_domains or ():
        standard = given.domain in ("", "ai.onnx")
        imports.append(onnx.helper.make_opsetid(given.domain, level if standard else given.version))
    graph.import_domains = imports or None


def _pass(level: int, targets: tuple[Versions, ...], fault: str, evidence: tuple[str, ...]) -> Pass:
    def run(graph: gs.Graph) -> PassResult:
        """Lowers the graph, all of it or nothing."""
        return lower(graph, level)

    return Pass(
        name=f"lower_opset_{level}",
        run=run,
        targets=targets,
        summary=f"graphs of opsets above {level} -> the same in opset {level}",
        fault=fault,
        evidence=evidence,
    )


TO_17 = _pass(
    17,
    (BELOW_10,),
    "TensorRT reads newer forms by the rules of opset 17, without a warning",
    (
        "onnx-tensorrt 8.6 documents opset 17; Reduce*-18 reduces over all axes, Split-18 with "
        "num_outputs loses the tail, Pad-18 with axes and Gelu-20 fail (source)",
    ),
)
TO_19 = _pass(
    19,
    (RTX, FROM_10),
    "TensorRT misreads or lacks forms of opsets 20 to 24",
    (
        "https://github.com/NVIDIA/TensorRT/issues/4646: GridSample-20 linear is sampled as "
        "nearest",
        "tensorrt-rtx 1.7.1 does not parse ReduceMax-20 of booleans (cases)",
    ),
)
