"""The conversions of a farm, with the resources that they need, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.commands.convert_all import ModelResult
from pipeline.commands.farm.matrix import Job
from pipeline.spec.config import Config


@dataclass(frozen=True)
class JobResult(ModelResult):
    """The result of one conversion of the matrix.

    Args:
        target: The target's name.
        gpu: The kinds of GPU that were asked for; empty for the default.
        node: The name of the node that ran it; empty if it was lost.
    """

    target: str = ""
    gpu: str = ""
    node: str = ""

    @property
    def case(self) -> str:
        """Its name in the JUnit file."""
        return " ".join(word for word in (self.model, self.target, self.gpu) if word)


@dataclass(frozen=True)
class Work:
    """A conversion, and the resources that Ray reserves for it.

    Args:
        job: Its place in the matrix.
        config: The conversion; its `out` is replaced.
        memory: The memory in bytes.
    """

    job: Job
    config: Config
    memory: int

    @property
    def needs(self) -> dict[str, float]:
        """The resources by Ray's names. A GPU's kind is a custom resource, such as ``sm90``."""
        needs: dict[str, float] = {"CPU": 1, "memory": self.memory}
        if self.job.builds_on_gpu:
            needs |= dict.fromkeys(("GPU", *self.job.gpus), 1)
        return needs

    def result(self, state: Any = "not reached", error: str = "") -> JobResult:
        """A result without a conversion."""
        gpu = ",".join(self.job.gpus)
        return JobResult(
            self.job.model, state, error=error, detail=error, target=self.job.target, gpu=gpu
        )
