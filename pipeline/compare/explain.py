"""Explains a failed comparison: the first node that differs, or sizes that the model refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.compare.divergence.locate import Located, choice_behind, locate
from pipeline.compare.half_overflow import first_overflow
from pipeline.compare.problems import key_of, problems
from pipeline.compare.run_names import HALF, REWRITTEN, TORCH, in_precision, is_engine
from pipeline.compare.runners import RunFailed
from pipeline.errors import CompareError, ConstraintError
from pipeline.graph import files as graph_files
from pipeline.probe.eager import bad_weight
from pipeline.probe.probe import probe
from pipeline.spec.file_names import EXPORTED, MODEL, RECIPE
from pipeline.spec.findings import Facts
from pipeline.spec.precision import HALVES
from pipeline.spec.recipe import stored_recipe
from pipeline.spec.tensors import Feed

if TYPE_CHECKING:
    import torch


def failed_run(
    error: RunFailed,
    folder: Path,
    manifest: Manifest,
    module: torch.nn.Module | None,
    feeds: Sequence[Feed],
    seed: int,
) -> CompareError | ConstraintError:
    """Returns the error of a failed run, with its cause if known.

    Args:
        error: The error of the run.
        folder: The artifact's folder.
        manifest: The artifact's manifest.
        module: The torch reference, if it ran.
        feeds: The inputs, one set for each point.
        seed: The seed of further inputs.
    """
    if error.run == TORCH:
        assert module is not None

        found = probe(manifest.interface.inputs, module, seed, manifest.interface.rules)
        if found.rules:
            rules = "; ".join(map(str, found.rules))
            how = f"by running the model: {found.words}"
            return ConstraintError(
                f"{error}; the model does not accept every declared size: {rules} (found {how})",
                detail=error.detail,
                rules=tuple(found.rules),
                advice=(str(error), f"Found {how}"),
            )
        return error
    pair = (TORCH if module is not None else manifest.reference, error.run)
    where = _located(pair, folder, manifest, module, feeds[error.point]).text
    return CompareError(f"{error}{where and f'; {where}'}", detail=error.detail)


def disagreement(
    info: ComparisonInfo,
    folder: Path,
    manifest: Manifest,
    module: torch.nn.Module | None,
    feeds: Sequence[Feed],
    announce: Callable[[str], None],
) -> ComparisonInfo:
    """Adds the first node that differs to the first failure of each pair of runs.

    If half precision failed with a recipe, the advice is to change the recipe.

    Args:
        info: The comparison.
        folder, manifest, module: See `failed_run`.
        feeds: The inputs, one set for each compared point.
        announce: Called when the search begins.
    """
    announce("find the first node that differs")
    weight = ""
    if any(r.facts.get("advice") == "limit-inputs" for point in info.points for r in point.results):
        weight = _bad_weight(module, folder / EXPORTED)
    halves = manifest.precision in HALVES and stored_recipe(folder) is not None
    shown = {problem.key for problem in problems(info.points)}
    located: set[tuple[str, str]] = set()
    index = 0
    points = []
    for point in info.points:
        results = []
        for result in point.results:
            new = result
            if halves and in_precision(result.pair[1]) and "advice" in result.facts:
                new = result.knowing(recipe=RECIPE)
            if weight and result.facts.get("advice") == "limit-inputs":
                new = result.knowing(advice="bad-weight", weight=weight)
            failed = not result.passed and key_of(point, result) in shown
            if failed and point.compared and result.pair not in located:
                located.add(result.pair)
                found = _located(result.pair, folder, manifest, module, feeds[index], result.output)
                if found.text:
                    tied = found.ties and result.kind == "differs" and "advice" not in new.facts
                    ties: Facts = {"advice": "ties"} if tied else {}
                    new = new.knowing(where=found.text, **ties)
                elif result.pair[0] == REWRITTEN and is_engine(result.pair[1]):
                    new = new.knowing(
                        locate=dict(point.sizes)
                    )  # locating needs more builds, so advise the command
            results.append(new)
        index += point.compared
        points.append(replace(point, results=tuple(results)))
    return replace(info, points=tuple(points))


def _bad_weight(module: torch.nn.Module | None, exported: Path) -> str:
    if module is None:
        return graph_files.bad_weight(exported)
    from pipeline.export.module import inner

    return bad_weight(inner(module))


def _located(
    pair: tuple[str, str],
    folder: Path,
    manifest: Manifest,
    module: torch.nn.Module | None,
    feed: Feed,
    output: str = "",
) -> Located:
    model = folder / MODEL
    if pair[1] == HALF:
        recipe = stored_recipe(folder)
        fp16 = manifest.precision == "fp16"
        text = first_overflow(model, feed, recipe) if fp16 else ""
        if not text and (chosen := choice_behind(model, output)):
            text = (
                f"{chosen} comes before it: rounding decides which of nearly equal values it takes"
            )
        return Located(text)
    return locate(
        pair,
        feed,
        folder / EXPORTED,
        model if model.is_file() else None,
        module=module,
        rewrite=manifest.rewrite,
    )
