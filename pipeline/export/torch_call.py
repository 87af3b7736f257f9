"""Calls torch.export.export once."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.fx.experimental.symbolic_shapes import DimConstraints
from torch.utils._sympy.value_ranges import ValueRanges

from pipeline.errors import ConstraintError
from pipeline.export.asked import Asked, Line, listening
from pipeline.export.choices import (
    Choice,
    choices,
    number_choices,
    range_choices,
    small_choices,
)
from pipeline.export.exchange import Exchange
from pipeline.export.guards import Symbol, guard_parts
from pipeline.export.number_branches import selecting
from pipeline.export.swallowed import noting_branches, swallowed
from pipeline.export.torch_2_13 import mended
from pipeline.export.torch_messages import export_failed, root_name
from pipeline.machine.resources import Stopwatch
from pipeline.probe.eager import EagerModule, model_line, quiet
from pipeline.probe.generic import generic_examples
from pipeline.probe.sample_sizes import dims_of
from pipeline.spec.dims import Dim, DimExpr, Size
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.rules import Rule
from pipeline.spec.tensors import Input

LEAST = 3  # as the largest size: torch never takes 0 or 1, and a range of 2..2 is a constant
_GUARDS = 64  # most guards of torch's ops that are tried for one trace
TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Task:
    """One model to export.

    Args:
        spec: its spec.
        module: its module.
        seed: the seed of the example inputs' values.
        watch: the clock for the seconds inside torch.
        quick: whether to look less far for branches behind other branches.
        arithmetic: lines of the model whose branches are arithmetic while torch traces; see
            `pipeline.export.number_branches`.
        heard: the lines at which the model asked about its sizes, so far.
        relaxed: programs whose guards torch did not check, or the rules that they need, by the
            sizes of the example.
        writes: sizes at which calls changed what the module keeps, by the paths that changed.
    """

    spec: ModelSpec
    module: torch.nn.Module
    seed: int
    watch: Stopwatch
    quick: bool = False
    arithmetic: frozenset[Line] = frozenset()
    heard: set[Line] = field(default_factory=set)
    relaxed: dict[
        tuple[tuple[str, int], ...], tuple[torch.export.ExportedProgram | None, list[Rule]]
    ] = field(default_factory=dict)
    writes: dict[frozenset[str], Mapping[str, int]] = field(default_factory=dict)

    def with_arithmetic(self, lines: frozenset[Line]) -> Task:
        """The same task with the branches at these lines as arithmetic."""
        return Task(
            self.spec,
            self.module,
            self.seed,
            self.watch,
            self.quick,
            lines,
            writes=self.writes,
        )

    @cached_property
    def eager(self) -> EagerModule:
        return EagerModule(inner_inputs(self.spec), self.module, self.seed)

    @cached_property
    def examples(self) -> list[dict[str, int]]:
        """The sets of sizes at which to export, in the order in which to try them."""
        return generic_examples(self.eager, self.spec.rules)


@dataclass(frozen=True)
class Traced:
    """What torch.export.export made of a module.

    Args:
        program: the program.
        asked: what the model's code asked about its sizes.
        sizes: the sizes of the example.
    """

    program: torch.export.ExportedProgram
    asked: Sequence[Asked]
    sizes: dict[str, int]


def torch_export(
    task: Task,
    sizes: Mapping[str, int],
    *,
    relaxed: bool = False,
    least: int = LEAST,
) -> Traced:
    """Calls torch.export.export once.

    If `relaxed`, torch does not check the guards, and the caller has to. The same is true of sizes
    that torch's Dim can't express (``past + seq``, ``2*k + 1``).

    Raises:
        ConstraintError: torch refuses the sizes; the text is torch's own.
        ExportError: torch fails in another way; the text names the model's line.
    """
    eager = task.eager
    inputs, module = eager.inputs, eager.module
    roots: dict[str, Any] = {}

    def torch_dim(size: Dim | DimExpr) -> Any:
        if isinstance(size, DimExpr):
            return torch.export.Dim.DYNAMIC
        if relaxed or size.offset:
            return torch.export.Dim.DYNAMIC(min=size.min, max=max(size.max, least))
        return _torch_dim(size, roots, least)

    shapes: Any = tuple(
        {axis: torch_dim(size) for axis, size in enumerate(i.shape) if _dynamic(size)}
        for i in inputs
    )
    parameters = inspect.signature(module.forward).parameters.values()
    fixed = [p for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    if len(fixed) < len(parameters) and len(fixed) < len(inputs):  # forward(self, x, *rest)
        shapes = (*shapes[: len(fixed)], shapes[len(fixed) :])
    declared = declared_sizes(inputs, module)
    try:
        with (
            _tracing(task, declared) as asked,
            noting_branches() as raised,
            _unsolved() if relaxed else nullcontext(),
        ):
            program = torch.export.export(
                module, eager.args(sizes), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        text = str(error)  # torch's own
        if "Suggested fixes:" in text or "code specialized it to be a constant" in text:
            raise ConstraintError(text) from error
        line = model_line(traceback.extract_tb(error.__traceback__), TORCH)
        raise export_failed(error, line) from error
    if caught := swallowed(raised):
        raise export_failed(*caught) from caught[0]
    # torch lists its symbols in the order of a set, and writes that order into the ONNX file
    ranges = sorted(program.range_constraints.items(), key=lambda one: str(one[0]))
    program._range_constraints = dict(ranges)
    return Traced(program, asked, dict(sizes))


@cache
def _without_cache() -> Exchange:
    from torch._dynamo import config

    return Exchange({(config, "fake_tensor_cache_enabled"): False})


_solves: ContextVar[bool] = ContextVar("_solves", default=True)
_solve = DimConstraints.solve
_exchange = Exchange(
    {(DimConstraints, "solve"): lambda self: _solve(self) if _solves.get() else None}
)


@contextlib.contextmanager
def _unsolved() -> Iterator[None]:
    """torch does not solve its guards for the dims.

    It fails at guards that no equation on one dim can express ("Expected an equality constraint").
    """
    token = _solves.set(False)
    try:
        with _exchange.used():
            yield
    finally:
        _solves.reset(token)


@contextlib.contextmanager
def _tracing(task: Task, declared: Mapping[tuple[str, int], Size]) -> Iterator[list[Asked]]:
    """What a trace needs. Gives what the model's code asks about its sizes.

    torch's cache of fake results is off: where sizes are symbolic, it takes longer than it saves.
    """
    with (
        torch.no_grad(),
        quiet(),
        task.eager.state.restored(),
        mended(task.eager.module, declared),
        _without_cache().used(),
        selecting(task.arithmetic, {type(m) for m in task.eager.module.modules()}),
        listening() as asked,
    ):
        try:
            yield asked
        finally:
            task.heard.update(one.place for one in asked if one.place is not None)
            task.eager.caches.clear()


def declared_sizes(inputs: Sequence[Input], module: torch.nn.Module) -> dict[tuple[str, int], Size]:
    """The inputs' sizes, by torch's name of the argument of ``forward`` and the axis."""
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        many = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{n}]" for n in range(len(inputs))] if many else [name]
    return {
        (name, axis): size
        for name, i in zip(names, inputs, strict=False)
        for axis, size in enumerate(i.shape)
    }


def _dynamic(size: Size) -> TypeGuard[Dim | DimExpr]:
    if isinstance(size, DimExpr):
        return not all(dim.static for dim in size.dims)
    return isinstance(size, Dim) and not size.static


def _torch_dim(size: Dim, roots: dict[str, Any], least: int) -> Any:
    """torch's Dim for a dim, or ``k*_name`` for multiples; one object for each name."""
    step = size.multiple_of
    if size.name not in roots:
        largest = max(size.max // step, least)
        root = torch.export.Dim(root_name(size), min=size.min // step, max=largest)
        roots[size.name] = step * root if step > 1 else root
    return roots[size.name]


class _Enough(Exception):
    """Ends a trace after the model's forward: a program is not needed."""


@dataclass
class _Told:
    """What torch knows after a forward.

    Args:
        symbols: its symbols of the inputs' sizes.
        spans: their ranges.
        guards: the texts of its guards.
    """

    symbols: dict[str, Symbol] = field(default_factory=dict)
    spans: dict[str, ValueRanges[Any]] = field(default_factory=dict)
    guards: list[str] = field(default_factory=list)


class _Heard(torch.nn.Module):
    """Calls a module, tells what torch knows then, and ends."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[Input],
        told: _Told,
    ) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs
        self.told = told

    def forward(self, *args: torch.Tensor) -> None:
        nodes: dict[str, Any] = {}
        for arg, declared in zip(args, self.inputs, strict=True):
            for size, dim in zip(arg.shape, declared.shape, strict=True):
                if isinstance(size, torch.SymInt) and not isinstance(dim, int):
                    self.told.symbols[str(size.node._expr)] = Symbol(dim)
                    nodes[str(size.node._expr)] = size.node
        self.module(*args)
        for name, node in nodes.items():
            known = node.shape_env
            self.told.spans[name] = known.var_to_range.get(node._expr, ValueRanges.unknown_int())
            self.told.guards = [text for g in known.guards for text in guard_parts(g.expr)]
        raise _Enough


def choices_at(task: Task, sizes: Mapping[str, int]) -> list[Choice] | None:
    """The choices of the model and of torch's ops at these sizes.

    None if torch can't trace the model there, if the model makes a number of a size that has many
    values there, or if a condition can't be evaluated.
    """
    eager, module = task.eager, task.module
    told = _Told()
    heard = _Heard(module, eager.inputs, told)
    auto = torch.export.Dim.AUTO
    shapes: Any = (
        tuple(
            {axis: auto for axis, size in enumerate(i.shape) if _dynamic(size)}
            for i in eager.inputs
        ),
    )
    sources = declared_sizes(eager.inputs, heard)
    try:
        with (
            task.watch("torch.export"),
            _tracing(task, sources) as asked,
            contextlib.suppress(_Enough),
        ):
            torch.export.export(heard, eager.args(sizes), dynamic_shapes=shapes, strict=False)
    except Exception:  # of torch, of the model without values, or of `selecting`
        return None
    symbols, rules = told.symbols, task.spec.rules
    dims = list(dims_of(eager.inputs).values())
    found = range_choices(told.spans, symbols, dims, rules)
    every = [one if one.number is None else one._replace(place=None) for one in asked]
    for one in dict.fromkeys(every):
        if one.number is None:
            more, unknown = choices([one], symbols, dims, rules)
            if unknown:
                return None
            found += more
        else:
            values = number_choices(one, found, symbols, dims, rules)
            if values is None:
                return None
            found += values
    said = {one.held for one in asked}
    others = [Asked(text, text) for text in dict.fromkeys(told.guards) if text not in said]
    of_ops, unknown = choices(others[:_GUARDS], symbols, dims, rules)
    return None if unknown else found + of_ops + small_choices(symbols, dims, rules)
