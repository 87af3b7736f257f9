"""Plans half precision everywhere, but for the islands that a recipe keeps in float32.

Some nodes have no choice and stay float32 in every recipe: nodes of custom ops, nodes with bodies
(If, Loop, Scan), recurrent layers, ops without this type in ONNX, nodes that only make constants,
nodes with a constant that half precision cannot hold at all, and what divides by a value that such
a constant keeps from 0 (`pipeline.rewrite.half_extremes`). `pipeline.rewrite.half_rules` has
the rules for half precision without a recipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import onnx

from pipeline.errors import InputError
from pipeline.graph.files import inner_nodes
from pipeline.graph.origin import TOP, model_line_of, module_of, source_of
from pipeline.rewrite.half_extremes import Extremes
from pipeline.rewrite.half_rules import (
    CONVERTS,
    STANDARD,
    Constants,
    HalfPlan,
    Node,
    leading_to,
    view,
)
from pipeline.spec.precision import HALVES, NarrowType
from pipeline.spec.recipe import EVERYTHING, HalfInfo, Island, Recipe, counted, matches

# also for bfloat16: before opset 22, ONNX's Conv has no bfloat16, and TensorRT's has
_HALF = "tensor(float16)"
_BELOW = ".*"  # after a module's name: its submodules
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_WHOLE = frozenset(
    getattr(onnx.TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)
)


@dataclass(frozen=True)
class Address:
    """The names of a node in a recipe.

    Args:
        group: The module of the node. In the whole model's own code, the line ``model.py:12``.
            Without either, the name of the node.
        part: The group with the op: ``model.encoder.norm/Pow``.
        names: All names that a pattern can match.
    """

    group: str
    part: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Choices:
    """The nodes of a graph that may compute in half precision.

    Args:
        addresses: The address of each such node, by its index in the graph.
        slots: The indices of the inputs that such a node reads in half, by its index.
        sources: ``module ... at file:line`` by index.
        rounded: The indices of such nodes whose values are rounded to whole numbers later. There, a
            kernel's own rounding may change a value by 1.
    """

    addresses: Mapping[int, Address]
    slots: Mapping[int, tuple[int, ...]]
    sources: Mapping[int, str]
    rounded: frozenset[int] = frozenset()

    def wide(self, recipe: Recipe) -> dict[int, str]:
        """The nodes that stay float32, with the pattern that decides: empty if none does."""
        found: dict[int, str] = {}
        for place, address in self.addresses.items():
            pattern, precision = recipe.decide(address.names) or ("", "")
            if precision != recipe.precision:
                found[place] = pattern
        return found

    def islands(self, recipe: Recipe) -> list[Island]:
        """The islands in float32, in the order of the graph."""
        places: dict[str, list[int]] = {}
        for place, pattern in self.wide(recipe).items():
            places.setdefault(pattern, []).append(place)
        return [
            Island(pattern or "no line", len(found), self.sources[found[0]])
            for pattern, found in places.items()
        ]

    def info(self, recipe: Recipe) -> HalfInfo:
        """What a recipe does; see `plan` for the errors."""
        half = len(self.plan(recipe).half)
        return HalfInfo(half, tuple(self.islands(recipe)))

    def plan(self, recipe: Recipe) -> HalfPlan:
        """The nodes that compute in half precision under a recipe.

        Raises:
            InputError: A pattern matches no node.
        """
        for pattern, _ in recipe.lines:
            if pattern != EVERYTHING and not self._matching(pattern):
                raise InputError(
                    f"recipe: {pattern!r} is not the name of a node that could be in half "
                    f"precision, or of such a node's module or line. {self._near(pattern)}"
                )
        half = frozenset(self.addresses.keys() - self.wide(recipe).keys())
        return HalfPlan(half, {place: self.slots[place] for place in half})

    def left_out(self, recipe: Recipe) -> dict[str, str]:
        """A note on each float32 line whose module has other nodes that are in half precision.

        They are those of its submodules, or its own if the line is for its submodules.
        """
        wide, notes = self.wide(recipe), {}
        for pattern in recipe.islands:
            module = pattern.removesuffix(_BELOW)
            if EVERYTHING in module:
                continue
            other = f"{module}{_BELOW}" if module == pattern else module
            count = len(self._matching(other) - wide.keys())
            whose = "its submodules" if module == pattern else "the module itself"
            if count:
                nodes = counted(count, "node")
                notes[pattern] = f"{nodes} of {whose} in half precision, which {other} matches"
        return notes

    def _matching(self, pattern: str) -> set[int]:
        return {place for place, each in self.addresses.items() if matches(pattern, each.names)}

    def _near(self, pattern: str) -> str:
        """What to write in place of a pattern that matches nothing."""
        below = self._matching(f"{pattern}{_BELOW}")
        if below:
            nodes = counted(len(below), "node")
            return f"It is a module whose submodules have {nodes}: write {pattern}{_BELOW}"
        known = {name: None for each in self.addresses.values() for name in each.names}
        for name in known:
            end = f".{name}.".find(f".{pattern}.")
            if end > 0:  # without the names of the modules around it
                whole = name[: end - 1 + len(pattern) + 1]
                found = whole if whole in known else f"{whole}{_BELOW}"
                return f"Did you mean {found}?"
        close = difflib.get_close_matches(pattern, known, n=1)
        return f"Did you mean {close[0]}?" if close else "Correct or remove the line"


def choices_of(
    model: onnx.ModelProto,
    dtypes: Mapping[str, int],
    constants: Mapping[str, Callable[[], np.ndarray]],
    precision: str,
) -> Choices:
    """The nodes of a model that may compute in half precision.

    Args:
        model: The model, after `pipeline.rewrite.half_masks`.
        dtypes: The known dtypes of its tensors.
        constants: The float32 initializers and outputs of Constant nodes.
        precision: ``fp16`` or ``bf16``.
    """
    kind = HALVES[precision]
    opset = next((o.version for o in model.opset_import if o.domain in STANDARD), 1)
    values = Constants(constants, kind)
    extremes = Extremes(values, _least(kind), kind.largest)
    addresses, slots, sources = {}, {}, {}
    views = [view(node, dtypes, kind) for node in model.graph.node]
    ends = [_made_whole(node) for node in model.graph.node]
    before = leading_to(ends, views, frozenset(constants))
    for place, (node, seen) in enumerate(zip(model.graph.node, views, strict=True)):
        if not seen.outputs or not seen.inputs or values.follow(seen):
            continue
        if extremes.stays(node, seen):
            continue
        typed = all(name in dtypes for name in (*node.input, *node.output) if name)
        if not typed or seen.op in _RECURRENT or any(True for _ in inner_nodes(node)):
            continue
        if _has_half(node, seen, opset) and _holds(node, seen, values, kind):
            addresses[place], slots[place] = address_of(node), seen.slots
            sources[place] = source_of(node)
    rounded = {
        place
        for place in addresses
        if views[place].op not in CONVERTS and not before.isdisjoint(views[place].outputs)
    }
    return Choices(addresses, slots, sources, frozenset(rounded))


def _made_whole(node: onnx.NodeProto) -> list[str]:
    """The tensors that the node, or one inside its body, makes whole numbers from."""
    if _makes_whole(node):
        return [*node.input]
    inside = [*inner_nodes(node)]
    whole = any(map(_makes_whole, inside))
    return [name for each in (node, *inside) for name in each.input] if whole else []


def _makes_whole(node: onnx.NodeProto) -> bool:
    """True for an op that gives whole numbers, and jumps by 1 where its input hardly changes."""
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i in _WHOLE for a in node.attribute)
    return node.op_type in ("Ceil", "Floor", "Mod", "Round")


def address_of(node: onnx.NodeProto) -> Address:
    """The names of a node in a recipe."""
    name = node.name or next(iter(node.output))
    module, (file, line) = module_of(node), model_line_of(node)
    at = f"{PurePath(file).name}:{line}" if file else ""
    if not module and "/" in name.strip("/"):
        module = name.rpartition("/")[0]  # torch.onnx's older names have the module
    module = module or (TOP if at else "")
    group = at if at and module == TOP else module or name
    part = f"{group}/{node.op_type}" if group != name else name
    more = (f"{each}/{node.op_type}" for each in (module, at) if each)
    names = dict.fromkeys(each for each in (name, group, part, module, at, *more) if each)
    return Address(group, part, tuple(names))


def _has_half(node: onnx.NodeProto, seen: Node, opset: int) -> bool:
    """True if ONNX has the node with all the tensors of `seen` in float16."""
    if seen.op != node.op_type:  # another domain, or an op that stays float32 in this type
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    read = [_formal(schema.inputs, slot).type_str for slot in seen.slots]
    made = [
        _formal(schema.outputs, slot).type_str
        for slot, name in enumerate(node.output)
        if name in seen.outputs
    ]
    # an output with a type of its own gets it from an attribute
    return set(made) <= set(read) and all(_HALF in allowed.get(name, ()) for name in (*read, *made))


def _formal(formals: Sequence[Any], slot: int) -> Any:
    return formals[min(slot, len(formals) - 1)]  # the last one may stand for several


def _holds(node: onnx.NodeProto, seen: Node, values: Constants, kind: NarrowType) -> bool:
    """True if half precision can hold the node's constants. Small ones may lose digits, but a
    divisor of 1e-12 must not become 0."""
    numbers = [abs(a.f) for a in node.attribute if a.type == onnx.AttributeProto.FLOAT]
    if any(number > kind.largest for number in numbers if number != float("inf")):
        return False
    return all(
        not magnitude or _least(kind) < magnitude <= kind.largest
        for name in seen.inputs
        for magnitude in values.magnitudes(name)
    )


def _least(kind: NarrowType) -> float:
    """Half precision makes 0 of this and less."""
    return kind.smallest * kind.eps / 2
