"""The protocol of runners, which compute a model's outputs in torch, ONNX Runtime or an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pipeline.spec.tensors import Feed, Precision


class Runner(Protocol):
    """Computes outputs from inputs.

    A context manager makes a runner that keeps a resource between runs (an engine, a GPU's memory).
    Other runners load their resources at the start of `run`, and free them at its end.
    """

    @property
    def name(self) -> str:
        """The name of its runs in messages and in the manifest."""

    @property
    def precision(self) -> Precision:
        """The precision of its computation."""

    def run(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """Yields the outputs of each feed by name, and computes them on demand.

        Later runs do not change outputs that were yielded.

        Args:
            feeds: The inputs, arrays by name.
        """


def run_once(runner: Runner, feed: Feed) -> Feed:
    """A runner's outputs for one feed."""
    (outputs,) = runner.run([feed])
    return outputs
