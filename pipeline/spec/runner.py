"""What computes a model's outputs: torch, ONNX Runtime, or an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pipeline.spec.tensors import Feed, Precision


class Runner(Protocol):
    """Computes outputs from inputs.

    A runner that holds a resource for as long as it lives (an engine, a GPU's memory) is made by a
    context manager; the others take theirs when `run` begins, and free it when `run` ends.
    """

    @property
    def name(self) -> str:
        """What messages and the manifest call its run."""

    @property
    def precision(self) -> Precision:
        """The precision that it computes in."""

    def run(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """The outputs by name, one set a feed, each computed when it is asked for.

        Outputs stay as they are when the runner goes on.

        Args:
            feeds: the inputs, arrays by name.
        """


def run_once(runner: Runner, feed: Feed) -> Feed:
    """A runner's outputs for one feed."""
    (outputs,) = runner.run([feed])
    return outputs
