"""Padding round a model whose dims must be multiples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.errors import InputError
from pipeline.spec.given import named_fields

Align = Literal["center", "end"]


PaddingMode = Literal["replicate", "reflect", "constant"]


@named_fields
@dataclass(frozen=True)
class Padding:
    """Padding round a model that only accepts multiples as sizes of some dims.

    Inputs are padded up to the next multiple, and outputs are cropped back. Both are part of the
    ONNX graph and of the engine. So you can pass every size from a dim's min to its max.

    Args:
        multiples: The multiple that the model needs, by dim name.
        mode: What fills the padding, as in torch.nn.functional.pad.
        align: ``center`` puts half of the padding before the input, rounded down. ``end`` puts
            all of it after the input.

    Raises:
        InputError: A multiple, the mode or the alignment is not valid.
    """

    multiples: Mapping[str, int]
    mode: PaddingMode = "replicate"
    align: Align = "center"

    def __post_init__(self) -> None:
        if not isinstance(self.multiples, Mapping):
            form = 'Write for example Padding({"h": 8, "w": 8})'
            raise InputError(f"padding: {self.multiples!r} is not a dict of multiples. {form}")
        if not self.multiples:
            raise InputError("padding: name at least one dim and its multiple")
        for name, multiple in self.multiples.items():
            if type(multiple) is not int or multiple < 2:
                raise InputError(f"padding: {name}={multiple!r}: the multiple must be 2 or more")
        if self.mode not in get_args(PaddingMode):
            known = ", ".join(get_args(PaddingMode))
            raise InputError(f"padding: unknown mode {self.mode!r}; known: {known}")
        if self.align not in ("center", "end"):
            raise InputError(f"padding: unknown align {self.align!r}; known: center, end")


def padded_name(name: str) -> str:
    """The name of a dim's padded size inside the model."""
    return f"{name}_padded"


def amounts(size: int, multiple: int, align: str) -> tuple[int, int]:
    """The padding in elements before and after `size`, up to the next multiple."""
    total = -size % multiple
    before = total // 2 if align == "center" else 0
    return before, total - before
