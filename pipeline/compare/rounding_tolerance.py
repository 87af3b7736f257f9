"""Measures the tolerance for an engine in tf32 or half precision, if the spec states none.

model.onnx runs twice: as it is, and with the rounding that the precision cannot avoid
(`pipeline.rewrite.rounding_noise`). The difference of the outputs, times a factor, is the
tolerance. A fault of half.onnx or of the engine is in neither run.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.compare.divergence.locate import choice_behind
from pipeline.compare.runners import Ground
from pipeline.graph.session import run_onnx
from pipeline.rewrite.rounding_noise import write_noisy
from pipeline.spec.findings import Facts, Note
from pipeline.spec.interface import Interface
from pipeline.spec.noise import Noise
from pipeline.spec.noise_parts import MOST, measured
from pipeline.spec.precision import HALVES, ROUNDED
from pipeline.spec.tensors import MOST_DIFFERING, Feed, Precision, Tolerance

_WIDE = 0.25  # an atol above this share of the root mean square is said to be wide
_CHOOSE = "If you can, return the values, and choose in your program"
_MARGIN = 4  # the factor on the share of integers that differ, as in `pipeline.spec.noise`


@dataclass
class NoiseRunner:
    """Runs a model with simulated rounding; see `pipeline.spec.runner.Runner`.

    Args:
        model: The ONNX file before half precision.
        precision: ``tf32``, ``fp16`` or ``bf16``.
    """

    model: Path
    precision: Precision
    products: int = 0  # that round, known after the first run

    @property
    def name(self) -> str:
        return f"simulated {self.precision} rounding"

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the outputs by name for each feed."""
        with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
            path = Path(folder) / self.model.name
            self.products = write_noisy(self.model, path, self.precision)
            yield from run_onnx(path, feeds)


def rounding_tolerances(
    model: Path, interface: Interface, precision: Precision, ground: Ground, plain: Sequence[Feed]
) -> dict[str, Tolerance]:
    """Measures the tolerance of every output of an engine in tf32 or half precision, by its name.

    No tolerance is narrower than the one for fp32, because rounding of fp32 comes on top.

    Args:
        model: The ONNX file before half precision.
        interface: The outputs, with their tolerances for fp32.
        precision: ``tf32``, ``fp16`` or ``bf16``.
        ground: The sizes and the inputs.
        plain: The outputs of `model` for these inputs.

    Raises:
        CompareError: The run with simulated rounding failed.
    """
    runner = NoiseRunner(model, precision)
    noisy = ground.collect(runner)
    own = interface.tolerances()
    if not runner.products:
        return own
    found = {}
    for output in interface.outputs:
        pairs = [(a[output.name], b[output.name]) for a, b in zip(noisy, plain, strict=True)]
        fixed = [n for n, size in enumerate(output.shape or ()) if isinstance(size, int)]
        found[output.name] = _tolerance(pairs, own[output.name], precision, fixed)
    return found


def wide_tolerances(
    model: Path,
    tolerances: Mapping[str, Tolerance],
    own: Mapping[str, Tolerance],
    precision: Precision,
    plain: Sequence[Feed],
) -> list[Note]:
    """Returns a note for each output whose measured tolerance could hide a fault.

    Args:
        model: The ONNX file before half precision.
        tolerances: The measured tolerances, by output.
        own: Those for fp32. One that is wider counts in place of the measured one.
        precision: ``tf32``, ``fp16`` or ``bf16``.
        plain: The outputs of `model` at each size.
    """
    found = []
    for name, tolerance in tolerances.items():
        arrays = [run[name] for run in plain if run[name].dtype.kind == "f" and run[name].size]
        sizes = [Noise.between(a, a, ROUNDED[precision].eps, simulated=True).rms for a in arrays]
        usual = max(sizes, default=math.inf)
        if tolerance.atol > max(_WIDE * usual, own[name].atol) and usual:
            share = tolerance.atol / usual
            node = choice_behind(model, name)
            chosen = f": {node} takes others of nearly equal values. {_CHOOSE}" if node else ""
            facts: Facts = {"output": name, "precision": precision, "atol": tolerance.atol}
            found.append(
                Note("wide-tolerance", {**facts, "share": f"{share:.0%}", "chosen": chosen})
            )
    return found


def _tolerance(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    own: Tolerance,
    precision: Precision,
    fixed: Sequence[int],
) -> Tolerance:
    """The tolerance of an output.

    Args:
        pairs: The output with rounding and without, at each size.
        own: The tolerance for fp32.
        precision: ``tf32``, ``fp16`` or ``bf16``.
        fixed: The axes with a fixed size.
    """
    how = f"simulated {precision} rounding"
    if pairs and pairs[0][1].dtype.kind != "f":
        return _integers(pairs, own, how)
    eps, noise = ROUNDED[precision].eps, None
    pairs = [pair for pair in pairs if pair[1].size and np.isfinite(pair[1]).all()]
    for moved, exact in pairs:
        noise = Noise.between(moved, exact, eps, simulated=True).worst(noise)
    if noise is None or (precision not in HALVES and not noise.moved):
        return own  # without a product before it, an output of a tf32 engine is that of fp32
    samples = [(moved, exact, eps) for moved, exact in pairs if exact.size <= MOST]
    return _at_least(own, measured(noise, samples, "", how, fixed))


def _at_least(own: Tolerance, found: Tolerance) -> Tolerance:
    wide, why = found, found.why
    if found.atol < own.atol:
        wide, why = own, f"the atol for fp32 is wider, so it counts: {own.why}; else: {found.why}"
    return replace(wide, rtol=max(own.rtol, found.rtol), why=why)


def _integers(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], own: Tolerance, how: str
) -> Tolerance:
    """The tolerance of integers or booleans: the share that may differ."""
    count = sum(int((moved != exact).sum()) for moved, exact in pairs)
    size = sum(exact.size for _, exact in pairs)
    if not count:
        return own
    share = float(f"{min(_MARGIN * count / size, MOST_DIFFERING):.2g}")
    if share <= own.differing:
        return own
    return replace(own, differing=share, why=f"measured: {how} changes {count} of {size}")
