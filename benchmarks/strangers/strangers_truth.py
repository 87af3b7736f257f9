"""Runs a stranger's model to find the sizes that it accepts, without the pipeline."""

from __future__ import annotations

import contextlib
import io
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from strangers_set import Stranger
from torch import nn

Point = tuple[int, int, int]  # batch, height, width
RUN = 40  # consecutive sizes from the smallest one
SPREAD = 6  # sizes spread over the others
BATCH = 2


def probes(stranger: Stranger) -> list[int]:
    """The sizes of an axis to try.

    These are consecutive sizes, others up to the largest, multiples of 32, and one less than each.
    """
    low, high = stranger.low, stranger.high
    run = range(low, min(low + RUN, high) + 1)
    step = max((high - run[-1]) // SPREAD, 1)
    round_ = range(-(-low // 32) * 32, high + 1, 32)
    less = (n - 1 for n in round_ if n > low)
    return sorted({*run, *range(run[-1], high + 1, step), *round_, *less})


def image(stranger: Stranger, point: Point, seed: int = 0) -> torch.Tensor:
    """A random image batch in -1..1, float32, [batch, channels, height, width]."""
    batch, height, width = point
    maker = torch.Generator().manual_seed(hash((seed, *point)) % (1 << 31))
    return torch.rand(batch, stranger.channels, height, width, generator=maker) * 2 - 1


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors in a model's result, in order."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The module's outputs at an input."""
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        return tensors(module(x))


def find_truth(stranger: Stranger, module: nn.Module) -> dict[str, Any]:
    """Tries sizes of a model, and derives the rule on its sizes.

    It tries each axis with the other one fixed, the diagonal, and the batches. It also tries random
    pairs: of the sizes that run on the axes, and of all sizes.

    Returns:
        ``points``: [batch, height, width, runs?] each; ``rule``: as text; ``height`` and
        ``width``: the sizes that run on the axes; ``seconds``; ``first``: the model's error at the
        first size that it refuses.
    """
    start = time.monotonic()
    done: dict[Point, bool] = {}
    first = ""

    def good(point: Point) -> bool:
        nonlocal first
        if point not in done:
            try:
                done[point] = bool(run(module, image(stranger, point)))
            except Exception as error:
                done[point] = False
                text = str(error).strip().splitlines() or [type(error).__name__]
                first = first or f"at {point[1]}x{point[2]}: {type(error).__name__}: {text[0]}"
        return done[point]

    sizes = probes(stranger)
    bases = [n for n in (32, 64, 96, 128, 256, 224, 160, 192, 320) if n in sizes] + sizes
    base = next((n for n in bases if good((BATCH, n, n))), None)
    if base is None:
        return {"points": [[*p, ok] for p, ok in done.items()], "rule": "none", "first": first}
    high = [n for n in sizes if good((BATCH, n, base))]
    wide = [n for n in sizes if good((BATCH, base, n))]
    square = high == wide == [base]
    diagonal = [n for n in (sizes if square else sizes[::4]) if good((BATCH, n, n))]
    batches = [n for n in range(1, stranger.batch + 1) if good((n, base, base))]
    dice = random.Random(0)
    for _ in range(16):
        good((dice.randint(1, stranger.batch), dice.choice(high), dice.choice(wide)))
        good((BATCH, dice.choice(sizes), dice.choice(sizes)))
    words = {"height": rule(high, sizes), "width": rule(wide, sizes)}
    said = words["height"] if len(set(words.values())) == 1 else str(words)
    if square and len(diagonal) > 1:
        said = f"square, {rule(diagonal, sizes)}"
    together = [p for p, ok in done.items() if not ok and p[1] in high and p[2] in wide]
    if together:
        said += f"; not every pair of those ({together[0][1]}x{together[0][2]} is refused)"
    if batches != list(range(1, stranger.batch + 1)):
        said += f"; batch {batches}"
    return {
        "points": [[*p, ok] for p, ok in done.items()],
        "rule": said,
        "height": high,
        "width": wide,
        "first": first,
        "seconds": round(time.monotonic() - start, 1),
    }


def rule(good: Sequence[int], tried: Sequence[int]) -> str:
    """The rule that the good sizes follow, as text."""
    if list(good) == list(tried):
        return "any"
    if len(good) == 1:
        return f"{good[0]} only"
    step = math.gcd(*(n - good[0] for n in good))
    offset = good[0] % step
    words = f"multiples of {step}" if step > 1 else "any"
    if offset:
        words += f" plus {offset}"
    held = [n for n in tried if (n - offset) % step == 0]
    low, high = good[0], good[-1]
    if low != held[0]:
        words += f", at least {low}"
    if high != held[-1]:
        words += f", at most {high}"
    missing = [n for n in held if low <= n <= high and n not in set(good)]
    return f"{words}, but not {_few(missing)}" if missing else words


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def best_dim(good: Iterable[int], tried: Iterable[int]) -> set[int]:
    """The most good sizes that one dim can have without a bad size.

    A dim is a range of multiples, with an offset. Only sizes that were tried count.
    """
    fine, every = set(good), sorted(tried)
    best: set[int] = set()
    for step in range(1, 129):
        for offset in range(step):
            run: set[int] = set()
            for size in every:
                if size % step != offset:
                    continue
                run = {*run, size} if size in fine else set()
                if len(run) > len(best):
                    best = run
    return best


def chosen(points: Sequence[Point], legal: Callable[[Point], bool], most: int) -> list[Point]:
    """The points for comparing numbers: the smallest, the largest, odd sizes, batch 1 and 3."""
    mine = sorted((p for p in points if legal(p)), key=lambda p: (p[1] * p[2], p))
    if not mine:
        return []
    odd = [p for p in mine if p[1] % 2 or p[2] % 2]
    uneven = [p for p in mine if p[1] != p[2]]
    single = [p for p in mine if p[0] == 1]
    three = [p for p in mine if p[0] == 3]
    dice = random.Random(1)
    wanted = [mine[0], mine[-1]]
    for group in (odd, uneven, single, three, mine):
        wanted += dice.sample(group, min(len(group), most // 4))
    return list(dict.fromkeys(wanted))[:most]
