"""The nodes of a check: what the passes do with them, and what TensorRT's parser says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx

from pipeline import stages
from pipeline._blame import Said
from pipeline._check_findings import Finding, shortened
from pipeline.artifact import EXPORTED, MODEL
from pipeline.child import Child, ChildDied, ChildFailed
from pipeline.config import Config
from pipeline.custom_ops import Asked, find_plugins, library_folder, load_plugins, prepare
from pipeline.errors import PipelineError
from pipeline.failure import called, explain, origin_of
from pipeline.lint import Finding as Fault
from pipeline.lint import lint
from pipeline.manifest import Manifest
from pipeline.oracle import why_not_asked
from pipeline.pass_list import all_passes
from pipeline.target import Target, find_target, use

_EXPLICIT_BATCH = 1  # flag bit 0 up to TensorRT 10, ignored afterwards


def check_nodes(
    folder: Path, manifest: Manifest, config: Config, announce: Callable[[str], None]
) -> tuple[list[Finding], Manifest]:
    """Lints, rewrites and parses exported.onnx in `folder`.

    Returns:
        The findings, and the manifest with the rewrite where it came to one.
    """
    target = find_target(config.target)
    announce("rewrite")
    found: list[Finding] = []
    try:
        faults = lint(folder / EXPORTED, target, all_passes(config.passes))
        found += _faults(faults.findings)
        found += [Finding("nodes", shortened(text)) for text in faults.warnings]
        manifest, _ = stages.rewrite_stage(
            folder, manifest, target, own=config.passes, skip=config.skip, plugins=config.plugins
        )
    except PipelineError as error:
        if not any(finding.blocks for finding in found):  # else it is said node by node
            found.append(Finding("nodes", shortened(str(error)), blocks=True))
    announce("parse")
    if (folder / MODEL).is_file():
        found += parsed(folder / MODEL, target, config.plugins)
    return found, manifest


def _faults(faults: Sequence[Fault]) -> list[Finding]:
    """One finding for each node that nothing mends; those that a pass mends, by pass."""
    found = []
    mended: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        if fault.mended:
            mended.setdefault((fault.how.partition(": ")[0], fault.op), []).append(fault)
            continue
        where = f"{fault.node}{fault.origin}"
        what = f"{fault.op}: {fault.fault}"
        found.append(Finding("nodes", shortened(what), where, fault.how, fault.certain))
    for (name, op), group in mended.items():
        count = f"{len(group)} {op} node{'s' if len(group) > 1 else ''}"
        what = f"{count} would go wrong as they stand: pass {name} mends them"
        found.append(Finding("nodes", what, f"{group[0].node}{group[0].origin}"))
    return found


def parsed(model: Path, target: Target, plugins: Sequence[str] = ()) -> list[Finding]:
    """What the target's parser says of a model, as far as it can be asked here."""
    if why := why_not_asked(target):
        return [Finding("nodes", f"TensorRT's parser was not asked: {why}")]
    words = f"{target.flavour} parses model.onnx"
    spare = model.with_name(f".{model.name}.parsed")
    try:
        asked = find_plugins(plugins, target)
        with library_folder(target) as env, Child(env) as child:
            text, others = child.call(
                "pipeline._check_nodes:parse_here", model, spare, target, asked
            )
    except ChildDied as died:
        text, others = died.how, []
    except (PipelineError, ChildFailed) as error:  # a custom op without its plugin
        return [Finding("nodes", shortened(str(error)), blocks=True)]
    finally:
        spare.unlink(missing_ok=True)
    if not text:
        return [Finding("nodes", words)]
    complaint = explain(model, target, Said(text))
    found = [Finding("nodes", shortened(str(complaint)), blocks=True)]
    nodes = onnx.load(model, load_external_data=False).graph.node
    for index in others:
        node = nodes[index]
        if node.name and node.name in str(complaint):
            continue
        what = f"{target} can't parse the {called(node)}"
        found.append(Finding("nodes", what, origin_of(node).removeprefix(", from "), blocks=True))
    return found


def parse_here(
    model: Path, spare: Path, target: Target, asked: Sequence[Asked]
) -> tuple[str, list[int]]:
    """In the child: the parser's words, none where it takes the model, and the numbers of all
    nodes that it knows itself unable to parse."""
    trt: Any = use(target)
    brought, _ = load_plugins(trt, asked, target, lambda _: None)
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(_EXPLICIT_BATCH)
    parser = trt.OnnxParser(network, logger)
    ready = prepare(trt, model, spare, target, brought, parser.supports_operator)
    if parser.parse_from_file(str(ready.model)):
        return "", []
    text = "\n".join(str(parser.get_error(n)) for n in range(parser.num_errors))
    return text or "no reason given", _unknown(trt, builder, logger, ready.model, model)


def _unknown(trt: Any, builder: Any, logger: Any, ready: Path, model: Path) -> list[int]:
    """Numbers of the nodes that are in no part which the parser could take (TensorRT 10 on)."""
    parser = trt.OnnxParser(builder.create_network(_EXPLICIT_BATCH), logger)
    if ready != model or not hasattr(parser, "supports_model_v2"):
        return []
    parser.supports_model_v2(model.read_bytes(), str(model))
    known = {n for k in range(parser.num_subgraphs) for n in parser.get_subgraph_nodes(k)}
    count = len(onnx.load(model, load_external_data=False).graph.node)
    return [n for n in range(count) if n not in known]
