"""Operators and small patterns of them at random sizes: the converted model against torch."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forks import forked

from pipeline.errors import PipelineError
from pipeline.graph.session import open_session
from pipeline.spec.dims import kept_rules
from pipeline.spec.model import ModelSpec, Output, Tolerance

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "patterns"))
from pattern_modules import PATTERNS, Pattern

LIMIT = 300.0
TOLERANCE = Tolerance(1e-4, 1e-4, "float32 rounding in small modules; faults are above 1e-2")
ZOO = PATTERNS


def compared(pattern: Pattern, folder: Path, sets: int, seed: int) -> tuple[str, int]:
    """Converts a pattern and compares it at random legal sizes.

    Returns:
        ``refused: ...``, ``right`` or ``wrong: ...``; and the number of sets of sizes.
    """
    from pipeline.convert.driver import run
    from pipeline.spec.config import Config

    spec = ModelSpec(
        name="operator",
        build=lambda _: pattern.module(),
        inputs=pattern.inputs,
        outputs=tuple(Output(f"y{n}") for n in range(pattern.outputs)),
        tolerance=TOLERANCE,
        refine_dims=True,
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            report = run(Config(spec, out=folder / "artifact"))
    except PipelineError as error:
        return f"refused: {error}", 0
    interface = report.manifest.interface
    session = open_session(folder / "artifact" / "model.onnx", one_thread=True)
    module = pattern.module()
    random = np.random.default_rng(seed)
    count = 0
    for turn in range(20 * sets):
        if count == sets:
            break
        sizes = {
            name: int(random.choice(range(d.min, d.max + 1, d.multiple_of)))
            for name, d in interface.dims.items()
        }
        if not kept_rules(interface.rules, sizes):
            continue
        count += 1
        feed = interface.sample(sizes, turn)
        with torch.no_grad():
            found = module(*(torch.from_numpy(array.copy()) for array in feed.values()))
        wants = found if isinstance(found, (tuple, list)) else (found,)
        for got, want in zip(session.run(None, dict(feed)), wants, strict=True):
            if not _same(got, want.numpy()):
                return f"wrong: at {sizes}, inputs of seed {turn}", count
    return "right", count


def _same(got: np.ndarray, want: np.ndarray) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if got.dtype.kind != "f":
        return bool((got == want).all())
    return np.allclose(got, want, TOLERANCE.rtol, TOLERANCE.atol, equal_nan=True)


def verdict(pattern: Pattern, sets: int, seed: int) -> dict[str, Any]:
    """The result for one pattern, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        done = forked(compared, pattern, Path(name), sets, seed, limit=LIMIT)
    text, count = done.result or ("", 0)
    return {
        "what": pattern.name,
        "verdict": "failed" if done.failure else text.partition(":")[0],
        "text": done.failure or text,
        "sets": count,
        "seconds": round(done.seconds, 1),
        "again": f"seed {seed}, {sets} sets",
    }
