"""Lets torch.onnx.export decompose a program op by op, instead of tracing all of it again.

torch.onnx.export calls ``run_decompositions``, which runs the whole program twice with symbolic
sizes, and then once more to find ops that mix types. The sizes of a deep convolution network are
long expressions, and these three runs take longer than the first trace. Most ops need nothing: they
have a translation to ONNX. So here only the other ops are traced, each one alone, and the rest is
taken over with the types and sizes that the program has.

A program goes torch's own way if it has branches or loops, changes its inputs or buffers, has sizes
that depend on data, or changes a tensor in place that another name still shows.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_cia_op, _special_op_to_preserve_cia
from torch.export import _trace
from torch.export import exported_program as _exported
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import NodeSource
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.fx.passes import type_promotion
from torch.utils import _pytree as pytree

from pipeline.export.exchange import Exchange
from pipeline.export.ops.extremes import WITH_BOUNDS
from pipeline.export.torch_2_13.writes import NotSimpleError, without_writes

_aten, _prims = torch.ops.aten, torch.ops.prims
_Table = Mapping[Any, Callable[..., Any]]
# what an op inherits from the op that it comes from
_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "custom")
_ASSERTIONS = {
    _aten.sym_constrain_range_for_size.default, _aten._assert_async.default,
    _aten._assert_async.msg, _aten._assert_scalar.default, _aten._assert_tensor_metadata.default,
}  # fmt: skip
_INPUTS = {
    InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR,
}  # fmt: skip
_interpreter: Any = type_promotion._TypePromotionInterpreter
_own_decomposition = _fx_passes.decompose_with_registry
_own_run_node = _interpreter.run_node


def _decomposed(program: torch.export.ExportedProgram, registry: Any) -> Any:
    """`decompose_with_registry`: a program whose ops all have translations."""
    registered = set(_decomp.get_onnx_implemented_overloads(registry))
    table = _decomp.create_onnx_friendly_decomposition_table(registered)
    asserted = _only_asserted(program.graph)
    try:
        return _by_ops(program, asserted, table, registered)
    except Exception:  # `NotSimpleError`, or a value that torch has not noted
        if any(node.target is _aten._is_all_true.default for node in asserted):
            program = _without(program, asserted)  # torch.onnx has no translation of it
        return _own_decomposition(program, registry)


def _by_ops(
    program: torch.export.ExportedProgram,
    asserted: Collection[Node],
    table: _Table,
    registered: Collection[Any],
) -> torch.export.ExportedProgram:
    _check(program, asserted)
    targets, instead = without_writes(program.graph)
    composite, other = _exported._split_decomp_table_to_cia_and_python_decomp(dict(table))
    graph = Graph()
    made: dict[Node, Any] = {}
    with ExitStack() as stack:
        tracer = _Tracer(graph, composite, other, registered, stack)
        for node in program.graph.nodes:
            if node in asserted:
                continue
            args, kwargs = _read(node, instead, made)
            target = targets.get(node, node.target)
            if _is_unknown(target, registered):
                raise NotSimpleError
            if node.op != "call_function":
                made[node] = _copied(graph, node, node.target, args, kwargs)
            elif target is operator.getitem and not isinstance(args[0], Node):
                made[node] = args[0][args[1]]
            elif target is _aten.sym_numel.default:
                made[node] = _numel(graph, node, args[0])
            elif _has_translation(target, composite, other):
                made[node] = _copied(graph, node, target, args, kwargs)
            else:
                made[node] = tracer.inlined(node, target, args, kwargs)
    graph.eliminate_dead_code()
    return _with(program, graph)


def _without(
    program: torch.export.ExportedProgram, nodes: Collection[Node]
) -> torch.export.ExportedProgram:
    """The program without some nodes."""
    graph, made = Graph(), dict[Node, Node]()
    for node in program.graph.nodes:
        if node not in nodes:
            made[node] = new = graph.node_copy(node, made.__getitem__)
            if node.op == "placeholder":
                new.name = node.name  # as in `_copied`
    return _with(program, graph, program.verifiers)


def _with(
    program: torch.export.ExportedProgram, graph: Graph, verifiers: list[Any] | None = None
) -> torch.export.ExportedProgram:
    """The program with another graph, and the verifiers of its ops; by default, of torch's core."""
    return torch.export.ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=_signature(program, graph),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=verifiers,
    )


def _only_asserted(graph: Graph) -> set[Node]:
    """The assertions, and the nodes whose values only assertions read."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        feeds = node.op == "call_function" and node.users and found.issuperset(node.users)
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        if node.target in _ASSERTIONS or (feeds and not writes):
            found.add(node)
    return found


def _check(program: torch.export.ExportedProgram, asserted: Collection[Node]) -> None:
    """Raises `NotSimpleError` for a program that only torch's own way handles."""
    signature = program.graph_signature
    simple = (
        all(spec.kind in _INPUTS for spec in signature.input_specs)
        and all(spec.kind is OutputKind.USER_OUTPUT for spec in signature.output_specs)
        and all(node in asserted or _is_simple(node) for node in program.graph.nodes)
    )
    if not simple:
        raise NotSimpleError


def _is_simple(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.meta.get("unbacked_bindings"):
        return False
    module = getattr(node.target, "__module__", "")
    return isinstance(node.target, torch._ops.OpOverload) or module in (
        operator.__name__, operator.add.__module__, math.__name__, "torch",
    )  # fmt: skip


def _is_unknown(target: Any, registered: Collection[Any]) -> bool:
    """True for a function of sizes without a translation. torch's own way may not need it."""
    if isinstance(target, str) or target in (operator.getitem, _aten.sym_numel.default):
        return False
    of_sizes = not isinstance(target, torch._ops.OpOverload) or ".sym_" in str(target)
    return of_sizes and target not in registered


def _has_translation(target: Any, composite: _Table, other: _Table) -> bool:
    """True for an op that is not decomposed, and for arithmetic of sizes."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target in composite:
        return composite[target] is _special_op_to_preserve_cia
    return target not in other and not _is_cia_op(target)


def _copied(
    graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Node:
    new = graph.create_node(node.op, target, args, kwargs, node.name, node.type)
    new.meta = copy.copy(node.meta)
    if node.op == "placeholder":
        new.name = node.name  # the signature has it, also a name of Python such as `input`
    return new


def _numel(graph: Graph, node: Node, source: Node) -> Any:
    """The product of a tensor's sizes: the number of elements has no translation."""
    total: Any = 1
    value: Any = 1
    for axis, size in enumerate(source.meta["val"].shape):
        part: Any = size
        if not isinstance(size, int):
            part = graph.call_function(_aten.sym_size.int, (source, axis))
            part.meta = {**copy.copy(node.meta), "val": size}
        value = value * size
        if isinstance(total, Node) or isinstance(part, Node):
            total = graph.call_function(operator.mul, (total, part))
            total.meta = {**copy.copy(node.meta), "val": value}
        else:
            total = value
    return total


class _Tracer:
    """Writes the ops that stand for one op.

    Args:
        graph: gets the ops.
        composite: the functions of the ops that torch itself composes of others.
        other: the functions of other ops.
        registered: the functions with a translation.
        stack: closes what tracing needs.
    """

    def __init__(
        self,
        graph: Graph,
        composite: _Table,
        other: _Table,
        registered: Collection[Any],
        stack: ExitStack,
    ) -> None:
        self._graph, self._other, self._registered = graph, dict(other), registered
        self._needs: tuple[AbstractContextManager[Any], ...] = (
            torch.no_grad(),
            _trace._ignore_backend_decomps(),
            _exported._override_composite_implicit_decomp(composite),
        )
        self._stack = stack
        self._open = False

    def inlined(
        self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The nodes of the graph that give what the node gives, in its structure."""
        if target is _aten.batch_norm.default and _is_plain_norm(args):
            return self._batch_norm(node, args)
        if not self._open:
            self._open = True
            for need in self._needs:
                self._stack.enter_context(need)
        flat, spec = pytree.tree_flatten((args, kwargs))
        places = [n for n, value in enumerate(flat) if isinstance(value, Node)]

        def call(*values: Any) -> Any:
            every = list(flat)
            for place, value in zip(places, values, strict=True):
                every[place] = value
            own_args, own_kwargs = pytree.tree_unflatten(every, spec)
            return target(*own_args, **own_kwargs)

        values = [flat[place].meta["val"] for place in places]
        mode = torch._guards.detect_fake_mode(values)
        if mode is None:
            raise NotSimpleError
        with mode, enable_python_dispatcher():
            traced = make_fx(call, decomposition_table=self._other)(*values)
        return self._inserted(traced, [flat[place] for place in places], node)

    def _inserted(self, traced: GraphModule, given: list[Node], origin: Node) -> Any:
        targets, instead = without_writes(traced.graph)
        made: dict[Node, Any] = {}
        inputs = iter(given)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(inputs)
                continue
            args, kwargs = _read(node, instead, made)
            if node.op == "output":
                return args[0]
            if not _is_simple(node) or _is_unknown(node.target, self._registered):
                raise NotSimpleError
            if node.target is _aten.sym_numel.default:
                made[node] = _numel(self._graph, origin, args[0])
                continue
            new = self._graph.call_function(targets.get(node, node.target), args, kwargs)
            new.meta = _inherited(origin)
            new.meta["val"] = node.meta["val"]
            made[node] = new
        raise AssertionError("a graph without an output")

    def _batch_norm(self, node: Node, args: tuple[Any, ...]) -> Node:
        """What torch makes of ``batch_norm`` in eval mode, without the shapes of its steps."""
        source, weight, bias, mean, variance, _, momentum, eps, *_ = args
        target = _aten._native_batch_norm_legit_no_training.default
        value = node.meta["val"]
        norm = self._graph.call_function(
            target, (source, weight, bias, mean, variance, momentum, eps)
        )
        norm.meta = _inherited(node)
        norm.meta["val"] = (value, value.new_empty(0), value.new_empty(0))
        return _copied(self._graph, node, operator.getitem, (norm, 0), {})


def _inherited(origin: Node) -> dict[str, Any]:
    """What an op inherits from the op that it comes from; errors name that op."""
    found = {name: origin.meta[name] for name in _META if name in origin.meta}
    return {**found, "from_node": [NodeSource(origin)]}


def _is_plain_norm(args: tuple[Any, ...]) -> bool:
    """True for ``batch_norm`` in eval mode, with its statistics, in one type."""
    if len(args) < 8 or args[5] or None in args[3:5]:
        return False
    return len({a.meta["val"].dtype for a in args[:5] if isinstance(a, Node)}) == 1


def _read(node: Node, instead: Mapping[Node, Mapping[Node, Node]], made: Mapping[Node, Any]) -> Any:
    """What the node reads in the new graph: its arguments, and those by name."""
    other = instead.get(node, {})
    return torch.fx.map_arg((node.args, node.kwargs), lambda name: made[other.get(name, name)])


def _signature(program: torch.export.ExportedProgram, graph: Graph) -> Any:
    """The program's signature, with the names of the new outputs."""
    signature = copy.deepcopy(program.graph_signature)
    outputs = next(iter(reversed(graph.nodes))).args[0]
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if isinstance(node, Node):
            spec.arg.name = node.name
    return signature


def _promoted(self: Any, node: Node) -> Any:
    """`_TypePromotionInterpreter.run_node`, which keeps the shapes that are noted.

    Where a branch has narrowed a size, torch computes 6 for ``min(6, size)`` again.
    """
    noted = node.meta.get("val") if node.op == "call_function" else None
    found = _promoted_if_needed(self, node)
    if not (isinstance(noted, torch.Tensor) and isinstance(found, torch.Tensor)):
        return found
    if noted.dtype != found.dtype:
        _name_the_cast(node)
        return found
    node.meta["val"] = noted
    return noted


def _name_the_cast(node: Node) -> None:
    """Gives an output's name to the cast behind a node that now computes in float32.

    A sum of float16 is an example. The signature of the program knows outputs by their names, and
    torch leaves the name to the node.
    """
    users = [*node.users]
    if len(users) != 1 or users[0].target is not _prims.convert_element_type.default:
        return
    if any(user.op == "output" for user in users[0].users):
        name = node.name
        node.name = f"{name}_wide"
        users[0].name = name


def _promoted_if_needed(self: Any, node: Node) -> Any:
    """`_TypePromotionInterpreter.run_node`, which computes only after the first change."""
    if node.target in WITH_BOUNDS:
        # torch makes a tensor of a bound, and not of the other one, and then finds no such op
        with self._set_current_node(node):
            return Interpreter.run_node(self, node)
    count = len(self.module.graph.nodes)
    rule = type_promotion.get_type_promotion_rule(node, self.type_promotion_table)
    known = "val" in node.meta and node.op == "call_function"
    if not known or getattr(self, "changed", False):
        return _own_run_node(self, node)
    if rule:
        before = (node.target, node.args, node.kwargs)
        with self._set_current_node(node):
            self._maybe_promote_node(node, rule)
        if (node.target, node.args, node.kwargs) != before or count != len(self.module.graph.nodes):
            self.changed = True
            return Interpreter.run_node(self, node)
    return node.meta["val"]


_exchange = Exchange(
    {
        (_fx_passes, _own_decomposition.__name__): _decomposed,
        (_interpreter, _own_run_node.__name__): _promoted,
    }
)


def op_by_op() -> AbstractContextManager[None]:
    """While it is active, torch.onnx.export traces only ops without a translation."""
    return _exchange.used()
