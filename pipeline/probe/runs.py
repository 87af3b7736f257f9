"""Finds whether a model runs at given sizes, with values or as shapes only, in bounded time.

The runners are in `pipeline.probe.torch_runner` and `pipeline.probe.onnx_runner`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.errors import CODE_FAULTS, InputError, first_line
from pipeline.graph.session import LateRun
from pipeline.probe.sample_sizes import dims_of, elements
from pipeline.spec.dims import Dim, kept_rules, shape_at
from pipeline.spec.rules import Refusal
from pipeline.spec.tensors import Input

_FIRST = 1 << 19  # most input elements of a first run with values
_CHECKED = 3  # kinds of refusals that are compared with a run as shapes only
_LONG = 1 / 80  # part of the time limit; longer runs use shapes only
_LONG_BRIEF = 1 / 200  # the same in a brief search
_SHORT = 0.005  # seconds of a run
_NO_MEMORY = re.compile("bad_alloc|allocate memory|out of memory|BFCArena", re.IGNORECASE)
_LONGEST = 160  # characters of a model's error


class SizeProbe(Protocol):
    """Runs a model at sizes."""

    def run(self, sizes: Mapping[str, int]) -> None:
        """Runs the model with values. If the model fails, raises the model's error."""

    def shapes(self, sizes: Mapping[str, int]) -> bool | Refusal | None:
        """True if the model runs with shapes only, or its refusal; None if that is unknown."""

    def clock(self) -> float:
        """Seconds on the clock that counts for the time limit."""

    def line(self, error: Exception) -> str:
        """The line of the model that raised an error; an empty text if it is unknown."""


def legal_range(dim: Dim) -> range:
    """The legal sizes of a dim."""
    return range(dim.min, dim.max + 1, dim.multiple_of)


class SizeRuns:
    """Runs a model at each set of sizes once, until time runs out.

    If a run with values would take too long, the model runs with shapes only. Shapes are used only
    if they gave the same result as values wherever both were tried. The time of a run is assumed to
    grow with the square of the number of input elements.

    Args:
        inputs: The model's inputs, in order.
        runner: Runs the model.
        rules: The rules on sizes; sizes that break one are not tried.
        seconds: The time limit; after it, nothing more is tried.

    Attributes:
        brief: Whether only short runs have values. False at first.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        runner: SizeProbe,
        rules: Sequence[str],
        seconds: float,
    ) -> None:
        self.inputs, self.dims, self.rules = inputs, dims_of(inputs), rules
        self.results: dict[tuple[int, ...], bool] = {}
        self.refused: dict[tuple[int, ...], Refusal] = {}
        self.brief = False
        self.with_values = 0
        self.out_of_time = False
        self._runner, self._seconds = runner, seconds
        self._began, self._begin = time.perf_counter(), runner.clock()
        self._until = self._begin + seconds
        self._costs: list[tuple[int, float]] = []
        self._shapes_agree = True  # shapes without values agreed with values so far
        self._shapes_checked = False
        self._checked: set[str] = set()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def ended(self) -> bool:
        """True if the time of the current share is used up."""
        return self._runner.clock() > self._until

    @property
    def quick(self) -> bool:
        """True if a run is so short that many of them cost little."""
        return bool(self._costs) and min(s for _, s in self._costs) < _SHORT

    def share(self, part: float) -> None:
        """Lets the next runs use this part of the remaining time."""
        now, end = self._runner.clock(), self._begin + self._seconds
        self._until = now + max(end - now, 0.0) * part

    def key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[name] for name in self.dims)

    def legal(self, sizes: Mapping[str, int]) -> bool:
        """True if the sizes are legal for the dims and keep the rules."""
        if any(sizes[n] not in legal_range(dim) for n, dim in self.dims.items()):
            return False
        try:
            shapes = [shape_at(i.shape, sizes) for i in self.inputs]
        except InputError:  # an expression is not a whole number at these sizes
            return False
        return kept_rules(self.rules, sizes) and all(n >= 0 for s in shapes for n in s)

    def takes(self, sizes: Mapping[str, int]) -> bool | None:
        """True if the model runs at these sizes; None if that is unknown, or time ran out."""
        key = self.key(sizes)
        if not self.legal(sizes):
            return None
        if key in self.results:
            return self.results[key]
        if self.ended:
            self.out_of_time = True
            return None
        result = self._with_values(sizes) if self.affordable(sizes) else self._by_shapes(sizes)
        if result is not None:
            self.results[key] = result
        return result

    def affordable(self, sizes: Mapping[str, int]) -> bool:
        """True if a run with values is short enough."""
        count = elements(self.inputs, sizes)
        if not self._costs:
            return count <= _FIRST
        likely = min(s * max(1.0, count / n) ** 2 for n, s in self._costs)
        if self.brief:
            return likely <= self._seconds * _LONG_BRIEF
        return count <= self._costs[0][0] or likely <= max(self._seconds * _LONG, 0.05)

    def _with_values(self, sizes: Mapping[str, int]) -> bool | None:
        begin = self._runner.clock()
        try:
            self._runner.run(sizes)
        except LateRun:
            raise
        except MemoryError:
            return None
        except Exception as error:
            if _NO_MEMORY.search(str(error)):
                return None
            self.refused[self.key(sizes)] = refusal(sizes, error, self._runner.line(error))
            # shapes find only some refusals; they never find an index outside of a table
            kind = re.sub(r"\d+", "", self.refused[self.key(sizes)].error)
            if self._shapes_agree and kind not in self._checked and len(self._checked) < _CHECKED:
                self._checked.add(kind)
                self._shapes_agree = self._runner.shapes(sizes) is not True
            self.with_values += 1
            return False
        self.with_values += 1
        self._costs.append((max(elements(self.inputs, sizes), 1), self._runner.clock() - begin))
        if not self._shapes_checked:
            self._shapes_checked = True
            self._shapes_agree = self._shapes_agree and self._runner.shapes(sizes) is True
        return True

    def _by_shapes(self, sizes: Mapping[str, int]) -> bool | None:
        if not self._shapes_agree:
            return None
        result = self._runner.shapes(sizes)
        if isinstance(result, Refusal):
            self.refused[self.key(sizes)] = result
        return None if result is None else result is True


def refusal(sizes: Mapping[str, int], error: Exception, line: str) -> Refusal:
    """Makes a refusal from the sizes, the first line of the error, and the model's line."""
    first = first_line(error)
    first = first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
    fault = type(error).__name__ if isinstance(error, CODE_FAULTS) else ""
    return Refusal(dict(sizes), first, line, fault)
