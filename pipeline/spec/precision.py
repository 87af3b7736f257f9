"""The precisions of an engine, and the types that are narrower than float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.errors import InputError

if TYPE_CHECKING:  # the help of the command line needs the names of the precisions only
    from pipeline.machine.target import Target
    from pipeline.spec.tensors import Precision

# `--precision auto` searches for a recipe (`pipeline.spec.recipe`) of this half precision
AUTO: Literal["auto"] = "auto"
FOR_AUTO: Precision = "fp16"
Asked = Literal["fp32", "tf32", "fp16", "bf16", "auto"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True)
class NarrowType:
    """A floating-point type with fewer digits than float32.

    Args:
        digits: The bits of the significand, with the leading one that is not stored.
        largest: The largest number.
        smallest: The smallest number with all digits.
    """

    digits: int
    largest: float
    smallest: float

    @property
    def eps(self) -> float:
        """The machine epsilon: the distance of 1 to the next number."""
        return 2.0 ** (1 - self.digits)


# the precisions in which a graph is written in half precision (`pipeline.rewrite.half`)
HALVES: Mapping[str, NarrowType] = {
    "fp16": NarrowType(11, 65504.0, 2.0**-14),
    "bf16": NarrowType(8, 2.0**128 - 2.0**120, 2.0**-126),
}
# TensorFloat-32: products read their operands with fewer digits, and add up in float32
TF32 = NarrowType(11, 2.0**128 - 2.0**117, 2.0**-126)
# the precisions in which products round
ROUNDED: Mapping[str, NarrowType] = {"tf32": TF32, **HALVES}


def check_precision(precision: str, target: Target | None = None) -> None:
    """Raises `InputError` unless an engine can be built in that precision, for that target."""
    if precision == AUTO:
        raise InputError(
            "precision auto: a conversion searches for it. Pass it to pipeline.run or "
            f"pipeline.convert, or name one precision here: {', '.join(PRECISIONS)}"
        )
    if precision not in PRECISIONS:
        known = ", ".join((*PRECISIONS, AUTO))
        raise InputError(f"unknown precision {precision!r}; known: {known}")
    if precision == "bf16" and target is not None and not target.has_bf16:
        raise InputError(
            f"target {target}: this TensorRT has no bf16. Use --precision fp16, or another --target"
        )
