"""Padding round a model whose dims have to be multiples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.errors import InputError

Align = Literal["center", "end"]


PaddingMode = Literal["replicate", "reflect", "constant"]


@dataclass(frozen=True)
class Padding:
    """Padding round the model, for dims of which the model takes only some multiple.

    The inputs are padded up to the next multiple, the outputs cropped back; both are part of
    the ONNX graph and of the engine, so that every size from a dim's min to its max is legal
    to the user.

    Args:
        multiples: dim name to the multiple that the model takes.
        mode: what fills the padding, with torch.nn.functional.pad's words.
        align: ``center`` puts the smaller half before (as RAFT's own InputPadder does),
            ``end`` puts all of it behind.
    """

    multiples: Mapping[str, int]
    mode: PaddingMode = "replicate"
    align: Align = "center"

    def __post_init__(self) -> None:
        if not self.multiples:
            raise InputError("padding: name at least one dim and the multiple that it takes")
        for name, multiple in self.multiples.items():
            if type(multiple) is not int or multiple < 2:
                raise InputError(f"padding: {name}={multiple!r}: the multiple must be 2 or more")
        if self.mode not in get_args(PaddingMode):
            known = ", ".join(get_args(PaddingMode))
            raise InputError(f"padding: unknown mode {self.mode!r}; known: {known}")
        if self.align not in ("center", "end"):
            raise InputError(f"padding: unknown align {self.align!r}; known: center, end")


def padded_name(name: str) -> str:
    """What the padded size of a dim is called inside the model."""
    return f"{name}_padded"


def amounts(size: int, multiple: int, align: str) -> tuple[int, int]:
    """How many elements go before and behind `size` to reach the next multiple."""
    total = -size % multiple
    before = total // 2 if align == "center" else 0
    return before, total - before
