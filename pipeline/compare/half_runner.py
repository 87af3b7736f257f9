"""Runs a model in half precision on the CPU, with the rounding of a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.compare.run_names import HALF
from pipeline.graph.session import run_onnx
from pipeline.rewrite.half import write_rounded
from pipeline.spec.recipe import Recipe
from pipeline.spec.tensors import Feed, Precision


@dataclass(frozen=True)
class HalfRunner:
    """Runs a model in half precision on the CPU, with the rounding of a GPU.

    See `pipeline.rewrite.half.rounded`, and `pipeline.spec.runner.Runner`.

    Args:
        model: The ONNX file.
        precision: ``fp16`` or ``bf16``.
        plain: True if the file is not in half precision yet.
        recipe: With `plain`: which nodes compute in half precision; by default, the rules decide.
    """

    model: Path
    precision: Precision
    plain: bool = False
    name: str = HALF
    recipe: Recipe | None = None

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the outputs by name for each feed."""
        with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
            path = Path(folder) / self.model.name
            plain = self.precision if self.plain else None
            write_rounded(self.model, path, plain, self.recipe)
            yield from run_onnx(path, feeds)
