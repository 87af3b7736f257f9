"""The error of a comparison that failed, and whether its artifact is written."""

from __future__ import annotations

from pathlib import Path

from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.compare.run_names import in_precision
from pipeline.compare.runners import failures
from pipeline.convert.findings import comparison_failures
from pipeline.convert.reuse import previous
from pipeline.convert.workspace import Workspace
from pipeline.errors import CompareError
from pipeline.source.imports import changed_files
from pipeline.spec.precision import ROUNDED


class Disagreement(CompareError):
    """The comparison failed.

    Args:
        written: Whether the artifact is written, marked as failed.
    """

    def __init__(self, message: str, detail: str, *, written: bool) -> None:
        super().__init__(message, detail=detail)
        self.written = written


def disagreement(work: Workspace, *, keep: bool = True) -> Disagreement | None:
    """Returns the error of a failed comparison, or None if it passed.

    Args:
        work: The workspace, after the comparison.
        keep: Whether the artifact may be written if only half precision or tf32 fails.
    """
    manifest, place = work.manifest, work.place
    assert manifest.comparison is not None
    if manifest.comparison.passed:
        return None
    lines = failures(manifest.comparison)
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    written, outcome = False, unwritten(place)
    if keep and _only_rounding_failed(manifest):
        old = previous(place)
        there = old.manifest.comparison if old is not None else None
        written = there is None or not there.passed
        outcome = "is kept, marked as failed"
        if not written:
            outcome = "has a result that passed, and is unchanged: pass another folder with --out"
    text = f"model {manifest.name}: {lines[0]}{more}; {place} {outcome}"
    error = Disagreement(text, "\n".join(lines), written=written)
    found = comparison_failures(manifest.comparison)
    head = f"model {manifest.name}: the comparison failed; {place} {outcome}"
    error.more = "\n".join([head, *(line for finding in found for line in finding.lines())])
    return error


def check_code(stated: Manifest, failed: ComparisonInfo, place: Path) -> None:
    """Raises `CompareError` if source code was changed that an artifact's model may be made of.

    After a comparison that failed: the torch model may be another one now, and the artifact right.

    Args:
        stated: The manifest from before the comparison.
        failed: The comparison.
        place: The artifact's folder.
    """
    model = stated.model
    if changed := changed_files(model.source, model.modules):
        lines = failures(failed)
        raise CompareError(
            f"{place}: {lines[0]}. But source code of {model.source} was changed after the "
            f"conversion: {', '.join(map(str, changed.values()))}. The artifact "
            f"{unwritten(place)}. Convert again, or restore the code",
            detail="\n".join(lines),
        )


def unwritten(place: Path) -> str:
    """What an error says about an artifact's folder to which nothing was written."""
    return "is unchanged" if place.exists() else "was not written"


def _only_rounding_failed(manifest: Manifest) -> bool:
    """True if all failures are of runs in tf32 or half precision."""
    info = manifest.comparison
    assert info is not None
    failed = [r.pair[1] for point in info.points for r in point.results if not r.passed]
    failed += [check.run for check in info.checks if not check.passed]
    narrow = manifest.precision in ROUNDED and all(map(in_precision, failed))
    return narrow and not any(note.fails for note in info.notes)
