"""Patches for torch 2.13: the faults of torch while it traces or exports a model.

Each entry of `PIECES` mends one fault of torch by exchanging something of torch, or a name in the
model's modules. `mended` applies them round a call of torch, and puts everything back afterwards.

tests/export/torch_2_13/test_pieces.py shows each fault without its piece. Such a test fails as soon
as torch no longer needs the piece; then delete the piece, or set its `needed_below`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.torch_version import TorchVersion

from pipeline.export.declared import Sizes, declaring
from pipeline.export.torch_2_13 import (
    decompose,
    exact_constants,
    group_dtypes,
    known_shapes,
    lengths,
    negative_divisors,
    padded_rows,
    patterns,
    plain_data,
    recurrent,
    rounded,
    short_sizes,
    size_tensors,
    slices,
    symbolic_steps,
    texts,
    whole,
)

Call = Literal["torch.export.export", "torch.onnx.export"]


@dataclass(frozen=True)
class Piece:
    """One fault of torch, and the patch that mends it.

    Args:
        name: the piece's name, which is its module's in this folder.
        seen: the version of torch that has the fault.
        without: the behaviour of torch without the piece, in one sentence.
        apply: makes the context manager that mends the fault, for a model and the sizes declared
            for the arguments of its ``forward``.
        during: the calls of torch that need the piece.
        needed_below: the first version of torch without the fault; None while none is known.
        threads: addresses of public threads on the fault, or on code that has it.
    """

    name: str
    seen: str
    without: str
    apply: Callable[[torch.nn.Module, Sizes], AbstractContextManager[Any]]
    during: tuple[Call, ...] = ("torch.export.export",)
    needed_below: str | None = None
    threads: tuple[str, ...] = ()

    def needed(self) -> bool:
        """True if the installed torch may have the fault."""
        return self.needed_below is None or TorchVersion(torch.__version__) < self.needed_below


PIECES: tuple[Piece, ...] = (
    Piece(
        "recurrent",
        seen="2.13.0",
        without="The time axis of LSTM, GRU and RNN becomes a constant, the example's length.",
        apply=lambda module, sizes: recurrent.dynamic_time(),  # noqa: ARG005
        during=("torch.export.export", "torch.onnx.export"),
        threads=(
            "https://github.com/pytorch/pytorch/issues/115092",
            "https://github.com/pytorch/pytorch/issues/191855",
        ),
    ),
    Piece(
        "symbolic_steps",
        seen="2.13.0",
        without="linspace, windows, tril_indices, diagonal, affine_grid, cdist, chunk, split, "
        "tensor_split, one_hot, take_along_dim, kron and pools make a constant of a symbolic size, "
        "or fail at it.",
        apply=lambda module, sizes: symbolic_steps.SymbolicSteps(),  # noqa: ARG005
        threads=(
            "https://github.com/pytorch/pytorch/pull/184939",  # linspace
            "https://github.com/pytorch/pytorch/issues/134663",  # chunk
        ),
    ),
    Piece(
        "whole",
        seen="2.13.0",
        without="int() of a quotient of sizes, as in attention over windows, bakes the example's "
        "size in.",
        apply=whole.whole_numbers,
        threads=("https://github.com/microsoft/Swin-Transformer/pull/257",),
    ),
    Piece(
        "lengths",
        seen="2.13.0",
        without="len(x) of a tensor bakes the example's size in.",
        apply=lambda module, sizes: lengths.symbolic_lengths(module),  # noqa: ARG005
    ),
    Piece(
        "short_sizes",
        seen="2.13.0",
        without="Expressions of padded sizes grow with each layer, and the guards on them take "
        "minutes.",
        apply=lambda module, sizes: short_sizes.short_sizes(sizes),  # noqa: ARG005
    ),
    Piece(
        "slices",
        seen="2.13.0",
        without="x[:8] of a dynamic axis has 8 elements at every size, or all, as at the example.",
        apply=lambda module, sizes: slices.open_slices(),  # noqa: ARG005
        during=("torch.export.export", "torch.onnx.export"),
    ),
    Piece(
        "negative_divisors",
        seen="2.13.0",
        without="(s//2)//-2 is merged to s//-4, which is another number at odd s.",
        apply=lambda module, sizes: negative_divisors.positive_divisors(),  # noqa: ARG005
    ),
    Piece(
        "padded_rows",
        seen="2.13.0",
        without="nn.TransformerEncoder with a padding mask computes padded positions, which are 0 "
        "in eager mode.",
        apply=lambda module, sizes: padded_rows.padded_rows(),  # noqa: ARG005
        threads=("https://github.com/pytorch/pytorch/issues/86120",),
    ),
    Piece(
        "texts",
        seen="2.13.0",
        without="A text made of a symbolic size, such as a table's key, is s77 for every size.",
        apply=lambda module, sizes: texts.true_texts(),  # noqa: ARG005
    ),
    Piece(
        "rounded",
        seen="2.13.0",
        without="round(size, -1) is the size itself, and size // 1.3 is floor(size / 1.3).",
        apply=lambda module, sizes: rounded.true_rounding(),  # noqa: ARG005
    ),
    Piece(
        "plain_data",
        seen="2.13.0",
        without="A weight that forward reads by .data is a constant without values.",
        apply=lambda module, sizes: plain_data.PlainData(),  # noqa: ARG005
    ),
    Piece(
        "group_dtypes",
        seen="2.13.0",
        without="grouped_mm of float32 or float16, as in a mixture of experts, can't be traced.",
        apply=lambda module, sizes: group_dtypes.every_dtype(),  # noqa: ARG005
        during=("torch.export.export", "torch.onnx.export"),
    ),
    Piece(
        "decompose",
        seen="2.13.0",
        without="torch.onnx.export traces the whole program three times more, which takes longer "
        "than the first trace.",
        apply=lambda module, sizes: decompose.op_by_op(),  # noqa: ARG005
        during=("torch.onnx.export",),
    ),
    Piece(
        "exact_constants",
        seen="2.13.0",
        without="x + 1e-8 is written as x, and x * 0.999991 too.",
        apply=lambda module, sizes: exact_constants.exact_constants(),  # noqa: ARG005
        during=("torch.onnx.export",),
    ),
    Piece(
        "known_shapes",
        seen="2.13.0",
        without="The shapes of norms, activations, interpolation and grid_sample are found by "
        "tracing their arithmetic.",
        apply=lambda module, sizes: known_shapes.at_once(),  # noqa: ARG005
        during=("torch.export.export", "torch.onnx.export"),
    ),
    Piece(
        "patterns",
        seen="2.13.0",
        without="The optimizer that torch.onnx.export calls takes a time that grows with the "
        "square of the nodes.",
        apply=lambda module, sizes: patterns.by_first_output(),  # noqa: ARG005
        during=("torch.onnx.export",),
    ),
    Piece(
        "size_tensors",
        seen="2.13.0",
        without="A number that a model keeps in a buffer, or computes from its sizes in a tensor, "
        "depends on data.",
        apply=lambda module, sizes: size_tensors.SizeTensors(module),  # noqa: ARG005
    ),
)


@contextmanager
def mended(
    module: torch.nn.Module, sizes: Sizes, during: Call = "torch.export.export"
) -> Iterator[None]:
    """Applies the pieces that a call of torch needs, and puts everything back afterwards.

    Args:
        module: the model, or the program's graph module.
        sizes: the declared sizes, by the argument of the model's ``forward`` and the axis.
        during: the call of torch that follows.
    """
    with ExitStack() as stack:
        stack.enter_context(declaring(sizes))
        for piece in PIECES:
            if during in piece.during and piece.needed():
                stack.enter_context(piece.apply(module, sizes))
        yield
