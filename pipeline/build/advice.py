"""What to do about a refusal of TensorRT's, by its words and the op: one literal table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

# measured: an Attention of opset 23 segfaults the builder of TensorRT-RTX 1.7.1
KNOWN_TO_CRASH = ("Attention",)
# words of the builder that name no node, but an op
OP_IN_TEXT: tuple[tuple[str, str], ...] = (("Attention", r"\bAttention operation\b"),)


@dataclass(frozen=True)
class Advice:
    """What to do where TensorRT's words match `text` and the node's op is one of `ops`.

    Args:
        says: the advice; ``{dims}`` are the names of the dims involved.
        text: a pattern; empty matches everything.
        ops: empty means any.
        crash: for a process that died.
        since: the axis from which on a tensor's dims matter.
    """

    says: str
    text: str = ""
    ops: tuple[str, ...] = ()
    crash: bool = False
    since: int = 0


_SIZED_BY_DATA = ("NonZero", "NonMaxSuppression", "Compress", "Unique")
_SEQUENCES = (
    "SequenceConstruct", "SequenceAt", "SequenceEmpty", "SequenceInsert", "SplitToSequence",
    "ConcatFromSequence",
)  # fmt: skip

ADVICE: tuple[Advice, ...] = (
    Advice(
        "export at opset 18, which spells attention as MatMul and Softmax",
        text=r"Attention operation was not supported|Segmentation fault|TensorRT Attention|"
        r"TensorRT only supports Attention",
        ops=("Attention",),
    ),
    Advice(
        "export at opset 18, which spells attention as MatMul and Softmax",
        ops=("Attention",),
        crash=True,
    ),
    Advice(
        "a single value has no variance: raise the min of {dims}, or pad the input",
        text="Total number of elements",
        since=2,
    ),
    Advice(
        "TensorRT takes the top 3840 at most: take fewer, or the top of each of several parts",
        text=r"K exceeds the maximum value",
    ),
    Advice(
        "make both branches of the If give the same rank, or its condition a constant",
        text=r"equal ranks when condition",
    ),
    Advice(
        "not every size can be reshaped so: declare a multiple_of, or another range, on {dims}",
        text=r"Reshape dimension of -1 has no solution|reshape would change volume",
    ),
    Advice(
        "the sizes that the Reshape is given leave nothing: look at what computes them",
        text=r"reshape of non-empty tensor to empty",
    ),
    Advice(
        "declare sizes that have to be equal as the same Dim ({dims})",
        text=r"mismatching dimensions|not compatible for elementwise|must be conformable|"
        r"all concat input tensors must have the same dimensions|"
        r"subscript \w+ not compatible for einsum",
    ),
    Advice(
        "the node does not take such a size: narrow the range of {dims}, or pad the input",
        text=r"cannot be negative|(?:should|must) be non-negative|out of bounds access|is negative",
    ),
    Advice(
        "this input has a fixed size in the ONNX file: build with that size, or export it dynamic",
        text=r"static dimensions that don't match",
    ),
    Advice(
        "TensorRT only casts uint8: convert it right where it comes in, before it is moved, as in "
        "image.float().permute(0, 3, 1, 2)",
        text=r"has type UInt8",
    ),
    Advice(
        "this TensorRT is strongly typed: convert the whole module with .half(), or cast one side",
        text=r"must have same input types|first input has type",
    ),
    Advice(
        "the size of its output depends on the data: use a form of fixed size, such as the top k "
        "or Where with a mask",
        ops=_SIZED_BY_DATA,
    ),
    Advice("TensorRT has no sequences: stack the tensors into one", ops=_SEQUENCES),
    Advice("the ONNX file is not valid: onnx.checker tells more", text=r"input was not registered"),
    Advice("Q/DQ scales must be positive: calibrate again", text=r"Scale coefficients must all be"),
    Advice(
        "spell it with ops that TensorRT has, or write a pass that does (CONTRIBUTING, A pass)",
        text=r"UNSUPPORTED_NODE",
    ),
)


def declared_advice(op: str, text: str, crash: bool, dims: Callable[[int], set[str]]) -> str:
    """The first advice of the table that fits, or nothing.

    Args:
        dims: the names of the dims involved, from an axis on.
    """
    for advice in ADVICE:
        fits = not advice.ops or op in advice.ops
        if fits and (crash or not advice.crash) and re.search(advice.text, text):
            return advice.says.format(dims=", ".join(sorted(dims(advice.since))) or "its size")
    return ""
