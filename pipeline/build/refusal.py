"""Turns an error of TensorRT into a message with the ONNX node, module, sizes and advice.

If TensorRT names no node, the message says so (see `pipeline.build.refused_node`). The known texts
are those of TensorRT-RTX 1.7.1. ``tests/build/test_refusal.py`` provokes each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import onnx

from pipeline.build.advice import KNOWN_TO_CRASH, declared_advice
from pipeline.build.refused_node import BuildFailure, Found, NodeIndex, find, flat, more
from pipeline.errors import BuildError, PipelineError
from pipeline.graph.origin import called, origin_of
from pipeline.machine.target import Target
from pipeline.spec.profiles import Profile

_AT = re.compile(r"k(?P<which>MIN|OPT|MAX) values for profile (?P<number>\d+)")
_INCONSISTENT = re.compile(r"Profile k(?P<which>MIN|OPT|MAX) values are not self-consistent\. ")


def explain(
    model: Path, target: Target, said: BuildFailure, profiles: Sequence[Profile] = ()
) -> BuildError:
    """Returns the error for a failure of TensorRT.

    The message has one line: the target, the node, its op, module and source line, TensorRT's
    reason, the sizes of its tensors, the ranges of their dims, and the advice. ``detail`` has the
    same facts line by line, and then TensorRT's own text.
    """
    graph = NodeIndex(model)
    found = find(graph, said)
    if said.died and not found.why:
        head = f"target {target}: TensorRT crashed: {_ending(said)}, {_doing(graph, said, found)}"
    elif not found.nodes:
        head = f"target {target} refuses {model.name}: {found.why} (TensorRT names no node)"
    elif not found.sure:
        head = f"target {target} refuses one of these: {_names(found.nodes)}: {found.why}"
    else:
        head = f"target {target} refuses the {_who(found.nodes[0])}: {found.why}"
        if others := found.nodes[1:]:
            head += f" (it also refuses {_names(others)})"
    if at := _AT.search(said.text):
        profiles = profiles[int(at["number"]) :][:1] or profiles
        head += f", at the {at['which'].lower()} of profile {profiles[0].name}" if profiles else ""
    facts = _facts(graph, target, said, found, profiles)
    inside = "; ".join(facts[key] for key in ("sizes", "dims") if facts.get(key))
    line = head + (f" ({inside})" if inside else "")
    line += f"; {facts['to fix it']}" if facts.get("to fix it") else ""
    detail = "\n".join(f"{key + ':':12}{value}" for key, value in facts.items() if value)
    return BuildError(
        flat(line),
        detail=f"{detail}\nTensorRT's message:\n{said.text}".strip(),
        nodes=tuple(map(called, found.nodes)),
    )


def _facts(
    graph: NodeIndex, target: Target, said: BuildFailure, found: Found, profiles: Sequence[Profile]
) -> dict[str, str]:
    """Returns the facts of the node. With several candidates, only the facts common to all."""
    known = {name for profile in profiles for name in profile.ranges}
    ops = {node.op_type for node in found.nodes}
    died = bool(said.died)
    if not found.nodes or (not found.sure and len(ops) > 1):
        return {"to fix it": declared_advice("", said.text, died, lambda _: set())}
    node = found.nodes[0]
    dims = graph.dims(node)
    advice = _pass_advice(graph.path, target, node) or declared_advice(
        node.op_type, said.text, died, lambda axis: graph.dims(node, axis) & known
    )
    if not found.sure and len(found.nodes) > 1:
        return {"to fix it": advice}
    return {
        "node": _who(node),
        "op": node.op_type,
        "sizes": graph.sizes(node),
        "dims": _ranges(profiles, dims),
        "to fix it": advice,
    }


def readable(warning: str, graph: NodeIndex, profiles: Sequence[Profile]) -> str:
    """Returns a warning of TensorRT. If the engine cannot run some sizes, the text gets the node,
    its sizes and the advice."""
    match = _INCONSISTENT.search(warning)
    found = find(graph, BuildFailure(warning[match.end() :])) if match else None
    if match is None or found is None or not found.nodes:
        return warning
    node = found.nodes[0]
    dims = graph.dims(node)
    known = {name for profile in profiles for name in profile.ranges}
    advice = declared_advice(
        node.op_type, warning, False, lambda axis: graph.dims(node, axis) & known
    )
    return flat(
        f"the engine cannot run at the {match['which'].lower()} of its profile: {_who(node)}: "
        f"{found.why} ({graph.sizes(node)}; {_ranges(profiles, dims)})"
        f"{f'; {advice}' if advice else ''}"
    )


def _who(node: onnx.NodeProto) -> str:
    return called(node) + origin_of(node)


_PHASES = {
    "half precision": "while pipeline wrote half precision into",
    "parse": "while parsing",
    "build": "while building",
}


def _ending(said: BuildFailure) -> str:
    """Returns how the process ended, with its last line if it ended itself."""
    lines = said.text.splitlines()
    return f"{said.died} ({lines[-1][:200]})" if lines and "exit code" in said.died else said.died


def _doing(graph: NodeIndex, said: BuildFailure, found: Found) -> str:
    """Returns what the crashed process was doing, by the trail."""
    if said.phase.startswith("plugin "):
        return f"while loading the {said.phase}"
    if not found.nodes:
        what = _PHASES.get(said.phase, "on")
        return f"{what} {graph.path.name}; the node is not known"
    first = found.nodes[0]
    if found.sure:
        return f"while {'parsing' if said.parsing else 'compiling'} the {_who(first)}"
    which = "the exact node is not known"
    if first.op_type in KNOWN_TO_CRASH:
        which = f"TensorRT is known to crash on {first.op_type}"
    return f"while compiling {len(said.layers)} nodes, among them {_names(found.nodes)}: {which}"


def _pass_advice(model: Path, target: Target, node: onnx.NodeProto) -> str:
    """Returns what the target's passes do with the node, by running the passes on a copy."""
    from pipeline.passes import DEFAULT_PASSES
    from pipeline.rewrite.rewrite import rewrite

    aliases = {
        node.name or next(iter(node.output), ""),
        f"{node.op_type}_{next(iter(node.output), '')}",
    }
    mending = {p.name for p in DEFAULT_PASSES if not p.clean_up}
    try:
        records = rewrite(model, None, target).passes
    except (PipelineError, OSError):  # then the passes give no advice
        return ""
    for record in records:
        if record.name in mending and any(c.node in aliases for c in record.rewritten):
            return f"pass {record.name} rewrites this node, but did not run on this graph"
        for change in record.refused:
            if change.node in aliases:
                return f"pass {record.name} cannot rewrite it: {change.detail}"
    return ""


def _ranges(profiles: Sequence[Profile], dims: set[str]) -> str:
    """Returns ranges as ``h=2:4:8``, one text for profiles with equal ranges."""
    texts = (
        ", ".join(f"{n}={':'.join(map(str, p.ranges[n]))}" for n in sorted(dims) if n in p.ranges)
        for p in profiles
    )
    return " or ".join(dict.fromkeys(text for text in texts if text))


def _names(nodes: Sequence[onnx.NodeProto]) -> str:
    return ", ".join([*map(called, nodes[:3]), *more(len(nodes), 3)])
