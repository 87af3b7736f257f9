"""Runs the torch model and the ONNX files of an artifact at the sizes of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from pipeline.artifact.manifest import Manifest
from pipeline.compare import explain, run_names
from pipeline.compare.edge_inputs import check_edges, float_edges, half_edges, may_not_end
from pipeline.compare.half_overflow import first_overflow
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.memory import Memory, once
from pipeline.compare.plan import ComparisonPlan, Job, plan_points
from pipeline.compare.random_sizes import agree, compare_random_sizes
from pipeline.compare.rounding_tolerance import rounding_tolerances, wide_tolerances
from pipeline.compare.runners import Ground, RunFailed, Runs, module_of
from pipeline.graph.session import OnnxRunner
from pipeline.machine.files import hash_file
from pipeline.spec.file_names import EXPORTED, HALF, MODEL
from pipeline.spec.findings import Note, note
from pipeline.spec.precision import HALVES, ROUNDED
from pipeline.spec.recipe import stored_recipe
from pipeline.spec.runner import Runner
from pipeline.spec.tensors import Feed, Precision, Tolerance
from pipeline.spec.verdicts import Check

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class ModelRuns:
    """The models of an artifact, without the engine.

    Args:
        folder: The artifact's folder.
        manifest: The artifact's manifest.
        reference: The torch model or the reference file, if it runs.
        seed: The seed of the inputs' values.
        memory: Keeps the outputs of the files, see `pipeline.compare.memory`.
    """

    folder: Path
    manifest: Manifest
    reference: Runner | None
    seed: int
    memory: Memory | None = None

    def run(self, ground: Ground, runs: Runs) -> tuple[Pairs, list[Note]]:
        """Runs the reference, exported.onnx and model.onnx, and adds their outputs to `runs`.

        For an engine in half precision, half.onnx runs too. Before the build, model.onnx runs in
        half precision instead.

        Returns:
            The pairs to compare, and notes for the manifest.

        Raises:
            CompareError: A run failed.
        """
        base = self.manifest.reference
        pairs: Pairs = []
        notes: list[Note] = []
        try:
            for runner in self._runners():
                runs[runner.name] = self._collected(ground, runner)
            if base == run_names.EXPORTED:
                notes.append(note("source-is-onnx"))
            else:
                pairs.append((base, run_names.EXPORTED))
            if not self._model.is_file():
                notes.append(note("only-exported"))
            elif run_names.REWRITTEN not in runs:
                runs[run_names.REWRITTEN] = runs[run_names.EXPORTED]
                notes.append(note("model-unchanged"))
            else:
                pairs += dict.fromkeys(
                    [(run_names.EXPORTED, run_names.REWRITTEN), (base, run_names.REWRITTEN)]
                )
            half = self._half_runner()
            if half is not None:
                if half.model.name != HALF:
                    notes.append(note("half-not-built"))
                runs[run_names.HALF] = self._collected(ground, half)
                pairs.append((base, run_names.HALF))
        except RunFailed as error:
            raise explain.failed_run(
                error,
                self.folder,
                self.manifest,
                module_of(self.reference),
                ground.feeds,
                self.seed,
            ) from error
        return pairs, notes

    def measure(
        self, job: Job, plan: ComparisonPlan, ground: Ground, runs: Runs, quick: list[Note]
    ) -> tuple[Job, list[Note]]:
        """Measures the tolerances, and compares the models at random sizes if `quick` is empty.

        If they differ there, the tolerances are measured again with these sizes: rounding alone may
        be larger there.

        Returns:
            The job with its tolerances, and `quick` or a note on the number of sizes.

        Raises:
            CompareError: A run failed.
        """
        job = replace(job, measured=self._measured(ground, runs))
        planned = len(plan.run)
        notes = quick or self._run_at_random_sizes(job, plan, ground, runs)
        if len(plan.run) > planned:
            job = replace(job, measured=self._measured(ground, runs))
        if job.measured:
            precision, plain = cast(Precision, job.precision), runs[run_names.REWRITTEN]
            own = self.manifest.interface.tolerances()
            notes = [*notes, *wide_tolerances(self._model, job.measured, own, precision, plain)]
        return job, notes

    def check_edges(self, job: Job, ground: Ground) -> list[Check]:
        """Compares the models for inputs at the edges of their ranges; see
        `pipeline.compare.edge_inputs`.
        """
        if not ground.points:
            return []
        interface, how = self.manifest.interface, (ground.announce, ground.watch)
        reference, *others = self._runners()
        checks = []
        if others and not may_not_end(self.folder / EXPORTED):
            edges = once(
                self.memory if self.reference is None else None,
                lambda: float_edges(reference, interface, ground.points, *how),
                self.folder / EXPORTED, "float", interface.inputs, interface.rules, ground.points,
            )  # fmt: skip
            for runner in others:
                checks += check_edges(edges, runner, job.tolerances(runner.name), *how)
        half = self._half_runner()
        if half is None:
            return checks
        precision, recipe = half.precision, stored_recipe(self.folder)
        edges = once(
            self.memory,
            lambda: half_edges(self._model, interface, precision, ground.points, *how),
            self._model, precision, interface.inputs, interface.rules, ground.points,
        )  # fmt: skip

        def cause(feed: Feed) -> str:
            return first_overflow(self._model, feed, recipe) if precision == "fp16" else ""

        return [*checks, *check_edges(edges, half, job.tolerances(half.name), *how, cause)]

    def _measured(self, ground: Ground, runs: Runs) -> dict[str, Tolerance]:
        """Measures the tolerance of an engine in tf32 or half precision; see `rounding_tolerances`.

        Returns:
            The tolerance of each output by name; empty if the spec states one.

        Raises:
            CompareError: The run with simulated rounding failed.
        """
        precision, interface = cast(Precision, self.manifest.precision), self.manifest.interface
        rounds = precision in ROUNDED and self._model.is_file()
        if not rounds or precision in interface.engine_tolerance:
            return {}
        plain = runs[run_names.REWRITTEN]
        return once(
            self.memory,
            lambda: rounding_tolerances(self._model, interface, precision, ground, plain),
            self._model, precision, interface.outputs, interface.tolerances(), ground.feeds,
        )  # fmt: skip

    def _run_at_random_sizes(
        self, job: Job, plan: ComparisonPlan, ground: Ground, runs: Runs
    ) -> list[Note]:
        """Compares the models at random sizes, see `pipeline.compare.random_sizes`.

        Sizes where they differ become points of the plan, with their inputs and outputs. Nothing is
        tried if the models differ at a planned size.

        Returns:
            A note on the number of sizes.

        Raises:
            CompareError: A run failed.
        """
        runners = self._runners()
        if runners[0].name != self.manifest.reference:  # only its stored outputs are there
            return []
        half = self._half_runner()
        if half is not None:
            runners.append(half)
        before = (stage.seconds for stage in self.manifest.stages if stage.name != "compare")
        for place, point in enumerate(plan.run):
            ran = {runner.name: runs[runner.name][place] for runner in runners}
            if not agree(job, ran, point.sizes):
                return []
        seconds = sum(before) + sum(ground.watch.seconds.values())
        ground.announce("compare random sizes")
        with ground.watch("random sizes"):
            found = compare_random_sizes(job, runners, plan.run, seconds, self._sample, self.seed)
        if found.failed:
            more = plan_points(replace(job, points=found.failed), self.folder / EXPORTED)
            feeds = [self._sample(point.sizes) for point in more.run]
            new: Runs = {}
            self.run(replace(ground, points=more.run, feeds=feeds), new)
            for name, outputs in new.items():
                runs[name] = [*runs[name], *outputs]
            ground.feeds.extend(feeds)
            plan.add(more)
        return [note("random-sizes", count=found.compared)] if found.compared else []

    def _collected(self, ground: Ground, runner: Runner) -> Sequence[Feed]:
        """The outputs of a run at all points, of an earlier run if it was the same."""
        if not isinstance(runner, OnnxRunner | HalfRunner):
            return ground.collect(runner)
        how = replace(runner, model=Path())
        return once(self.memory, lambda: ground.collect(runner), runner.model, how, ground.feeds)

    @property
    def _model(self) -> Path:
        return self.folder / MODEL

    def _runners(self) -> list[Runner]:
        """The reference and the other models; a model that equals another one is left out."""
        exported = self.folder / EXPORTED
        runners = [] if self.reference is None else [self.reference]
        runners.append(OnnxRunner(exported, run_names.EXPORTED))
        if self._model.is_file() and hash_file(self._model) != hash_file(exported):
            runners.append(OnnxRunner(self._model, run_names.REWRITTEN))
        return runners

    def _half_runner(self) -> HalfRunner | None:
        """Runs half.onnx, or model.onnx in half precision before the build; None for others."""
        if self.manifest.precision not in HALVES or not self._model.is_file():
            return None
        half, precision = self.folder / HALF, cast(Precision, self.manifest.precision)
        if half.is_file():
            return HalfRunner(half, precision)
        return HalfRunner(self._model, precision, True, recipe=stored_recipe(self.folder))

    def _sample(self, sizes: Mapping[str, int]) -> Feed:
        return self.manifest.interface.sample(sizes, self.seed)
