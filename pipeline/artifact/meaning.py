"""What the values of a manifest mean: names, paths, ranges and references between its parts.

A manifest may come from somebody else, with hashes that fit. It is data: no name in it leads out of
the artifact, and no value in it makes a later stage fail in a way that nobody foresaw.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pipeline.artifact.records import fail
from pipeline.errors import InputError
from pipeline.machine.target import TARGETS
from pipeline.spec.dims import SizeRule
from pipeline.spec.precision import PRECISIONS

if TYPE_CHECKING:
    from pipeline.artifact.manifest import Manifest

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CAPABILITY = re.compile(r"\d{1,2}\.\d")
_REFERENCES = ("torch", "exported", "reference")


def check_meaning(manifest: Manifest, where: str) -> None:
    """Checks what the types of the fields can't say.

    Args:
        manifest: The manifest, with values of the right types.
        where: The file, for the beginning of errors.

    Raises:
        ArtifactError: A name, a path, a number or a reference is not valid. The message names it.
    """
    for at, what in _faults(manifest):
        fail(where, at, what)


def _faults(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield from _in_files(manifest)
    yield from _in_choices(manifest)
    yield from _in_references(manifest)
    yield from _in_numbers(manifest)


def _in_files(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for name, info in manifest.files.items():
        parts = PurePosixPath(name).parts
        if "/".join(parts) != name or ".." in parts or name.startswith("/") or not parts:
            yield "files", f"{name!r} is not a plain relative name"
        if "\\" in name or ":" in name or "\0" in name:
            yield "files", f"{name!r} contains \\, : or NUL"
        if not _SHA256.fullmatch(info.sha256):
            yield f"files.{name}.sha256", "is not a SHA-256"
    refitted = manifest.build.refitted_from if manifest.build is not None else ""
    if refitted and not _SHA256.fullmatch(refitted):
        yield "build.refitted_from", "is not a SHA-256"
    hashes = manifest.build.plugin_hashes if manifest.build is not None else {}
    for name, sha256 in hashes.items():
        if not _SHA256.fullmatch(sha256):
            yield f"build.plugin_hashes.{name}", "is not a SHA-256"


def _in_choices(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Values of which only some are known."""
    yield from _unknown("precision", manifest.precision, PRECISIONS)
    yield from _unknown("reference", manifest.reference, _REFERENCES)
    yield from _unknown("target.name", manifest.target.name, TARGETS)
    flavour = TARGETS[manifest.target.name].flavour
    yield from _unknown("target.flavour", manifest.target.flavour, (flavour,))
    for capability in manifest.target.compute_capabilities:
        if not _CAPABILITY.fullmatch(capability):
            yield "target.compute_capabilities", f"{capability!r} is no compute capability"


def _unknown(at: str, value: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    if value not in known:
        yield at, f"{value!r} is unknown; known: {', '.join(known)}"


def _in_references(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Names of dims and plugins, and rules on dims."""
    dims = manifest.interface.dims
    if manifest.export is not None:
        for name in manifest.export.dynamic.keys() - dims.keys():
            yield "export.dynamic", f"no dim is called {name}"
        for n, rule in enumerate(manifest.export.refinements):
            try:
                SizeRule(rule.size_rule or "0 <= 0")
            except InputError as error:
                yield f"export.refinements[{n}].size_rule", str(error)
    if manifest.build is not None:
        for name in manifest.build.plugin_hashes.keys() - set(manifest.build.plugins):
            yield "build.plugin_hashes", f"no plugin is called {name}"
    if manifest.comparison is not None:
        for n, point in enumerate(manifest.comparison.points):
            if point.sizes.keys() != dims.keys():
                at = f"comparison.points[{n}].sizes"
                yield at, f"expected a size of each dim: {', '.join(dims) or 'there is none'}"
        for n, check in enumerate(manifest.comparison.checks):
            for name in check.sizes.keys() - dims.keys():
                yield f"comparison.checks[{n}].sizes", f"no dim is called {name}"


def _in_numbers(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Times, sizes and counts, which are never negative."""
    numbers: dict[str, float | None] = {
        f"files.{name}.bytes": info.bytes for name, info in manifest.files.items()
    }
    for n, stage in enumerate(manifest.stages):
        numbers[f"stages[{n}].seconds"] = stage.seconds
        numbers[f"stages[{n}].peak_bytes"] = stage.peak_bytes
    if manifest.build is not None:
        numbers["build.plan_bytes"] = manifest.build.plan_bytes
        if (half := manifest.build.half) is not None:
            numbers |= {"build.half.half": half.half, "build.half.seconds": half.seconds}
    if manifest.comparison is not None:
        for n, point in enumerate(manifest.comparison.points):
            numbers[f"comparison.points[{n}].estimate_bytes"] = point.estimate_bytes
            for name, size in point.sizes.items():
                numbers[f"comparison.points[{n}].sizes.{name}"] = size
    for at, value in numbers.items():
        if value is not None and value < 0:
            yield at, f"is {value}, but can't be negative"
