"""Finds the ONNX node and the reason in TensorRT's error messages.

The parser names a node by name and index. The builder names the layer: the node's name, or
``node_of_<output>``. Myelin names the tensor. After a crash, the trail of a verbose run shows the
last node (`pipeline.build.build`). Some messages name no node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import numpy_helper

from pipeline.build.advice import KNOWN_TO_CRASH, OP_IN_TEXT
from pipeline.graph.files import infer_shapes, nodes_of

# "In node 3 with name: node_X and operator: NonZero (importNonZero): UNSUPPORTED_NODE: why"
# (8.6: "In node 3 (importNonZero): UNSUPPORTED_NODE: why")
_PARSER = re.compile(
    r"In node (?P<index>-?\d+)(?: with name: (?P<name>.*?) and operator: (?P<op>\w*))?"
    r"(?: \(\w+\))?: (?P<code>[A-Z_]+): (?P<why>.*)"
)
# "(ITopKLayer node_of_y: node_of_y: why In f at /file:1": anything before a colon may be a layer
_BEFORE_COLON = re.compile(r"(?P<name>[^\s:()\[\],]+): ")
# "y : f32[1, 1] = resize(x), mode=linear, name=rs_resize"
_MYELIN = re.compile(r"^\s*(?P<name>\S+) : \w+\[.* = \w+\(.*", re.MULTILINE)
_MYELIN_WHY = re.compile(r"Error is:\s*(?P<why>.*?)(?: In compileGraph|\Z)", re.DOTALL)
_SOURCE = re.compile(r"\.? In (?:operator\(\)|\w+) at /.*", re.DOTALL)
_MYELIN_CHECK = re.compile(r"^.*MyelinCheckException: \S+ CHECK\(.*?\)\)? failed\. ", re.DOTALL)
_SEE = re.compile(r" *\(See https://[^)]*\).*", re.DOTALL)
_CHECK = re.compile(r"\.? Condition '.*?' violated: (?P<values>[^.]*)\..*", re.DOTALL)
_WORDS = re.compile(r'&& "(?P<why>.*)"|Assertion failed: .*?\)?: (?P<said>[A-Z].*)')
_INNER = re.compile(
    r"Error Code \d+: [\w ]+ \((?P<why>.*?) In (?:operator\(\)|\w+) at /", re.DOTALL
)
_UNNAMED = "node_of_"
_LAYER_ENDINGS = ("_OutputLayer", "_InputLayer", "_normalized", "_AttentionOutput")
_MOST = 6  # tensors and numbers that a line lists


@dataclass(frozen=True)
class BuildFailure:
    """The known facts of a failure.

    Args:
        text: TensorRT's message, or the end of stderr of a process that died.
        died: How the process ended (``Segmentation fault (SIGSEGV)``); empty if it did not die.
        phase: The running step: ``plugin libfoo.so``, ``parse``, ``build``.
        parsing: The node that the parser had reached, by a verbose run.
        layers: The nodes that the builder compiled together, by a verbose run.
    """

    text: str
    died: str = ""
    phase: str = ""
    parsing: str = ""
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The nodes of a message.

    Args:
        nodes: The named nodes, in the order of the message; or the candidates.
        why: TensorRT's reason, in one line; empty if it gave none.
        sure: True if every node is named. False if one of the nodes is meant.
    """

    nodes: tuple[onnx.NodeProto, ...]
    why: str
    sure: bool = True


class NodeIndex:
    """A model's nodes by TensorRT's names, and the shapes of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._model = onnx.load(path, load_external_data=False)
        except Exception:  # no file, or an error of protobuf: then no node is known
            self._model = onnx.ModelProto()
        infer_shapes(self._model)
        graph = self._model.graph
        self._top = list(graph.node)
        self.nodes = list(nodes_of(graph))
        self.nodes += [node for function in self._model.functions for node in function.node]
        inner = [a.g for node in self.nodes for a in node.attribute if a.HasField("g")]
        self._values: dict[str, onnx.TypeProto.Tensor] = {}
        self._constants: dict[str, onnx.TensorProto] = {}
        for part in (graph, *inner):
            for value in (*part.input, *part.output, *part.value_info):
                self._values[value.name] = value.type.tensor_type
            self._constants |= {tensor.name: tensor for tensor in part.initializer}

    def node(self, name: str) -> onnx.NodeProto | None:
        """Returns the node of a name in TensorRT's message."""
        if not name:
            return None
        for node in self.nodes:
            label = node.name or f"{_UNNAMED}{next(iter(node.output), '')}"
            if name == label:
                return node
            rest = name.removeprefix(label) if name.startswith(label) else ""
            if rest in _LAYER_ENDINGS or rest == f"_{node.op_type.lower()}":
                return node
        return None

    def maker(self, tensor: str) -> onnx.NodeProto | None:
        return next((n for n in self.nodes if tensor and tensor in n.output), None)

    def at(self, index: int, op: str) -> onnx.NodeProto | None:
        """Returns the node at that index of the main graph, if it has that op."""
        node = self._top[index] if 0 <= index < len(self._top) else None
        return node if node is not None and op in ("", node.op_type) else None

    def sizes(self, node: onnx.NodeProto) -> str:
        """Returns the shapes as ``x [1, h], k = [4000] -> y [1, 4000]``."""
        inputs, outputs = (
            ", ".join([*map(self._tensor, filter(None, names[:_MOST])), *more(len(names), _MOST)])
            for names in (node.input, node.output)
        )
        return f"{inputs} -> {outputs}"

    def dims(self, node: onnx.NodeProto, since: int = 0) -> set[str]:
        """Returns the names of the dims in the node's shapes, from axis `since` on."""
        shapes = [
            self._values[name].shape.dim[since:]
            for name in (*node.input, *node.output)
            if name in self._values
        ]
        texts = (d.dim_param for shape in shapes for d in shape)
        return {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}

    def _tensor(self, name: str) -> str:
        constant = self._constants.get(name)
        if constant is not None:
            few = not constant.external_data and sum(constant.dims) <= _MOST
            dims = list(constant.dims)
            return (
                f"{name} = {numpy_helper.to_array(constant).tolist()}" if few else f"{name} {dims}"
            )
        value = self._values.get(name)
        if value is None or not value.HasField("shape"):
            return f"{name} [?]"
        sizes = (
            str(d.dim_value) if d.HasField("dim_value")
            else "?" if not d.dim_param or d.dim_param.startswith("unk__") else d.dim_param
            for d in value.shape.dim
        )  # fmt: skip
        return f"{name} [{', '.join(sizes)}]"


def find(graph: NodeIndex, said: BuildFailure) -> Found:
    """Returns the nodes that the message or the trail names, and TensorRT's reason."""
    nodes: list[onnx.NodeProto] = []
    why = ""
    for match in _PARSER.finditer(said.text):
        node = graph.node(match["name"] or "")
        node = node or (None if match["name"] else graph.at(int(match["index"]), match["op"] or ""))
        why = why or _parser_words(match["why"], said.text)
        if node is not None and node not in nodes:
            nodes.append(node)
    if nodes:
        return Found(tuple(nodes), why)
    if why:
        return _trail(graph, said, why)
    for match in _MYELIN.finditer(said.text):
        end = re.search(r"name=([^\s,)]+)", match[0])
        node = (
            graph.node(end[1] if end else "")
            or graph.node(match["name"])
            or graph.maker(match["name"])
        )
        reason = _MYELIN_WHY.search(said.text)
        if node is not None and reason:
            return Found((node,), _cleaned(reason["why"]))
    for match in _BEFORE_COLON.finditer(said.text):
        node = graph.node(match["name"])
        if node is not None:
            why = said.text[match.end() :].split("\n[")[0].removeprefix(f"{match['name']}: ")
            return Found((node,), _cleaned(why))
    return _trail(graph, said, "" if said.died else _first_error(said.text))


def _trail(graph: NodeIndex, said: BuildFailure, why: str) -> Found:
    """Returns the nodes of a message without a name, by the trail of a verbose run."""
    if said.parsing:
        node = graph.node(said.parsing)
        return Found((node,) if node is not None else (), why)
    layers = [node for name in said.layers if (node := graph.node(name)) is not None]
    for op, pattern in OP_IN_TEXT:
        meant = [node for node in graph.nodes if node.op_type == op]
        if re.search(pattern, said.text) and meant:
            return Found(tuple(meant), why, sure=len(meant) == 1)
    # the builder compiles many nodes together
    meant = [node for node in layers if node.op_type in KNOWN_TO_CRASH] if said.died else []
    return Found(tuple(meant or layers), why, sure=len(layers) == 1)


def _parser_words(why: str, text: str) -> str:
    if why.startswith("Invalid Node - ") and (inner := _INNER.search(text)):
        return _cleaned(re.sub(r"^[^\s:()]+: ", "", inner["why"]))
    if why.strip() in ("false", "Assertion failed: false"):
        return "the parser does not know the op"
    match = _WORDS.search(why)
    return _cleaned((match["why"] or match["said"]) if match else why)


def _cleaned(why: str) -> str:
    """Removes the places in TensorRT's source code, and the conditions of its checks."""
    why = _CHECK.sub(lambda match: f" ({match['values']})", why)
    return flat(_SOURCE.sub("", why)).rstrip(". ")


def _first_error(text: str) -> str:
    inner = _INNER.search(text)
    if inner:
        return _cleaned(inner["why"])
    if _MYELIN_CHECK.search(text):
        return _cleaned(_SEE.sub("", _MYELIN_CHECK.sub("", text)))
    lines = (line.strip() for line in text.splitlines() if line.strip())
    return _cleaned(re.sub(r"^\[[EW!]\] ", "", next(lines, "no reason given")))


def more(count: int, shown: int) -> list[str]:
    return [f"and {count - shown} more"] if count > shown else []


def flat(text: str) -> str:
    return " ".join(text.split())
