"""What each command of the command line does, with its parsed arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.commands import options as cli_options
from pipeline.commands import passes as cli_passes
from pipeline.commands import source_options as cli_source
from pipeline.commands.check import command as cli_check
from pipeline.commands.output import on_terminal, show
from pipeline.commands.progress import Progress
from pipeline.errors import ArtifactError, ConstraintError, InputError
from pipeline.models import MODELS
from pipeline.spec.plan_flags import NO_FLAGS

if TYPE_CHECKING:
    from pipeline.spec.config import Config


def convert(arguments: argparse.Namespace, progress: Progress) -> int:
    if arguments.ray is not None:
        from pipeline.commands.farm import command as farm

        return farm.command(arguments, _config, progress)
    if arguments.whole_zoo:
        from pipeline.commands import convert_all

        return convert_all.command(arguments, _config, progress)
    from pipeline.convert.driver import run
    from pipeline.convert.report import verdict

    if arguments.time_limit:
        raise InputError("--time-limit works only with --all. Remove --time-limit, or add --all")
    config = _config(arguments)
    try:
        report = run(config, progress)
    except ConstraintError as error:  # it hides what comes after it
        cli_check.add_everything(error, config, progress)
        raise
    if arguments.json or report.unchanged:
        return show_report(report, arguments)
    show(verdict(report, whole=not on_terminal()))
    if arguments.details:
        show("")
        return show_report(report, arguments)
    return 0 if report.ok else 1


def export(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import run_export

    return show_report(run_export(_config(arguments), progress), arguments)


def check(arguments: argparse.Namespace, progress: Progress) -> int:
    return cli_check.check(_config(arguments), arguments, progress)


def rewrite(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import run_rewrite

    if arguments.source.suffix == ".onnx" or arguments.source.is_file():
        return cli_passes.rewrite_file(arguments, progress)
    if arguments.diff or arguments.out:
        raise InputError(
            f"{arguments.source} is a folder: --diff and --out need an ONNX file. Pass the file"
        )
    report = run_rewrite(
        arguments.source,
        arguments.target,
        progress,
        own=arguments.own,
        only=arguments.only,
        skip=arguments.skip,
        plugins=arguments.plugin,
    )
    return show_report(report, arguments)


def build(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.artifact.artifact import Artifact
    from pipeline.convert.driver import run_build
    from pipeline.convert.options import Rebuild

    before = NO_FLAGS
    if arguments.target is None and not arguments.gpu:
        before = Artifact.open(arguments.artifact, check=False).manifest.flags
    how = Rebuild(
        profiles=arguments.profile,
        precision=arguments.precision,
        recipe=arguments.recipe,
        target=arguments.target,
        gpus=arguments.gpu,
        plugins=arguments.plugin,
        effort=cli_options.chosen_effort(arguments),
        flags=cli_options.chosen_flags(arguments, before),
    )
    report = run_build(arguments.artifact, how, progress)
    return show_report(report, arguments)


def verify(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import verify
    from pipeline.convert.options import Verify

    report = verify(
        arguments.artifact,
        Verify(
            against=arguments.against,
            torch_model=arguments.torch,
            weights=arguments.weights,
            trust=arguments.trust,
            shapes=arguments.shape,
            memory_limit=arguments.memory_limit,
            engine_tolerance=arguments.engine_tolerance,
            plugins=arguments.plugin,
            host_code=arguments.host_code,
        ),
        announce=progress,
    )
    return show_report(report, arguments)


def inspect(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.artifact.artifact import Artifact
    from pipeline.commands.report import other_engines
    from pipeline.convert.report import Report

    del progress
    artifact = Artifact.open(arguments.artifact)
    engines = other_engines(artifact.path, check=True)
    code = show_report(Report(artifact.path, artifact.manifest), arguments, engines)
    return ArtifactError.exit_code if any("error" in engine for engine in engines) else code


def models(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.commands import report as summary
    from pipeline.source.zoo import find_spec

    del progress
    specs = {name: find_spec(name, {}) for name in MODELS}
    if arguments.json:
        show(json.dumps({name: summary.spec_facts(spec) for name, spec in specs.items()}, indent=2))
    else:
        show(summary.models_table(specs))
    return 0


def show_report(
    report: Any, arguments: argparse.Namespace, engines: Sequence[Mapping[str, Any]] | None = None
) -> int:
    from pipeline.commands import report as summary

    if arguments.json:
        show(summary.report_json(report, engines))
    else:
        show(summary.report_text(report, engines))
    return 0 if report.ok else 1


def _config(arguments: argparse.Namespace) -> Config:
    from pipeline.spec.config import Config

    return Config(
        **cli_source.config_fields(arguments),
        out=getattr(arguments, "out", None),
        target=arguments.target,
        profiles=tuple(arguments.profile),
        precision=arguments.precision or "fp32",
        recipe=getattr(arguments, "recipe", None),
        gpus=tuple(getattr(arguments, "gpu", ())),
        effort=cli_options.chosen_effort(arguments),
        shapes=tuple(getattr(arguments, "shape", ())),
        memory_limit=getattr(arguments, "memory_limit", None),
        seed=arguments.seed,
        quick=getattr(arguments, "quick", False),
        passes=tuple(arguments.own),
        skip=tuple(arguments.skip),
        plugins=tuple(arguments.plugin),
        force=getattr(arguments, "force", False),
        store=getattr(arguments, "store", None),
        flags=cli_options.chosen_flags(arguments),
    )
