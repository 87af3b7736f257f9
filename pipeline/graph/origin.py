"""The names of ONNX nodes in messages, and the lines of the model that made them."""

from __future__ import annotations

import re

import onnx


def called(node: onnx.NodeProto) -> str:
    """``Conv node /head/conv``; a node without a name is named after its first output."""
    domain = f"{node.domain}::" if node.domain not in ("", "ai.onnx") else ""
    name = node.name or f"that makes {next(iter(node.output), 'nothing')}"
    return f"{domain}{node.op_type} node {name}"


def origin_of(node: onnx.NodeProto) -> str:
    """``, from module ... at file:line``: `source_of` as the end of a sentence."""
    source = source_of(node)
    return f", from {source}" if source else ""


def source_of(node: onnx.NodeProto) -> str:
    """``module ... at file:line`` from the exporter's metadata; empty if there is none."""
    module, (file, line) = module_of(node), model_line_of(node)
    parts = [f"module {module}" if module else "", f"at {file}:{line}" if file else ""]
    return " ".join(part for part in parts if part)


TOP = "(top)"


def module_of(node: onnx.NodeProto) -> str:
    """The path of the module that made the node; `TOP` for the whole model, empty if unknown."""
    scopes = metadata_of(node).get("pkg.torch.onnx.name_scopes", "")
    names = re.findall(r"'([^']*)'", scopes)
    return (names[-2] or TOP) if len(names) > 1 else ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


NOWHERE = ("", 0)


def line_of(node: onnx.NodeProto) -> tuple[str, int]:
    """The innermost frame of the node's stack trace, as (file, line)."""
    return next(reversed(_frames(node)), NOWHERE)


def model_line_of(node: onnx.NodeProto) -> tuple[str, int]:
    """As `line_of`, but the code that called the layer, not the code of torch's own layers."""
    frames = _frames(node)
    return next((f for f in reversed(frames) if "/torch/nn/" not in f[0]), line_of(node))


def metadata_of(node: onnx.NodeProto) -> dict[str, str]:
    """The exporter's metadata of a node, by key."""
    return {p.key: p.value for p in node.metadata_props}


def _frames(node: onnx.NodeProto) -> list[tuple[str, int]]:
    """The stack trace of a node: (file, line) of each frame, the innermost last."""
    found = _FRAME.findall(metadata_of(node).get("pkg.torch.onnx.stack_trace", ""))
    return [(file, int(line)) for file, line in found]


# the origin of ops in well-known domains, and what to do
DOMAINS: dict[str, str] = {
    "com.microsoft": "ONNX Runtime's optimiser made this op; export without the optimiser",
    "com.microsoft.nchwc": "ONNX Runtime's optimiser made this op; export without the optimiser",
    "ai.onnx.contrib": "this op belongs to ONNX Runtime Extensions; leave pre- and "
    "post-processing out of the graph",
    "ai.onnx.ml": "TensorRT does not support classical machine learning; leave this op out of the "
    "graph",
    "mmdeploy": "MMDeploy's library has the plugin; pass --plugin libmmdeploy_tensorrt_ops.so",
    "org.pytorch.aten": "the exporter has no ONNX translation of this torch op; export with "
    "torch.onnx.export(dynamo=True), or write the translation",
}
