"""Finds the nodes that must stay in float32 for half precision everywhere else.

The search begins with all nodes in half precision. If the error is too large, it takes the groups
of nodes that the rules (`pipeline.rewrite.half_rules`) keep in float32, or else all groups. It
halves them again and again, until only groups are left that the tolerance needs: U. Junker,
"QuickXplain: Preferred Explanations and Relaxations for Over-Constrained Problems", 2004. The ops
of these groups are halved in the same way.

The recipes are tried at few sizes. The result is tried at all sizes, and with inputs at the edges
of their ranges. A size or an edge with a large error is then added to the few, and the search goes
on from what it found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.manifest import Manifest
from pipeline.artifact.values import filled
from pipeline.compare.edge_inputs import half_edges
from pipeline.compare.half_trials import MOST, Trials
from pipeline.compare.plan import CompareOptions, ComparisonPlan, job_of, plan_points
from pipeline.compare.rounding_tolerance import rounding_tolerances
from pipeline.compare.runners import Ground
from pipeline.errors import CompareError
from pipeline.graph.session import OnnxRunner
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch
from pipeline.rewrite.half import choices_in, loaded
from pipeline.spec.file_names import MODEL
from pipeline.spec.interface import Interface
from pipeline.spec.recipe import HalfInfo, Recipe
from pipeline.spec.tensors import Feed, Precision

RUNS = 60  # recipes that a search tries at most, without those at all sizes
_FEW = ("min", "odd, below opt", "opt")  # the labels of the few sizes


@dataclass(frozen=True)
class Searched:
    """The result of a search: the recipe, and what it does."""

    recipe: Recipe
    info: HalfInfo


def search_artifact(
    folder: Path,
    manifest: Manifest,
    precision: Precision,
    options: CompareOptions,
    announce: Announce,
) -> Searched:
    """Finds the recipe for an artifact's model.onnx, at the sizes that its comparison uses.

    Args:
        folder: The artifact's folder.
        manifest: Its manifest, with the profiles to build.
        precision: ``fp16`` or ``bf16``.
        options: The sizes, the memory limit and the seed. The search is never quick.
        announce: Called with each step that begins.

    Raises:
        CompareError: No size fits into memory, or a run failed.
    """
    manifest = filled(replace(manifest, precision=precision), folder)
    job = job_of(manifest, replace(options, quick=False))
    plan = plan_points(job, folder / MODEL)
    if not plan.run:
        raise CompareError(
            f"model {manifest.name}: no size fits into memory, so no recipe can be tried. Pass a "
            "larger --memory-limit, or --precision fp16"
        )
    interface = manifest.interface
    feeds: list[Feed] = [interface.sample(point.sizes, options.seed) for point in plan.run]
    ground = Ground(plan.run, feeds, announce, Stopwatch())
    return search(folder / MODEL, interface, precision, ground, few_of(plan))


def few_of(plan: ComparisonPlan) -> list[int]:
    """The indices of the sizes at which recipes are tried: min, opt and an odd one of the first
    profile. The size with the least memory comes first."""
    labels = [point.label.rpartition(": ")[2] for point in plan.run]
    found = [labels.index(label) for label in _FEW if label in labels]
    needs = [info.estimate_bytes for info in plan.infos if info.compared]
    return sorted(found or [0], key=lambda n: (needs[n], n))


def search(
    model: Path,
    interface: Interface,
    precision: Precision,
    ground: Ground,
    few: Sequence[int],
    limit: int = RUNS,
) -> Searched:
    """Finds the recipe for a model.

    Args:
        model: The ONNX file before half precision.
        interface: The outputs, with their tolerances.
        precision: ``fp16`` or ``bf16``.
        ground: The sizes and the inputs.
        few: The indices of the sizes at which each recipe is tried.
        limit: How many recipes are tried at most.
    """
    start = time.perf_counter()
    plain = ground.collect(OnnxRunner(model, "model.onnx"))
    tolerances = interface.engine_tolerances(precision)
    if precision not in interface.engine_tolerance:
        tolerances = rounding_tolerances(model, interface, precision, ground, plain)
    announce, watch = ground.announce, ground.watch
    edges = half_edges(model, interface, precision, ground.points, announce, watch)
    choices, by_rule = choices_in(loaded(model)[0], precision)
    parts: dict[str, dict[str, None]] = {}
    ruled: dict[str, None] = {}  # the groups with nodes that the rules keep in float32
    for place, address in choices.addresses.items():
        parts.setdefault(address.group, {})[address.part] = None
        if place not in by_rule:
            ruled[address.group] = None
    trials = Trials(model, precision, choices, ground, plain, edges, tolerances, list(few), limit)
    first = dict.fromkeys(choices.addresses[place].part for place in sorted(choices.rounded))
    every = {group: list(own) for group, own in parts.items()}
    found = _Search(trials, every, list(ruled), list(first))
    wide, share = found.run()
    recipe = trials.recipe(wide)
    info = replace(
        choices.info(recipe),
        runs=trials.runs,
        seconds=round(time.perf_counter() - start, 1),
        share=share,
        stopped=trials.stopped,
    )
    return Searched(recipe, info)


@dataclass
class _Search:
    """One search.

    Args:
        trials: Tries the recipes.
        parts: The parts of each group: the ops, or a node alone.
        ruled: The groups with nodes that the rules keep in float32.
        first: The parts that stay float32 without a trial: their values are rounded later.
    """

    trials: Trials
    parts: dict[str, list[str]]
    ruled: list[str]
    first: list[str]

    def run(self) -> tuple[list[str], float]:
        """The groups and parts that stay in float32, and the largest error as a share of the
        tolerance."""
        wide = list(self.first)
        while True:
            if not self.trials.hold(wide):
                wide = self._smaller(wide, self._groups(wide))
            share, place = self.trials.worst(wide)
            if share <= MOST or self.parts.keys() <= set(wide):
                return wide, share
            if place not in self.trials.places:
                self.trials.places.append(place)

    def _groups(self, wide: Sequence[str]) -> list[str]:
        """The groups that are needed beside `wide`."""
        ruled = [group for group in self.ruled if group not in wide]
        every = [group for group in self.parts if group not in wide]
        enough = ruled and (self.trials.stopped or self.trials.hold([*wide, *ruled]))
        return self._needed(wide, ruled if enough else every)

    def _smaller(self, wide: Sequence[str], groups: Sequence[str]) -> list[str]:
        """`wide` with these groups, or with only those parts of them that are needed.

        A group stays whole if more than half of its parts are needed: one line says more than
        many, and an island in pieces needs more Casts.
        """
        whole = [*wide, *groups]
        parts = [part for group in groups for part in self.parts[group]]
        if len(parts) == len(groups):
            return whole
        needed = set(self._needed(wide, parts))
        found = list(wide)
        for group in groups:
            own = [part for part in self.parts[group] if part in needed]
            found += [group] if 2 * len(own) > len(self.parts[group]) else own
        return found if self.trials.hold(found) else whole

    def _needed(self, base: Sequence[str], rest: Sequence[str]) -> list[str]:
        """The items of `rest` without which `base` has too large an error. Together they have a
        small one."""

        def find(base: list[str], changed: bool, rest: list[str]) -> list[str]:
            if changed and self.trials.hold(base):
                return []
            if len(rest) < 2:
                return rest
            left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            late = find([*base, *left], True, right)
            early = find([*base, *late], bool(late), left)
            return [*early, *late]

        return find(list(base), False, list(rest))
