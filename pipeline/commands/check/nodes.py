"""Checks the nodes of a model with the passes and with TensorRT's parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from pipeline.artifact.manifest import Manifest
from pipeline.build.custom_nodes import prepare
from pipeline.build.network import open_network
from pipeline.build.refusal import explain
from pipeline.build.refused_node import BuildFailure
from pipeline.build.shape_inference import why_not_asked
from pipeline.convert import stages
from pipeline.convert.findings import Finding, shortened
from pipeline.convert.options import stage_options
from pipeline.errors import PipelineError
from pipeline.graph.origin import called, source_of
from pipeline.machine.child import Child, ChildDied, ChildFailed
from pipeline.machine.target import Target, find_target, use
from pipeline.plugins.loading import RequestedPlugin, find_plugins, library_folder, load_plugins
from pipeline.rewrite.choose import all_passes
from pipeline.rewrite.lint import LintFinding, lint
from pipeline.spec.config import Config
from pipeline.spec.file_names import EXPORTED, MODEL


def check_nodes(
    folder: Path, manifest: Manifest, config: Config, announce: Callable[[str], None]
) -> tuple[list[Finding], Manifest]:
    """Lints, rewrites and parses exported.onnx in `folder`.

    Returns:
        The findings, and the manifest. The manifest contains the rewrite if the rewrite succeeded.
    """
    target = find_target(config.target)
    announce("rewrite")
    found: list[Finding] = []
    try:
        faults = lint(folder / EXPORTED, target, all_passes(config.passes))
        found += _faults(faults.findings)
        found += [Finding("nodes", shortened(text), "warning") for text in faults.warnings]
        options = stage_options(config, target).rewrite
        manifest = stages.record_rewrite(manifest, stages.rewrite(folder, options))
    except PipelineError as error:
        if not any(finding.blocks for finding in found):  # else a finding on the node says it
            found.append(Finding("nodes", shortened(str(error)), "rewrite", blocks=True))
    announce("parse")
    if (folder / MODEL).is_file():
        known = {finding.node for finding in found if finding.blocks and finding.node}
        for finding in parsed(folder / MODEL, target, config.plugins):
            new = finding.node not in known
            found.append(replace(finding, blocks=finding.blocks and new))
    return found, manifest


def _faults(faults: Sequence[LintFinding]) -> list[Finding]:
    """Returns one finding for each node without a fix, and one for each pass that fixes nodes."""
    found = []
    mended: dict[tuple[str, str], list[LintFinding]] = {}
    for fault in faults:
        if fault.mended:
            mended.setdefault((fault.mended_by, fault.op), []).append(fault)
            continue
        where = f"{fault.node}{fault.origin}"
        what, node = f"{fault.op}: {fault.fault}", f"{fault.op} node {fault.node}"
        found.append(
            Finding("nodes", shortened(what), "fault", where, fault.how, fault.certain, node=node)
        )
    for (name, op), group in mended.items():
        what = f"1 {op} node would be wrong without a rewrite: pass {name} fixes it"
        if len(group) > 1:
            what = (
                f"{len(group)} {op} nodes would be wrong without a rewrite: pass {name} fixes them"
            )
        found.append(Finding("nodes", what, "mended", f"{group[0].node}{group[0].origin}"))
    return found


def parsed(model: Path, target: Target, plugins: Sequence[str] = ()) -> list[Finding]:
    """Returns the errors of the target's parser. A finding says if no parser runs here."""
    if why := why_not_asked(target):
        return [Finding("nodes", f"TensorRT's parser did not run: {why}", "skipped")]
    spare = model.with_name(f".{model.name}.parsed")
    others: list[int] = []
    try:
        asked = find_plugins(plugins, target)
        with library_folder(target) as env, Child(env) as child:
            try:
                said = BuildFailure(child.call(parse_here, model, spare, target, asked))
            except ChildDied as died:
                said = BuildFailure(died.words, died.how, "parse")
            if said.text and not said.died and not spare.exists():
                with suppress(
                    ChildDied
                ):  # supports_model_v2 of TensorRT-RTX 1.7.1 crashes on some graphs
                    others = child.call(unknown_here, model, target)
    except (PipelineError, ChildFailed) as error:  # a custom op without its plugin
        return [Finding("nodes", shortened(str(error)), "parser", blocks=True)]
    finally:
        spare.unlink(missing_ok=True)
    if not said.text and not said.died:
        return [Finding("nodes", f"{target.flavour} parses model.onnx", "parser")]
    complaint = explain(model, target, said)
    named = complaint.nodes
    first = next(iter(named), "")
    found = [Finding("nodes", shortened(str(complaint)), "parser", blocks=True, node=first)]
    nodes = onnx.load(model, load_external_data=False).graph.node
    for node in (nodes[index] for index in others):
        name = called(node)
        if name not in named:
            what = f"target {target} also refuses the {name}"
            found.append(Finding("nodes", what, "parser", source_of(node), blocks=True, node=name))
    return found


def parse_here(model: Path, spare: Path, target: Target, asked: Sequence[RequestedPlugin]) -> str:
    """Runs in the child. Returns the parser's errors; empty if the parser accepts the model."""
    trt: Any = use(target)
    brought, _ = load_plugins(trt, asked, target, lambda _: None)
    opened = open_network(trt, target)
    ready = prepare(trt, model, spare, target, brought, opened.parser.supports_operator)
    return "\n".join(error.text for error in opened.parse_file(ready.model))


def unknown_here(model: Path, target: Target) -> list[int]:
    """Runs in the child. Returns the indices of the nodes that the parser does not support.

    TensorRT before version 10 cannot answer: the list is empty.
    """
    opened = open_network(use(target), target)
    parser = opened.parser
    if not hasattr(parser, "supports_model_v2"):
        return []
    parser.supports_model_v2(model.read_bytes(), str(model))
    known = {n for k in range(parser.num_subgraphs) for n in parser.get_subgraph_nodes(k)}
    count = len(onnx.load(model, load_external_data=False).graph.node)
    return [n for n in range(count) if n not in known]
