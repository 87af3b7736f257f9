"""Runs an ONNX file at many sizes, to find the sizes at which it runs and its output sizes.

ONNX Runtime runs the file without graph optimisations. Runs that need too much memory or time are
skipped. All runs together need at most about a minute.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import InputError, PipelineError
from pipeline.graph.memory import Estimator
from pipeline.graph.session import LateRun, open_session
from pipeline.spec.dims import Dim, kept_rules, shape_at, sizes_text
from pipeline.spec.model import ModelSpec

Sizes = Mapping[str, int]
Shapes = tuple[tuple[int, ...], ...]

_SMALL = 8  # times the elements of the first run; such a run is always affordable
_MEMORY = 1 << 30  # bytes of one run, without the weights
_SLOWEST = 10.0  # seconds of one run, estimated from its elements
_NODE = re.compile(r"while running (\S+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)


@dataclass(frozen=True)
class Failure:
    """A run that failed.

    Args:
        sizes: The sizes of the dims.
        node: The node that failed (``Reshape 'n1'``), or ``the run``.
        words: ONNX Runtime's message.
    """

    sizes: Sizes
    node: str
    words: str

    @property
    def reason(self) -> str:
        return f"{self.node}: {self.words}"

    def __str__(self) -> str:
        at = sizes_text(self.sizes)
        return f"fails at {at or 'its only sizes'}: {self.reason}"


class OnnxProbe:
    """Runs one ONNX file, once at each set of sizes. It is a `pipeline.probe.runs.Runner`.

    Args:
        path: The file.
        spec: The spec of the file, for its inputs, its rules, and the file's name in messages.
        seed: The seed of the inputs' values.
        budget: Seconds of CPU time after which `over` is True, so that optional runs stop.

    Raises:
        InputError: ONNX Runtime does not load the file. Each method that runs it raises `LateRun`
            for a run that takes longer than the time limit of `open_session`.
    """

    def __init__(self, path: Path, spec: ModelSpec, seed: int, budget: float) -> None:
        self.inputs, self.rules, self.seed = spec.inputs, spec.rules, seed
        self._source = spec.onnx or path
        self.outputs, self._session = _load(path, self._source)
        self._path = path
        data = path.with_name(f"{path.name}.data")
        self._weights = path.stat().st_size + (data.stat().st_size if data.is_file() else 0)
        self._estimator: Estimator | None = None
        self._seen: dict[Shapes, Shapes | Failure] = {}  # by the shapes of the inputs
        self._sizes: dict[tuple[tuple[str, int], ...], Shapes] = {}
        self._first: tuple[int, float] | None = None  # elements and seconds of the first run
        self._ends = time.process_time() + budget
        self.seconds = 0.0

    @property
    def over(self) -> bool:
        """True if the time is up."""
        return time.process_time() > self._ends

    def narrow(self, spec: ModelSpec) -> None:
        """Replaces the inputs and rules by those of a spec with narrower dims."""
        self.inputs, self.rules = spec.inputs, spec.rules

    def at(self, sizes: Sizes) -> Shapes | Failure | None:
        """The outputs' shapes, or the failure; None if the run is too large or breaks a rule."""
        if not kept_rules(self.rules, sizes):
            return None
        key = tuple(shape_at(i.shape, sizes) for i in self.inputs)
        if key not in self._seen:
            if not self._affordable(sizes):
                return None
            start = self.clock()
            self.with_values([i.sample(sizes, self.seed) for i in self.inputs])
            if self._first is None:
                self._first = max(self._elements(sizes), 1), self.clock() - start
        found = self._seen[key]
        if isinstance(found, Failure):
            return replace(found, sizes=dict(sizes))
        self._sizes[tuple(sorted(sizes.items()))] = found
        return found

    def fails(self, sizes: Sizes) -> Failure | None:
        found = self.at(sizes)
        return found if isinstance(found, Failure) else None

    def points(self) -> list[tuple[dict[str, int], Shapes]]:
        """The sizes at which `at` has run so far, each with the outputs' shapes."""
        return [(dict(sizes), shapes) for sizes, shapes in self._sizes.items()]

    def with_values(self, values: Sequence[np.ndarray]) -> Shapes | Failure:
        """The outputs' shapes with these inputs, or the failure."""
        key = tuple(value.shape for value in values)
        self._seen[key] = found = self._run(values)
        return found

    def run(self, sizes: Sizes) -> None:
        """Runs the file with values.

        Raises:
            RuntimeError: ONNX Runtime refuses the sizes; the text names the node.
        """
        found = self.with_values([i.sample(sizes, self.seed) for i in self.inputs])
        if isinstance(found, Failure):
            raise RuntimeError(found.reason)

    def clock(self) -> float:
        return time.process_time()  # with ONNX Runtime's threads, whatever else the machine does

    def shapes(self, sizes: Sizes) -> None:
        """None: ONNX Runtime needs values."""

    def line(self, error: Exception) -> str:
        """An empty text: an ONNX file has no lines."""
        del error
        return ""

    def fresh(self, sizes: Sizes, seed: int, scale: float = 1.0) -> Shapes | Failure:
        """A run with values of another seed; floating-point inputs are multiplied by `scale`."""
        values = [i.sample(sizes, seed) for i in self.inputs]
        return self._run(
            [(v * scale).astype(v.dtype) if v.dtype.kind == "f" else v for v in values]
        )

    def _run(self, values: Sequence[np.ndarray]) -> Shapes | Failure:
        feed = {i.name: value for i, value in zip(self.inputs, values, strict=True)}
        start = time.perf_counter()
        try:
            results = self._session.run(None, feed)
        except LateRun as error:  # no further run begins
            raise LateRun(f"{self._source}: {error}") from error
        except Exception as error:  # ONNX Runtime's errors have no common base
            return _failure(error)
        finally:
            self.seconds += time.perf_counter() - start
        return tuple(tuple(np.shape(result)) for result in results)

    def _elements(self, sizes: Sizes) -> int:
        return sum(math.prod(shape_at(i.shape, sizes)) for i in self.inputs)

    def _affordable(self, sizes: Sizes) -> bool:
        if self._first is None:
            return True
        elements, seconds = self._first
        ratio = self._elements(sizes) / elements
        if ratio * seconds > _SLOWEST and ratio > 2:
            return False
        if ratio <= _SMALL:
            return True
        self._estimator = self._estimator or Estimator(self._path)
        shapes = {i.name: shape_at(i.shape, sizes) for i in self.inputs}
        try:
            estimate = self._estimator.at(shapes)
        except PipelineError:  # no estimate: inputs up to 4 MiB are safe
            return self._elements(sizes) < 1 << 20
        if estimate.unknown > 0 and self._elements(sizes) > 1 << 22:
            return False
        return estimate.peak_bytes - self._weights <= _MEMORY


def newest_ir(path: Path) -> int | None:
    """The newest IR version that ONNX Runtime reads, if the file's version is newer; else None.

    onnx 1.23 writes version 14 by default, and ONNX Runtime 1.31 reads up to 13.
    """
    try:
        _load(path, path)
    except InputError as error:
        match = re.search(r"Unsupported model IR version.* max supported .*: (\d+)", error.detail)
        return int(match[1]) if match else None
    return None


def _load(path: Path, source: Path) -> tuple[list[str], Any]:
    try:
        session = open_session(path)
    except Exception as error:  # ONNX Runtime's errors have no common base
        words = _first_line(re.sub(r"/\S+\.(?:cc|h):\d+ .*\) ", "", str(error)))
        raise InputError(
            f"{source}: ONNX Runtime can't load the file: {words}", detail=str(error)
        ) from error
    return [output.name for output in session.get_outputs()], session


def _failure(error: Exception) -> Failure:
    text = str(error).strip()
    match = _NODE.search(text)
    if match is None:
        return Failure({}, "the run", _first_line(text))
    node = f"{match[1]} {match[2]!r}" if match[2] else match[1]
    words = re.sub(r"^\S+\.(?:h|cc|cpp):\d+ (?:.*? was false\. |\S+ )", "", match[3].strip())
    return Failure({}, node, _first_line(words))


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0] if lines else "no reason")
    return line if len(line) <= 300 else f"{line[:300]}..."


def steps(dim: Dim, most: int) -> list[int]:
    """The first `most` legal sizes of a dim."""
    return list(range(dim.min, dim.max + 1, dim.multiple_of))[:most]
