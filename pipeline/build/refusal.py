"""The error mapper: what TensorRT said, told by ONNX node, module, sizes, and what would mend it.

Where TensorRT names no node (see `pipeline.build.refused_node`), the message says so. The
texts that this and `pipeline.build.advice` know are those of TensorRT-RTX 1.7.1; each is
provoked in ``tests/build/test_refusal.py``.
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
    """The error for what TensorRT said.

    One line: the target, the node, its op, the module and the source line that it came from,
    TensorRT's reason, the sizes of its tensors with the profiles' ranges of their dims, and what
    would mend it. In ``detail`` the same by lines, and TensorRT's own text below.
    """
    graph = NodeIndex(model)
    found = find(graph, said)
    if said.died and not found.why:
        head = (
            f"target {target}: TensorRT's process died: {said.died}, {_doing(graph, said, found)}"
        )
    elif not found.nodes:
        head = f"target {target} refuses {model.name}: {found.why} (TensorRT names no node)"
    elif not found.sure:
        head = f"target {target} refuses one of these: {_names(found.nodes)}: {found.why}"
    else:
        head = f"target {target} refuses the {_who(found.nodes[0])}: {found.why}"
        if others := found.nodes[1:]:
            head += f" (it refuses {_names(others)} too)"
    if at := _AT.search(said.text):
        profiles = profiles[int(at["number"]) :][:1] or profiles
        head += f", at the {at['which'].lower()} of profile {profiles[0].name}" if profiles else ""
    facts = _facts(graph, target, said, found, profiles)
    inside = "; ".join(facts[key] for key in ("sizes", "dims") if facts.get(key))
    line = head + (f" ({inside})" if inside else "")
    line += f"; {facts['to mend it']}" if facts.get("to mend it") else ""
    detail = "\n".join(f"{key + ':':12}{value}" for key, value in facts.items() if value)
    return BuildError(
        flat(line),
        detail=f"{detail}\nTensorRT's words:\n{said.text}".strip(),
        nodes=tuple(map(called, found.nodes)),
    )


def _facts(
    graph: NodeIndex, target: Target, said: BuildFailure, found: Found, profiles: Sequence[Profile]
) -> dict[str, str]:
    """What there is to say of the node; only what holds for all where several may be meant."""
    known = {name for profile in profiles for name in profile.ranges}
    ops = {node.op_type for node in found.nodes}
    died = bool(said.died)
    if not found.nodes or (not found.sure and len(ops) > 1):
        return {"to mend it": declared_advice("", said.text, died, lambda _: set())}
    node = found.nodes[0]
    dims = graph.dims(node)
    advice = _pass_advice(graph.path, target, node) or declared_advice(
        node.op_type, said.text, died, lambda axis: graph.dims(node, axis) & known
    )
    if not found.sure and len(found.nodes) > 1:
        return {"to mend it": advice}
    return {
        "node": _who(node),
        "op": node.op_type,
        "sizes": graph.sizes(node),
        "dims": _ranges(profiles, dims),
        "to mend it": advice,
    }


def readable(warning: str, graph: NodeIndex, profiles: Sequence[Profile]) -> str:
    """A warning of TensorRT's; one about sizes of a profile that the engine can't run names the
    node, its sizes and the declaration that would mend it."""
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
        f"the engine can't run at the {match['which'].lower()} of its profile: {_who(node)}: "
        f"{found.why} ({graph.sizes(node)}; {_ranges(profiles, dims)})"
        f"{f'; {advice}' if advice else ''}"
    )


def _who(node: onnx.NodeProto) -> str:
    return called(node) + origin_of(node)


_PHASES = {
    "half precision": "while half precision was written into it:",
    "parse": "while it parsed",
    "build": "while it built",
}


def _doing(graph: NodeIndex, said: BuildFailure, found: Found) -> str:
    """What the process that died was doing, as far as the trail tells."""
    if said.phase.startswith("plugin "):
        return f"while it loaded the {said.phase}"
    if not found.nodes:
        what = _PHASES.get(said.phase, "on")
        return f"{what} {graph.path.name}; nothing says at which node"
    first = found.nodes[0]
    if found.sure:
        return f"while it {'parsed' if said.parsing else 'compiled'} the {_who(first)}"
    which = "which is not known"
    if first.op_type in KNOWN_TO_CRASH:
        which = f"it is known to crash on {first.op_type}"
    return f"while it compiled {len(said.layers)} nodes, among them {_names(found.nodes)}: {which}"


def _pass_advice(model: Path, target: Target, node: onnx.NodeProto) -> str:
    """What the passes that the target needs would do with the node; they are asked by running
    them on a copy."""
    from pipeline.passes import DEFAULT_PASSES
    from pipeline.rewrite.rewrite import rewrite

    aliases = {
        node.name or next(iter(node.output), ""),
        f"{node.op_type}_{next(iter(node.output), '')}",
    }
    mending = {p.name for p in DEFAULT_PASSES if not p.clean_up}
    try:
        records = rewrite(model, None, target).passes
    except (PipelineError, OSError):  # then the passes have nothing to say
        return ""
    for record in records:
        if record.name in mending and any(c.node in aliases for c in record.rewritten):
            return f"pass {record.name} rewrites such a node, and has not run on this graph"
        for change in record.refused:
            if change.node in aliases:
                return f"pass {record.name} can't mend it: {change.detail}"
    return ""


def _ranges(profiles: Sequence[Profile], dims: set[str]) -> str:
    """``h=2:4:8``, of all profiles that differ."""
    texts = (
        ", ".join(f"{n}={':'.join(map(str, p.ranges[n]))}" for n in sorted(dims) if n in p.ranges)
        for p in profiles
    )
    return " or ".join(dict.fromkeys(text for text in texts if text))


def _names(nodes: Sequence[onnx.NodeProto]) -> str:
    return ", ".join([*map(called, nodes[:3]), *more(len(nodes), 3)])
