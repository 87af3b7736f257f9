"""Nodes that TensorRT cannot run and that no pass fixes are refused, with advice.

TensorRT would stop at them too, but the parser only says ``false``, and the builder prints its
compiler's internal errors. These passes run after all rewrites, so they find only what is left.
There are three passes, since the targets differ. If you have a plugin with the op's name, the
parser finds it: run without the pass (``--skip``).

Each entry was tried on tensorrt-rtx 1.7.1, on TensorRT 8.6.0, or on both. The graphs are in
`passes/cases/refuse_unsupported.py`, and the results of 8.6.0 in `passes/cases/measured.json`. For
TensorRT 10 the source is onnx-tensorrt's docs/operators.md for 10.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10, RTX, Versions
from pipeline.passes.graph_ops import is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.known import depends_on_data

_LARGEST_K = 3840
_ENDLESS = 2**31 - 1  # the parser ignores a trip count from here on


@dataclass(frozen=True)
class Entry:
    """Ops that are refused, with the reason and what to do instead.

    Args:
        ops: names in the standard domain.
        why: the reason; the message puts "TensorRT " before it.
        instead: what to write in the model.
        when: True for a node that fails. By default every node fails.
    """

    ops: tuple[str, ...]
    why: str
    instead: str
    when: Callable[[gs.Node], bool] = lambda _: True


def _static(tensor: gs.Tensor) -> bool:
    return tensor.shape is not None and all(isinstance(d, (int, np.integer)) for d in tensor.shape)


def _is_long(node: gs.Node) -> bool:
    k = values_of(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("k")
    return k is not None and int(np.ravel(k)[0]) > _LARGEST_K


def _gives_indices(node: gs.Node) -> bool:
    return len(node.outputs) > 1


def _trains(node: gs.Node) -> bool:
    if node.op == "BatchNormalization":
        return bool(node.attrs.get("training_mode", 0))
    mode = values_of(node.inputs[2]) if len(node.inputs) > 2 else None
    return mode is not None and bool(np.ravel(mode)[0])


def _is_asymmetric(node: gs.Node) -> bool:
    zero = values_of(node.inputs[2]) if len(node.inputs) > 2 else None
    return zero is not None and bool(np.any(zero != 0))


def _is_dilated(node: gs.Node) -> bool:
    return any(int(d) != 1 for d in node.attrs.get("dilations", ()))


def _counts_without_end(node: gs.Node) -> bool:
    number = node.attrs["body"].inputs[0]
    if not number.outputs:
        return False
    if not node.inputs or node.inputs[0].is_empty():
        return True
    most = values_of(node.inputs[0])
    return most is not None and int(np.ravel(most)[0]) >= _ENDLESS


def _branches(node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    pairs = zip(node.attrs["then_branch"].outputs, node.attrs["else_branch"].outputs, strict=True)
    return [(a, b) for a, b in pairs if a.shape is not None and b.shape is not None]


def _has_two_ranks(node: gs.Node) -> bool:
    return depends_on_data(node.inputs[0]) and any(
        len(a.shape) != len(b.shape) for a, b in _branches(node)
    )


def _differ(a: gs.Tensor, b: gs.Tensor) -> bool:
    """True if both have the same rank, and a static axis that differs in size."""
    numbers = [
        (x, y)
        for x, y in zip(a.shape, b.shape, strict=False)
        if isinstance(x, (int, np.integer)) and isinstance(y, (int, np.integer))
    ]
    return len(a.shape) == len(b.shape) and any(x != y for x, y in numbers)


def _has_two_sizes(node: gs.Node) -> bool:
    return depends_on_data(node.inputs[0]) and any(
        _differ(a, b) and not (_static(a) and _static(b)) for a, b in _branches(node)
    )


def _has_two_numbers(node: gs.Node) -> bool:
    return depends_on_data(node.inputs[0]) and any(_differ(a, b) for a, b in _branches(node))


def _follows_if(node: gs.Node) -> bool:
    """True for a cubic Resize of the result of an If whose condition depends on data."""
    if node.attrs.get("mode", "nearest") != "cubic":
        return False
    todo, seen = [node.inputs[0]], set()
    while todo:
        for maker in todo.pop().inputs:
            if is_op(maker, "If") and depends_on_data(maker.inputs[0]):
                return True
            if id(maker) not in seen:
                seen.add(id(maker))
                todo += list(maker.inputs)
    return False


_NOWHERE = (
    Entry(
        (
            "SequenceConstruct",
            "SequenceEmpty",
            "SequenceAt",
            "SequenceInsert",
            "SequenceErase",
            "SequenceLength",
            "SequenceMap",
            "SplitToSequence",
            "ConcatFromSequence",
        ),
        "has no sequences",
        "stack the tensors into one, or unroll the Python list at export",
    ),
    Entry(
        ("Optional", "OptionalGetElement", "OptionalHasElement"),
        "has no optional values",
        "decide at export whether the value is there",
    ),
    Entry(
        ("StringNormalizer", "StringConcat", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"),
        "has no strings",
        "do this step before the model",
    ),
    Entry(("ImageDecoder",), "cannot decode images", "do this step before the model"),
    Entry(("Det",), "has no determinant", "write it out for 2x2 and 3x3, or move it out"),
    Entry(
        ("MaxUnpool",),
        "has no MaxUnpool, and no MaxPool with indices",
        "use a transposed convolution or Resize, or keep the argmax as a mask",
    ),
    Entry(("MaxRoiPool",), "has no MaxRoiPool", "use GridSample (as RoIAlign does) and a maximum"),
    Entry(("BitShift",), "cannot shift bits", "multiply or divide by a power of two"),
    Entry(
        ("Bernoulli", "Multinomial"),
        "does not draw samples with Bernoulli or Multinomial",
        "give the random numbers as an input",
    ),
    Entry(
        ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "DynamicQuantizeLinear"),
        "has no integer arithmetic of this form",
        "quantise with QuantizeLinear and DequantizeLinear around float ops",
    ),
    Entry(
        ("QuantizeLinear", "DequantizeLinear"),
        "quantises with a zero point of 0 only",
        "quantise symmetrically, for example onnxruntime.quantization.quantize_static(..., "
        "extra_options={'ActivationSymmetric': True})",
        _is_asymmetric,
    ),
    Entry(
        ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
        "has no losses",
        "export the model for inference",
    ),
    Entry(
        ("MelWeightMatrix",), "has no MelWeightMatrix", "compute the matrix at export as a constant"
    ),
    Entry(
        ("MaxPool",),
        "has no MaxPool with indices",
        "drop the second output if nothing reads it, or find the positions by a comparison",
        _gives_indices,
    ),
    Entry(
        ("BatchNormalization", "Dropout"),
        "has no training mode",
        "call eval() before the export",
        _trains,
    ),
    Entry(
        ("TopK",),
        f"accepts no K above {_LARGEST_K}",
        f"take the first {_LARGEST_K}, or select in two steps",
        _is_long,
    ),
    Entry(
        ("AveragePool", "MaxPool"),
        "has no pools with dilations",
        "use a convolution with equal weights, or a maximum over slices",
        _is_dilated,
    ),
)

_BELOW_10 = (
    Entry(
        ("GridSample",),
        "8.6 cannot sample volumes (its parser crashes)",
        "gather the eight corners and weigh them, or move this step out of the model",
        lambda node: any(len(t.shape or ()) == 5 for t in node.inputs[:2]),
    ),
    Entry(
        ("STFT",),
        "8.6 has no STFT",
        "cut the signal into frames, multiply them by the window, and use DFT (torch.fft.rfft)",
    ),
    Entry(
        ("Unique",),
        "8.6 has no Unique",
        "end the model before Unique, and do this step on the engine's outputs",
    ),
    Entry(
        ("If",),
        "8.6 needs branches of the same rank and sizes if the condition depends on data",
        "make both branches return the same sizes, or move the choice out of the model",
        lambda node: _has_two_ranks(node) or _has_two_numbers(node),
    ),
)

_RTX_ONLY = (
    Entry(
        ("RoiAlign",),
        "RTX has no RoiAlign plugin",
        "write it with GridSample, or move this step out of the model",
    ),
    Entry(
        ("Loop",),
        "RTX has no iteration number in a Loop without a maximum trip count",
        "carry your own counter, or give a trip count below 2**31 - 1",
        _counts_without_end,
    ),
    Entry(
        ("If",),
        "RTX needs branches of the same rank if the condition depends on data",
        "give both branches the same rank, or move the choice out of the model",
        _has_two_ranks,
    ),
    Entry(
        ("If",),
        "RTX cannot compile branches of different, dynamic sizes if the condition depends on data",
        "make both branches return the same sizes, or move the choice out of the model",
        _has_two_sizes,
    ),
    Entry(
        ("Resize",),
        "RTX cannot compile a cubic Resize of the result of an If whose condition depends on data",
        "use mode linear, or move the choice out of the model",
        _follows_if,
    ),
)


def _refuse(graph: gs.Graph, entries: tuple[Entry, ...]) -> PassResult:
    refused = []
    for _, node in walk(graph):
        for entry in entries:
            if any(is_op(node, op) for op in entry.ops) and entry.when(node):
                refused.append(
                    Change(label(node), node.op, f"TensorRT {entry.why}: {entry.instead}")
                )
                break
    return PassResult((), tuple(refused))


PASS = Pass(
    name="refuse_unsupported",
    run=lambda graph: _refuse(graph, _NOWHERE),
    targets=(RTX, Versions("tensorrt", since=(10,), basis="read"), BELOW_10),
    summary="ops that no TensorRT has, and nodes beyond its documented limits, are refused, with "
    "advice",
    fault="the parser stops with little more than 'false', or the builder fails",
    evidence=(
        "onnx-tensorrt docs/operators.md for 8.5 and for 10.15: N, restrictions",
        "tensorrt-rtx 1.7.1 and TensorRT 8.6.0 fail on each case",
    ),
)
PASS_BELOW_10 = Pass(
    name="refuse_unsupported_below_10",
    run=lambda graph: _refuse(graph, _BELOW_10),
    targets=(BELOW_10,),
    summary="nodes that TensorRT 8.6 cannot run are refused, with advice",
    fault="the parser fails, with a segmentation fault on a GridSample of volumes",
    evidence=("TensorRT 8.6.0 fails on each",),
)
PASS_RTX = Pass(
    name="refuse_unsupported_rtx",
    run=lambda graph: _refuse(graph, _RTX_ONLY),
    targets=(RTX,),
    summary="nodes that TensorRT-RTX cannot run are refused, with advice",
    fault="the parser or the builder fails, the builder with its compiler's internal errors",
    evidence=("tensorrt-rtx 1.7.1 fails on each",),
)
