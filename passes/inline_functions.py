"""Model-local functions are replaced by their nodes.

The other passes do not look into functions, and TensorRT 8.6's parser does not read them. So all
functions are inlined, except those for which the target runs a plugin (`keeping`).
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner

from pipeline.graph.files import lightened, with_weights
from pipeline.machine.target import EVERY
from pipeline.passes.infra import Change, Pass, PassResult


def keeping(names: frozenset[str]) -> Pass:
    """The pass without the functions of these names, which stay."""

    def run(model: onnx.ModelProto) -> PassResult:
        """Inlines functions. A new node gets the call's name as a prefix, and its metadata."""
        todo = [f for f in model.functions if f.name not in names]
        if not todo:
            return PassResult(())
        called = {(f.domain, f.name) for f in todo}
        inlined = onnx.inliner.inline_selected_functions(lightened(model), sorted(called), False)
        hand_down(model.graph, inlined.graph, lambda n: (n.domain, n.op_type) in called)
        whole = with_weights(inlined, model)
        for place in reversed(range(len(whole.functions))):
            if (whole.functions[place].domain, whole.functions[place].name) in called:
                del whole.functions[place]
        model.CopyFrom(whole)
        return PassResult(
            tuple(
                Change(f.name, f"{f.domain}::{f.name}", f"function of {len(f.node)} nodes inlined")
                for f in todo
            )
        )

    return Pass(
        name="inline_functions",
        run=run,
        level="model",
        targets=EVERY,
        summary="model-local functions -> their nodes",
        fault="TensorRT 8.6 does not read functions, and the other passes do not look into them",
        evidence=(
            "TensorRT 8.6's parser reads no model-local functions",
            "the other passes work on nodes",
        ),
    )


def hand_down(
    before: onnx.GraphProto, after: onnx.GraphProto, replaced: Callable[[onnx.NodeProto], bool]
) -> None:
    """Names the nodes that onnx.inliner inserted ``<name>/<op>_<number>``, and gives them the
    metadata of the node that they replace.

    Args:
        before, after: the graph before and after inlining.
        replaced: whether a node of `before` was replaced.
    """
    rest = list(after.node)
    for node in before.node:
        if not replaced(node):
            if rest and rest[0].op_type == node.op_type:
                for mine, other in zip(node.attribute, rest[0].attribute, strict=False):
                    if mine.HasField("g"):
                        hand_down(mine.g, other.g, replaced)
                rest.pop(0)
            continue
        waiting, number = {name for name in node.output if name}, 0
        while waiting and rest:
            new = rest.pop(0)
            new.name = f"{node.name or node.output[0]}/{new.op_type.lower()}_{number}"
            if not new.metadata_props:
                new.metadata_props.extend(node.metadata_props)
            waiting -= set(new.output)
            number += 1


PASS = keeping(frozenset())
