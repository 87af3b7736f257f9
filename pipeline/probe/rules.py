"""What torch.export says about a model's dims, put in plain words and in declarations.

torch.export fails with guards (``(L['x'].size()[2] % 8) == 0``) and "Suggested fixes"
(``_h = Dim('_h', min=17, max=270)``, ``h = 8*_h``). `find_rules` reads the fixes; `GuardLog`
finds the line of the model that made each guard, which the error does not say, by listening
to the shape environment's log while the model is traced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.errors import InputError
from pipeline.spec.dims import Dim


@dataclass(frozen=True)
class Rule:
    """One thing that a model asks of a dim, as torch.export suggests it or as trying it shows.

    Args:
        dim: the dim's name.
        words: the rule in plain words.
        declare: what to write instead.
        refined: the narrower dim that obeys the rule; None where no Dim can say it.
        line: ``file:line in function: code`` of the model, where it is known.
        size_rule: what says it in `ModelSpec.rules` where no Dim can (``h*w <= 10000``), where
            that is known.
    """

    dim: str
    words: str
    declare: str
    refined: Dim | None
    line: str = ""
    size_rule: str = ""

    def __str__(self) -> str:
        place = f" ({self.line})" if self.line else ""
        return f"{self.words}{place}; declare {self.declare}"


def form(multiple: int, offset: int) -> str:
    """``odd``, ``a multiple of 8``, ``1 more than a multiple of 32``."""
    if offset == 0:
        return f"a multiple of {multiple}"
    return "odd" if multiple == 2 else f"{offset} more than a multiple of {multiple}"


def fitted(dim: Dim, good: Sequence[int], words: str) -> Rule:
    """The rule that leaves of a dim's legal sizes the `good` ones, given in ascending order.

    Args:
        words: says it where the good sizes are no range of sizes of one step.
    """
    name = dim.name
    if not good:
        return inexpressible(name, words)
    if len(good) == 1:
        return refined_rule(dim, f"{name} must be {good[0]}", (good[0], good[0]), 1)
    step = math.gcd(*(size - good[0] for size in good[1:]))
    if list(good) != list(range(good[0], good[-1] + 1, step)):
        return inexpressible(name, words)
    ends = (good[0], good[-1])
    if step > dim.multiple_of:
        said = f"{name} must be {form(step, good[0] % step)}"
        if good[0] - step >= dim.min or good[-1] + step <= dim.max:
            said += f" in {good[0]}..{good[-1]}"
    else:
        said = f"{name} must be in {good[0]}..{good[-1]}"
    return refined_rule(dim, said, ends, step, good[0] % step)


def inexpressible(name: str, words: str) -> Rule:
    return Rule(name, words, "sizes of that form only: no Dim says it", None)


def refined_rule(
    dim: Dim, words: str, ends: tuple[int, int], multiple: int, offset: int = 0
) -> Rule:
    low = ends[0] + (offset - ends[0]) % multiple
    high = ends[1] - (ends[1] - offset) % multiple
    opt = min(max(dim.opt - (dim.opt - offset) % multiple, low), high)
    step = f", multiple_of={multiple}" if multiple > 1 else ""
    step += f", offset={offset}" if offset else ""
    declare = f'Dim("{dim.name}", min={low}, opt={opt}, max={high}{step})'
    if low == high:
        declare = f"the number {low} in its place"
    try:
        refined = replace(dim, min=low, opt=opt, max=high, multiple_of=multiple, offset=offset)
    except InputError:  # nothing is left of the range
        if high == 0:
            text = "no input of that size: every Dim has a size above 0"
            return Rule(dim.name, words, text, None)
        return Rule(dim.name, words, f"a range that holds such a size; {dim} does not", None)
    return Rule(dim.name, words, declare, refined)
