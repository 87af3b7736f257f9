"""Why a comparison failed: the node where two runs part, or sizes that the model does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.compare.divergence.locate import locate
from pipeline.compare.half_overflow import first_overflow
from pipeline.compare.problems import problems
from pipeline.compare.run_names import HALF, REWRITTEN, TORCH, is_engine
from pipeline.compare.runners import RunFailed
from pipeline.errors import CompareError, ConstraintError
from pipeline.spec.file_names import EXPORTED, MODEL
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
    """The error of a run that failed, with what is to blame as far as it can be told.

    Args:
        error: what the run ended in.
        folder: the artifact's.
        manifest: what it declares.
        module: the torch reference, if it was run.
        feeds: the inputs, one a point.
        seed: for the values of further inputs.
    """
    if error.run == TORCH:
        assert module is not None
        from pipeline.probe.probe import probe

        found = probe(manifest.interface.inputs, module, seed, manifest.interface.rules)
        if found.rules:
            rules = "; ".join(map(str, found.rules))
            return ConstraintError(
                f"{error}; the model does not take every size that is declared: {rules} "
                f"(found by running it: {found.words})",
                detail=error.detail,
                rules=tuple(found.rules),
            )
        return error
    pair = (TORCH if module is not None else manifest.reference, error.run)
    where = _located(pair, folder, manifest, module, feeds[error.point])
    return CompareError(f"{error}{where}", detail=error.detail)


def disagreement(
    info: ComparisonInfo,
    folder: Path,
    manifest: Manifest,
    module: torch.nn.Module | None,
    feeds: Sequence[Feed],
    announce: Callable[[str], None],
) -> ComparisonInfo:
    """The comparison, the first failure of each pair with the node where its runs part.

    Args:
        info: the comparison.
        folder, manifest, module: see `failed_run`.
        feeds: the inputs, one a point that was compared.
        announce: is told that it begins.
    """
    announce("where the runs part")
    shown = {id(problem.result) for problem in problems(info.points)}
    told: set[tuple[str, str]] = set()
    index = 0
    points = []
    for point in info.points:
        results = []
        for result in point.results:
            new = result
            if id(result) in shown and point.compared and result.pair not in told:
                told.add(result.pair)
                where = _located(result.pair, folder, manifest, module, feeds[index])
                where = where or _to_locate(result.pair, point.sizes)
                new = replace(result, why=f"{result.why}{where}")
            results.append(new)
        index += point.compared
        points.append(replace(point, results=tuple(results)))
    return replace(info, points=tuple(points))


def _located(
    pair: tuple[str, str],
    folder: Path,
    manifest: Manifest,
    module: torch.nn.Module | None,
    feed: Feed,
) -> str:
    model = folder / MODEL
    if pair[1] == HALF:
        text = first_overflow(model, feed)
        return f"; {text}" if text else ""
    text = locate(
        pair,
        feed,
        folder / EXPORTED,
        model if model.is_file() else None,
        module=module,
        rewrite=manifest.rewrite,
    )
    return f"; {text}" if text else ""


def _to_locate(pair: tuple[str, str], sizes: Mapping[str, int]) -> str:
    """How to find where an engine parts from what it was built from: that takes more builds."""
    if pair[0] != REWRITTEN or not is_engine(pair[1]):
        return ""
    shape = ",".join(f"{name}={size}" for name, size in sizes.items())
    option = f" --shape {shape}" if shape else ""
    return f"; `pipeline locate ARTIFACT{option}` finds where"
