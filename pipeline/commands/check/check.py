"""Runs everything except the build, and lists what would stop a conversion.

A conversion ends at the first error. The check continues: it narrows dims to the sizes that the
model accepts, and fixes dims that cannot be dynamic. A finding says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.commands.check import dims
from pipeline.commands.check.nodes import check_nodes
from pipeline.compare.plan import CompareOptions
from pipeline.compare.stage import compare_artifact
from pipeline.convert import stages
from pipeline.convert.findings import (
    SECTIONS,
    Finding,
    comparison_failures,
    constraint_findings,
    export_failures,
    note_findings,
    shortened,
)
from pipeline.convert.options import ExportOptions
from pipeline.convert.plan import chosen_profiles, initial_manifest
from pipeline.convert.reference import reference_runner
from pipeline.errors import ConstraintError, InputError, PipelineError
from pipeline.machine.target import find_target
from pipeline.probe.apply import merge_profiles
from pipeline.probe.state import left_as_given
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import check_rules, kept_rules, sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.precision import check_precision
from pipeline.spec.profiles import Profile, parse_sizes
from pipeline.spec.rules import Rule

if TYPE_CHECKING:
    import torch

__all__ = ["SECTIONS", "CheckReport", "Finding", "check"]

Announce = Callable[[str], None]


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    Args:
        name: The name of the model.
        target: The name of the target.
        findings: The findings in the order of the check.
    """

    name: str
    target: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if no finding blocks a conversion."""
        return not any(finding.blocks for finding in self.findings)

    def __str__(self) -> str:
        """The findings by sections. An exclamation mark shows a finding that blocks."""
        lines = [f"{self.name}, for {self.target}"]
        for section in SECTIONS:
            lines += ["", section]
            for finding in self.findings:
                if finding.section == section:
                    lines += finding.lines()
        count = sum(finding.blocks for finding in self.findings)
        things = "1 finding blocks" if count == 1 else f"{count or 'No'} findings block"
        return "\n".join([*lines, "", f"{things} a conversion"])


@dataclass(frozen=True)
class _CheckedModel:
    """An exported model: its spec with the checked dims, its manifest, and its module, if any."""

    spec: ModelSpec
    manifest: Manifest
    module: torch.nn.Module | None
    shapes: tuple[str, ...]


def check(config: Config, announce: Announce) -> CheckReport:
    """Checks dims, nodes and the comparison of a source. Writes no artifact.

    Args:
        config: The conversion to check; `out` and `force` have no effect.
        announce: Called with each step that begins.

    Raises:
        InputError: A conversion would not start with this config.
    """
    spec = find_source(config)
    target = find_target(config.target)
    check_precision(config.engine_precision, target)
    chosen_profiles(config, spec)
    for text in config.shapes:
        check_rules(spec.rules, parse_sizes(text, spec.dims), f"shape {text!r}")
    found: list[Finding] = []
    with left_as_given(spec) as spec, tempfile.TemporaryDirectory(prefix="pipeline-check-") as name:
        folder = Path(name)
        ready = _exported(config, spec, folder, found, announce)
        if ready is None:
            why = "not checked: the export failed, so there is no ONNX file"
            found += [Finding("nodes", why, "skipped"), Finding("comparison", why, "skipped")]
        else:
            nodes, manifest = check_nodes(folder, ready.manifest, config, announce)
            found += nodes
            found += _compared(config, replace(ready, manifest=manifest), folder, announce)
    return CheckReport(spec.name, target.name, tuple(_once(found)))


def _exported(
    config: Config, spec: ModelSpec, folder: Path, found: list[Finding], announce: Announce
) -> _CheckedModel | None:
    """Exports over the sizes that the model accepts. Returns None if every export fails.

    If torch refuses the export, dims that may be one become one, the dims to blame are fixed, and
    then all dims.
    """

    found += dims.declared(spec)
    module: torch.nn.Module | None = None
    base: dict[str, int] = {}
    if spec.onnx is None:
        from pipeline.export.dtypes import fit_dtypes
        from pipeline.export.module import made, placed

        announce("trying sizes")
        declared, (spec, module) = spec, made(spec, config.weights_path)
        spec, dtypes = fit_dtypes(spec, module, config.seed)
        found += [Finding("dims", text, "note") for text in (*placed(declared, module), *dtypes)]
        more, tried, runs_at = dims.tried(spec, module, config.seed)
        found += more
        if any(finding.kind == "nowhere" for finding in more):
            return None  # the export would only say it again
        spec, config = tried.spec, _renamed(config, spec, tried.merged)
        base.update(runs_at)
    only = ""
    for first in (True, False, False):
        announce(f"export with {only} only" if only else "export")
        narrower = Finding("dims", f"the lines below apply to {only} only", "narrowed")
        found += [narrower] if only else []
        rules: tuple[Rule, ...] = ()
        try:
            return _export(config, spec, module, folder, found)
        except ConstraintError as error:
            rules = error.rules
            found += constraint_findings(error)
        except InputError:
            raise
        except PipelineError as error:
            found += export_failures(error)
        if only:
            found.remove(narrower)
        free = [name for name, dim in spec.dims.items() if not dim.static]
        blamed = [name for name in free if any(f.blocks and f.dim == name for f in found)]
        if not free or spec.padding is not None:
            return None
        one, merged = dims.as_one(spec, rules)
        if merged:
            spec, config = one, _renamed(config, one, merged)
            only = ", ".join(f"{goes}={stays}" for goes, stays in merged.items())
            continue
        names = blamed if first and blamed else free
        before, spec = spec, dims.fixed(spec, names, base)
        found += dims.never_fixed(spec, names)
        if spec == before:
            return None
        only = ", ".join(f"{name}={dim.min}" for name, dim in spec.dims.items() if dim.static)
    return None


def _export(
    config: Config,
    spec: ModelSpec,
    module: torch.nn.Module | None,
    folder: Path,
    found: list[Finding],
) -> _CheckedModel:

    asked = spec
    if module is not None:
        more, spec, module = dims.traced(spec, module, config.seed)
        found += more
        spec = dims.declared_as_is(spec)
    else:
        spec = replace(spec, refine_dims=True)
    asked_for = config.parsed_profiles() or spec.profiles
    profiles = [profile for profile in asked_for if _allowed(profile, spec)]
    shapes = [text for text in config.shapes if not _legal(text, spec)]
    left_out = [f"profile {p.name}" for p in asked_for if p not in profiles]
    for what in (*left_out, *(f"shape {text}" for text in shapes)):
        found.append(
            Finding(
                "dims", f"{what} is not checked: its sizes are outside these ranges", "left-out"
            )
        )
    spec = replace(spec, profiles=tuple(profiles) or (Profile("default"),))
    options = ExportOptions(weights=config.weights_path, seed=config.seed)
    exported = stages.export(folder, spec, options)
    manifest = stages.record_export(initial_manifest(config, spec), exported)
    assert manifest.export is not None
    if module is None:
        found += dims.narrowings(
            asked, manifest.interface.dims, manifest.interface.rules, manifest.export.refinements
        )
    legal = tuple(text for text in config.shapes if text not in shapes)
    return _CheckedModel(spec, manifest, exported.module, legal)


def _renamed(config: Config, spec: ModelSpec, merged: Mapping[str, str]) -> Config:
    """Returns the config with profiles and shapes in terms of merged dims."""
    if not merged:
        return config
    profiles = merge_profiles(config.parsed_profiles() or spec.profiles, merged)
    kept = {name: dim for name, dim in spec.dims.items() if name not in merged}
    shapes = [parse_sizes(text, kept, merged) for text in config.shapes]
    texts = tuple(sizes_text(sizes) for sizes in shapes)
    return replace(config, profiles=profiles, shapes=texts)


def _allowed(profile: Profile, spec: ModelSpec) -> bool:
    try:
        profile.resolve(spec.dims)
    except InputError:
        return False
    return True


def _compared(
    config: Config, ready: _CheckedModel, folder: Path, announce: Announce
) -> list[Finding]:

    manifest, spec = ready.manifest, ready.spec
    reference = reference_runner(spec, manifest, config.weights_path, ready.module)
    announce("compare")
    options = CompareOptions(
        memory_limit=config.memory_limit,
        seed=config.seed,
        shapes=ready.shapes,
    )
    try:
        done = compare_artifact(folder, manifest, reference, options, announce)
    except ConstraintError as error:
        return constraint_findings(error)
    except PipelineError as error:
        return [Finding("comparison", shortened(str(error)), "comparison", blocks=True)]
    return comparison_findings(done.info)


def _legal(text: str, spec: ModelSpec) -> bool:
    try:
        return kept_rules(spec.rules, parse_sizes(text, spec.dims))
    except InputError:
        return False


def comparison_findings(comparison: ComparisonInfo) -> list[Finding]:
    """Returns the findings of a comparison.

    Failures of one kind, of one output and pair of runs, are one finding with the first sizes.
    """
    # the section on nodes already reports sizes that TensorRT refuses
    found = [f for f in comparison_failures(comparison) if f.kind != "sizes-refused"]
    compared = [point for point in comparison.points if point.compared]
    if compared and not found:
        far = max((r.max_abs or 0.0 for p in compared for r in p.results), default=0.0)
        words = f"all runs agree within the tolerance at {len(compared)} sets of sizes; "
        words += f"largest error {far:.3g}"
        found.append(Finding("comparison", words, "compared"))
    for point in comparison.points:
        if point.left_out is not None:
            sizes = sizes_text(point.sizes)
            what = f"{sizes} was not compared: {point.left_out.text}"
            found.append(Finding("comparison", what, point.left_out.kind))
    return found + [f for f in note_findings(comparison) if not f.blocks]


def _once(found: list[Finding]) -> list[Finding]:
    return list(dict.fromkeys(found))
