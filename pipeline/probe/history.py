"""Finds models that remember earlier calls.

An engine gives the same outputs for the same inputs. A module may not: it may count its calls, keep
its first size, or grow a table. So the module is called at a few sizes, with different values, and
in different orders. What it changes in itself is compared (see `pipeline.probe.state`).

A module that changes nothing and gives the same outputs again remembers nothing. A module that
changes something passes if it is a cache: no order of two calls changes an output, and a repeated
call changes nothing.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import ExportError, first_line
from pipeline.probe.code_files import is_model_file
from pipeline.probe.eager import example_args, flat_tensors, quiet
from pipeline.probe.held_values import StateChange, content_at
from pipeline.probe.sample_sizes import dims_of, elements, examples
from pipeline.probe.state import ModuleState
from pipeline.spec.dims import Dim, kept_rules, sizes_text
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.tensors import Input

if TYPE_CHECKING:
    import torch

_ELEMENTS = 1 << 18  # input elements of all first calls, if smaller sizes run too
_SIZES = 5
_ORDERED = 4  # calls that are made in every order, if the module changes itself
_CLOSE = 1e-5  # of an output's largest value; a repeated call may add in another order
_SHOWN = 3  # attributes in an error


@dataclass(frozen=True)
class _Call:
    """A call of the module: the dims' sizes, and the seed of the inputs' values."""

    sizes: Mapping[str, int]
    seed: int

    def __str__(self) -> str:
        return f"at {sizes_text(self.sizes)}" if self.sizes else "with random values"


@dataclass(frozen=True)
class _First:
    """A call of a module that was not called before.

    Args:
        call: The call.
        outputs: Its outputs.
        changes: What it changed in the module, by path.
        contents: The content of each change.
    """

    call: _Call
    outputs: Sequence[torch.Tensor]
    changes: Mapping[str, StateChange]
    contents: Mapping[str, Any]


class _Module:
    """Calls a module and puts it back."""

    def __init__(
        self, inputs: Sequence[Input], module: torch.nn.Module, inner: torch.nn.Module
    ) -> None:
        self._inputs, self._module, self._inner = inputs, module, inner
        self.state = ModuleState(inner)

    def __call__(self, call: _Call, random: int = 0) -> list[torch.Tensor]:
        """The outputs of a call, with this seed for random numbers inside the model."""
        import torch

        with torch.no_grad(), quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(random)
            result = self._module(*example_args(self._inputs, call.seed, call.sizes))
        return [t.clone() for t in flat_tensors(result) if isinstance(t, torch.Tensor)]

    def first(self, call: _Call) -> _First | None:
        """Makes a first call; None if the module does not run at these sizes."""
        with self.state.restored():
            try:
                outputs = self(call)
            except Exception:
                return None
            changes = self.state.changes()
            contents = {path: content_at(path, c.value) for path, c in changes.items()}
            return _First(call, outputs, changes, contents)

    def changed_weights(self, call: _Call) -> dict[str, StateChange]:
        """The parameters that a call changes around their version counter."""
        with ModuleState(self._inner, weights=True).restored() as state:
            self(call)
            return state.changes()

    def line(self, change: StateChange, *calls: _Call) -> str:
        """The line that makes a change in these calls, for an error."""
        with self.state.restored():
            line = _line_of_change(change, lambda: [self(call) for call in calls])
        return f" ({line})" if line else ""


def kept_values(
    spec: ModelSpec,
    module: torch.nn.Module,
    inner: torch.nn.Module,
    seed: int,
    also: Sequence[Mapping[str, int]] = (),
) -> list[str]:
    """Raises an error for a module that remembers earlier calls.

    Args:
        spec: The spec. `ModelSpec.state` names attributes that may change.
        module: The module to call, with one tensor for each input.
        inner: The module that the spec builds, whose attributes are watched.
        seed: The seed of the inputs' values.
        also: More sets of sizes at which to call the module.

    Returns:
        One note, if the module keeps something that changes no output.

    Raises:
        ExportError: An output depends on earlier calls, or every call changes the module, or the
            module is random. The message names the attribute, and the line that writes it.
    """
    runs = _Module(inner_inputs(spec), module, inner)
    firsts = _firsts(runs, spec, seed, also)
    if not firsts:
        return []  # torch.export reports why the module does not run
    if moved := runs.state.moved():
        raise ExportError(
            f"model {spec.name}: a call moves {moved[0]}, an iterator or a generator, so a later "
            "call may give another output. An engine remembers nothing. Compute the value from "
            "the inputs, or make it an input and an output"
        )
    changed = {path: change for one in firsts for path, change in one.changes.items()}
    asked = [path for path in changed if not _is_named(path, spec.state)]
    if changed and not asked:
        return [f"converted as a first call: calls of the model write {', '.join(spec.state)}"]
    few = _few(firsts)
    # without a change, nothing is restored: one row of calls has both orders and a repeated call
    rows = [*itertools.permutations(few, 2), firsts[:1] * 2]
    for row in rows if changed else [[*firsts[1:2], firsts[0], *firsts]]:
        with runs.state.restored():
            differing = _first_that_differs(runs, row)
        if differing is not None:
            raise ExportError(_remembers(spec, runs, *differing, asked))
    for one in few if changed else ():
        with runs.state.restored():
            if how := _apart(runs, one) or _apart(runs, one):
                raise ExportError(_remembers(spec, runs, one, one, how, asked))
            again = {path: c for path, c in runs.state.changes().items() if path in asked}
            other = [p for p, c in again.items() if content_at(p, c.value) != one.contents.get(p)]
        if other:
            where = runs.line(changed[other[0]], one.call)
            raise ExportError(
                f"model {spec.name}: every call changes {other[0]}{where}, so a later call may "
                f"give another output. {advice(other)}"
            )
    with runs.state.restored():
        same = _close(runs(firsts[0].call, random=1), firsts[0].outputs)
    if not same:
        raise ExportError(
            f"model {spec.name}: a second call with the same inputs gives other outputs, because "
            "the model draws random numbers. Pass them as an input"
        )
    more = f" and {len(asked) - _SHOWN} more" if len(asked) > _SHOWN else ""
    found = f"{', '.join(asked[:_SHOWN])}{more}"
    kept = f"the model keeps {found} between calls. Calls in other orders gave the same outputs"
    if asked:
        return [kept]
    written = [path for path in runs.state.rewritten() if not _is_named(path, spec.state)]
    return [_rewrites(written)] if written and not changed else []


def _rewrites(paths: Sequence[str]) -> str:
    """The note for a model that writes to tensors, and changed none of them."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (
        f"calls of the model write {', '.join(paths[:_SHOWN])}{more}, and no call that was tried "
        "changed a value there. An engine keeps these values, whatever its inputs are"
    )


def _first_that_differs(runs: _Module, row: Sequence[_First]) -> tuple[_First, _First, str] | None:
    """Makes calls one after the other, and returns the first that is unlike a first call.

    The caller restores the module.

    Returns:
        The call's predecessor, the call, and how it differs; None if no call does.
    """
    runs(row[0].call)
    for before, one in itertools.pairwise(row):
        if how := _apart(runs, one):
            return before, one, how
    return None


def _apart(runs: _Module, one: _First) -> str:
    """Repeats a first call. How it differs, as text; empty if it gives the same outputs."""
    try:
        same = _close(runs(one.call), one.outputs)
    except Exception as error:
        return f"fails ({first_line(error)})"
    return "" if same else "gives other outputs"


def _line_of_change(change: StateChange, call: Callable[[], object]) -> str:
    """Calls the module again to find the line that makes a change.

    Args:
        change: The change. The state must have been restored since.
        call: Calls the module. It runs with a trace function, so it is slow.

    Returns:
        The line as ``file:line in function: code``; an empty text if it was not found.
    """
    last: tuple[str, int, str] | None = None
    found = ""

    def look(frame: types.FrameType, *_: object) -> Any:
        nonlocal last, found
        file = frame.f_code.co_filename
        if found or not is_model_file(file):
            return None
        if last is not None and not change.is_back:
            found = f"{last[0]}:{last[1]} in {last[2]}: {linecache.getline(*last[:2]).strip()}"
            return None
        last = file, frame.f_lineno, frame.f_code.co_name
        return look

    old = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(old)
    return found


def _few(firsts: Sequence[_First]) -> list[_First]:
    """The calls to make in every order: of those that change the module, and of all, the ends."""
    *sizes, other_values = firsts if len(firsts) > 1 else [*firsts, *firsts]
    writing = [one for one in sizes if one.changes]
    ends = [*writing[:1], *writing[-1:], sizes[0], other_values, *sizes]
    return list({id(one): one for one in ends}.values())[:_ORDERED]


def _firsts(
    runs: _Module, spec: ModelSpec, seed: int, also: Sequence[Mapping[str, int]]
) -> list[_First]:
    """First calls at `also` and a few other sizes, small ones first, and one with other values."""
    inputs = inner_inputs(spec)
    dims = dims_of(inputs)
    every: list[dict[str, int]] = []
    parts = (0.0, 0.75, 1.0)  # a scale may follow the largest size
    ends = [{name: _part_way(dim, part) for name, dim in dims.items()} for part in parts]
    for sizes in [*(s for s in ends if kept_rules(spec.rules, s)), *examples(inputs, spec.rules)]:
        every += [sizes] if sizes not in every else []
    firsts = (runs.first(_Call(sizes, seed)) for sizes in also)
    found = [one for one in firsts if one is not None]
    every = [sizes for sizes in every if sizes not in also] or every
    most, total = _SIZES + len(found), 0
    smallest = min(every, key=lambda sizes: elements(inputs, sizes))
    for sizes in [smallest, *(sizes for sizes in every if sizes != smallest)]:
        count = elements(inputs, sizes)
        if len(found) < most and (not total or total + count <= _ELEMENTS):
            one = runs.first(_Call(sizes, seed))
            found += [] if one is None else [one]
            total += 0 if one is None else count
    found.sort(key=lambda one: elements(inputs, one.call.sizes))
    more = runs.first(_Call(found[0].call.sizes, seed + 1)) if found else None
    return [*found, *([more] if more is not None else [])]


def _part_way(dim: Dim, part: float) -> int:
    """The legal size at this part of a dim's range."""
    legal = range(dim.min, dim.max + 1, dim.multiple_of)
    return legal[int(part * (len(legal) - 1))]


def _remembers(
    spec: ModelSpec, runs: _Module, before: _First, one: _First, how: str, asked: Sequence[str]
) -> str:
    """The error for a call that depends on an earlier one."""
    again = "again " if before is one else ""
    text = f"model {spec.name}: it remembers earlier calls. A call {one.call} {how} "
    text += f"after a call {again}{before.call}"
    changes = before.changes if asked else runs.changed_weights(before.call)
    own = [path for path in changes if path in asked or not asked]
    if not own:
        return (
            f"{text}. No attribute of the model changed: it keeps a value elsewhere, or draws "
            "random numbers from its own generator. An engine does neither"
        )
    lines = [f"{path}{runs.line(changes[path], before.call)}" for path in own[:_SHOWN]]
    return f"{text}, which changes {', '.join(lines)}. {advice(own)}"


def advice(paths: Sequence[str]) -> str:
    """What to do about a module that keeps these attributes between calls."""
    options = " ".join(f"--state {path}" for path in paths)
    return (
        "An engine remembers nothing. Compute the value from the inputs, or make it an input and "
        f"an output. To convert the first call as it is, pass {options}"
    )


def _is_named(path: str, state: Sequence[str]) -> bool:
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in state)


def _close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(_close_tensors, got, want))


def _close_tensors(got: torch.Tensor, want: torch.Tensor) -> bool:
    import torch

    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if torch.equal(got, want):
        return True
    if not (got.is_floating_point() or got.is_complex()):
        return False
    finite = want[torch.isfinite(want.abs())].abs()
    atol = _CLOSE * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(got, want, rtol=0.0, atol=atol, equal_nan=True)
