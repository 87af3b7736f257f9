"""What to do if TensorRT refuses a node, by its message and the op, as one literal table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

# measured: an Attention of opset 23 segfaults the builder of TensorRT-RTX 1.7.1
KNOWN_TO_CRASH = ("Attention",)
# messages of the builder that name an op, but no node
OP_IN_TEXT: tuple[tuple[str, str], ...] = (("Attention", r"\bAttention operation\b"),)


@dataclass(frozen=True)
class Advice:
    """The advice if TensorRT's message matches `text` and the node's op is in `ops`.

    Args:
        says: The advice; ``{dims}`` becomes the names of the dims.
        text: A regular expression; empty matches every message.
        ops: The ops; empty matches every op.
        crash: True if the advice holds only for a process that died.
        since: The first axis whose dims count.
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
        "export at opset 18, which writes attention as MatMul and Softmax",
        text=r"Attention operation was not supported|Segmentation fault|TensorRT Attention|"
        r"TensorRT only supports Attention",
        ops=("Attention",),
    ),
    Advice(
        "export at opset 18, which writes attention as MatMul and Softmax",
        ops=("Attention",),
        crash=True,
    ),
    Advice(
        "one value alone has no variance: raise the min of {dims}, or pad the input",
        text="Total number of elements",
        since=2,
    ),
    Advice(
        "TensorRT supports K up to 3840: use a smaller K, or a TopK for each of several parts",
        text=r"K exceeds the maximum value",
    ),
    Advice(
        "give both branches of the If the same rank, or make its condition a constant",
        text=r"equal ranks when condition",
    ),
    Advice(
        "some sizes do not fit this Reshape: declare a multiple_of or another range for {dims}",
        text=r"Reshape dimension of -1 has no solution|reshape would change volume",
    ),
    Advice(
        "the Reshape gets a size of 0: examine how the model computes its sizes",
        text=r"reshape of non-empty tensor to empty",
    ),
    Advice(
        "use the same Dim for sizes that must be equal ({dims})",
        text=r"mismatching dimensions|not compatible for elementwise|must be conformable|"
        r"all concat input tensors must have the same dimensions|"
        r"subscript \w+ not compatible for einsum",
    ),
    Advice(
        "the node does not accept this size: narrow the range of {dims}, or pad the input",
        text=r"cannot be negative|(?:should|must) be non-negative|out of bounds access|is negative",
    ),
    Advice(
        "this input has a fixed size in the ONNX file: build with that size, or export it dynamic",
        text=r"static dimensions that don't match",
    ),
    Advice(
        "TensorRT can only cast uint8: convert the input before any other op, as in "
        "image.float().permute(0, 3, 1, 2)",
        text=r"has type UInt8",
    ),
    Advice(
        "compute capability 7.5 has no float32 products: build with --precision fp16, or leave "
        "out --gpu sm75",
        text=r"for Turing.*FP32 GEMM is not supported",
    ),
    Advice(
        "this TensorRT is strongly typed: convert the whole module with .half(), or cast one input "
        "to the type of the other, as int32 to int64",
        text=r"must have same input types|first input has type",
    ),
    Advice(
        "the output size depends on the data: use an op with a fixed size, such as TopK, or "
        "Where with a mask",
        ops=_SIZED_BY_DATA,
    ),
    Advice("TensorRT has no sequences: stack the tensors into one tensor", ops=_SEQUENCES),
    Advice(
        "the ONNX file is not valid: onnx.checker reports the fault",
        text=r"input was not registered",
    ),
    Advice("Q/DQ scales must be positive: calibrate again", text=r"Scale coefficients must all be"),
    Advice(
        "use ops that TensorRT has, or write a pass (docs/guide/write-a-pass.md)",
        text=r"UNSUPPORTED_NODE",
    ),
)


def declared_advice(op: str, text: str, crash: bool, dims: Callable[[int], set[str]]) -> str:
    """Returns the first advice of the table that matches; empty if none does.

    Args:
        op: The op of the node.
        text: TensorRT's message.
        crash: True if the process died.
        dims: Returns the names of the node's dims from an axis on.
    """
    for advice in ADVICE:
        fits = not advice.ops or op in advice.ops
        if fits and (crash or not advice.crash) and re.search(advice.text, text):
            return advice.says.format(dims=", ".join(sorted(dims(advice.since))) or "its size")
    return ""
