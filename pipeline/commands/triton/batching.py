"""Finds whether Triton may put several requests into one batch of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.artifact.manifest import Manifest
from pipeline.compare.rows import ROWS, Batch, find_batch
from pipeline.spec.dims import SizeRule


@dataclass(frozen=True)
class Batching:
    """How Triton batches requests.

    Args:
        largest: The largest batch, Triton's ``max_batch_size``. 0: every request runs alone, with
            full shapes.
        dim: The name of the batch dim; empty if `largest` is 0.
        preferred: The profiles' optimal batches.
        why: The reason for a `largest` of 0, as text.
    """

    largest: int
    dim: str = ""
    preferred: tuple[int, ...] = ()
    why: str = ""

    def sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes with a batch that Triton can form."""
        return {
            name: min(size, self.largest) if name == self.dim else size
            for name, size in sizes.items()
        }


def find_batching(manifest: Manifest, *, in_profiles: bool) -> Batching:
    """Finds the batch that Triton may form of several requests.

    Triton forms any batch from 1 to the largest one, of requests with equal other sizes. So every
    input and output needs the batch as its first axis, every such batch must be legal, and a
    comparison must have shown that the rows are independent.

    Args:
        manifest: The artifact's manifest.
        in_profiles: True for an engine, where each profile must allow the batch.
    """
    interface = manifest.interface
    batch = find_batch(interface)
    if batch is None:
        return Batching(0, why="no dim is only the first axis of inputs and outputs")
    name = batch.dim.name
    profiles = [profile.ranges[name] for profile in interface.profiles]
    dim = (batch.dim.min, batch.dim.opt, batch.dim.max)
    ranges = profiles if in_profiles and profiles else [dim]
    largest = min(high for _, _, high in ranges)
    why = _why_not(manifest, batch, max(low for low, _, _ in ranges), largest)
    if why:
        return Batching(0, why=why)
    preferred = sorted({opt for _, opt, _ in profiles or [dim] if 1 < opt <= largest})
    return Batching(largest, name, tuple(preferred))


def _why_not(manifest: Manifest, batch: Batch, smallest: int, largest: int) -> str:
    """The reason why Triton may form no batch, as text; empty if it may."""
    name = batch.dim.name
    alone = [t.name for t in manifest.interface.tensors if t.name not in batch.rows]
    if alone:
        return f"{alone[0]} has no axis {name}"
    if smallest > 1 or batch.dim.multiple_of > 1:
        return f"not every {name} from 1 is legal"
    if largest < 2:
        return f"{name} is 1"
    for rule in manifest.interface.rules:
        if name in SizeRule(rule).names:
            return f"{name} depends on other sizes: {rule}"
    comparison = manifest.comparison
    checks = [check for check in comparison.checks if check.name == ROWS] if comparison else []
    for check in checks:
        if check.kind != "rows-independent":
            return f"batch rows of {check.run}: {check.text}"
    return "" if checks else "no comparison has checked that its rows are independent"
