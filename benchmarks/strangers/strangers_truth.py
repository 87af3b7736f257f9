"""Runs a stranger's model to find the sizes that it accepts, without the pipeline."""

from __future__ import annotations

import contextlib
import io
import math
import random
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from strangers_set import Stranger
from torch import nn

Sizes = dict[str, int]
Point = tuple[int, ...]  # the sizes in the order of the stranger's dims
RUN = 40  # consecutive sizes from the smallest one
SPREAD = 6  # sizes spread over the others
BASES = (32, 64, 96, 128, 256, 224, 160, 192, 320, 16, 512, 1024, 4096, 8192)
_INPUT = re.compile(r"(?P<path>[^:]+):(?P<shape>[^:]+)(:(?P<dtype>[^:]+))?(:(?P<values>.+))?")


def probes(low: int, high: int) -> list[int]:
    """The sizes of an axis to try.

    These are consecutive sizes, others up to the largest, multiples of 32, and one less than each.
    """
    run = range(low, min(low + RUN, high) + 1)
    step = max((high - run[-1]) // SPREAD, 1)
    round_ = range(-(-low // 32) * 32, min(high, 1024) + 1, 32)
    less = (n - 1 for n in round_ if n > low)
    return sorted({*run, *range(run[-1], high + 1, step), *round_, *less})


def computed(text: str, sizes: Sizes) -> int:
    """The value of an expression of dims, such as ``past + t``."""
    return int(eval(text.strip("{} "), {"__builtins__": {}}, sizes))


def shape_of(text: str, sizes: Sizes) -> list[int]:
    """The shape of ``{b}x3x{h}`` for these sizes."""
    return [computed(part, sizes) for part in re.findall(r"\{[^}]*\}|\d+", text)]


def feed(stranger: Stranger, sizes: Sizes, seed: int = 0) -> dict[str, Any]:
    """Random arguments of ``forward`` by name; a list of lists for ``cache[0..1][0..1]``."""
    maker = torch.Generator().manual_seed(zlib.crc32(repr((seed, sorted(sizes.items()))).encode()))
    found: dict[str, Any] = {}
    for text in stranger.inputs:
        words = _INPUT.fullmatch(text)
        assert words is not None, text
        name, *counts = re.split(r"\[0\.\.(\d+)\]", words["path"])[:-1] or [words["path"]]
        shape = shape_of(words["shape"], sizes)
        if counts:
            layers, parts = int(counts[0]) + 1, 2
            found[name] = [[_values(shape, "", "", sizes, maker) for _ in range(parts)]
                           for _ in range(layers)]  # fmt: skip
        else:
            dtype, values = words["dtype"] or "", words["values"] or ""
            found[name] = _values(shape, dtype, values, sizes, maker)
    return found


def _values(
    shape: list[int], dtype: str, values: str, sizes: Sizes, maker: torch.Generator
) -> torch.Tensor:
    """Floats in -1..1, integers in the range, or a mask that begins with ones in each row."""
    if values == "prefix":
        lengths = torch.randint(1, shape[-1] + 1, shape[:-1], generator=maker)
        return torch.arange(shape[-1]) < lengths[..., None]
    if dtype == "int64":
        low, high = values.split("..")
        last = int(high) if high.isdigit() else computed(high, sizes) + 1
        return torch.randint(int(low), last, shape, generator=maker)
    return torch.rand(shape, generator=maker) * 2 - 1


def leaves(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of the arguments, in order."""
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(arguments))


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors in a model's result, in order; a cache's are keys and values by layer."""
    from torch.utils._pytree import tree_leaves

    if hasattr(result, "layers") and hasattr(result, "get_seq_length"):
        return [t for layer in result.layers for t in (layer.keys, layer.values)]
    if isinstance(result, dict):
        return [t for value in result.values() for t in tensors(value)]
    if isinstance(result, (list, tuple)):
        return [t for value in result for t in tensors(value)]
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def run(module: nn.Module, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The module's outputs."""
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        return [t.clone() for t in tensors(module(**{n: passed(v) for n, v in arguments.items()}))]


def passed(value: Any) -> Any:
    """An argument as the model takes it: a list of layers as transformers' cache."""
    if not isinstance(value, list):
        return value
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, (keys, values) in enumerate(value):
        cache.update(keys.clone(), values.clone(), number)
    return cache


def find_truth(stranger: Stranger, module: nn.Module) -> dict[str, Any]:
    """Tries sizes of a model, and derives the rule on its sizes.

    It tries each axis with the other ones fixed, and the diagonal of height and width. It also
    tries random sets of sizes: of those that run on the axes, and of all.

    Returns:
        ``points``: the sizes in the order of the dims, and whether the model runs; ``rule``: as
        text; ``axes``: the sizes that run on each axis; ``seconds``; ``first``: the model's error
        at the first sizes that it refuses.
    """
    start = time.monotonic()
    done: dict[Point, bool] = {}
    first = ""

    def good(sizes: Sizes) -> bool:
        nonlocal first
        point = tuple(sizes[name] for name, *_ in stranger.dims)
        if point not in done:
            try:
                done[point] = bool(run(module, feed(stranger, sizes)))
            except Exception as error:
                done[point] = False
                text = str(error).strip().splitlines() or [type(error).__name__]
                first = first or f"at {sizes}: {type(error).__name__}: {text[0]}"
        return done[point]

    tried = {name: probes(low, high) for name, low, high in stranger.dims}

    def near(n: int) -> Sizes:
        return {
            name: min(2, high) if name == "b" else min(max(n, low), high)
            for name, low, high in stranger.dims
        }

    longest = max((sizes for name, sizes in tried.items() if name != "b"), key=len, default=[2])
    wanted = [n for n in BASES if n in longest] + longest
    base = next((near(n) for n in wanted if good(near(n))), None)
    if base is None:
        return {"points": [[*p, ok] for p, ok in done.items()], "rule": "none", "first": first}
    axes = {name: [n for n in tried[name] if good({**base, name: n})] for name in tried}
    image = axes.keys() == {"b", "h", "w"}
    square = image and axes["h"] == axes["w"] == [base["h"]]
    diagonal: list[int] = []
    if image:
        along = tried["h"] if square else tried["h"][::4]
        diagonal = [n for n in along if good({**base, "h": n, "w": n})]
    dice = random.Random(0)
    for _ in range(16):
        good({name: dice.choice(sizes) for name, sizes in axes.items()})
        good({n: base[n] if n == "b" else dice.choice(sizes) for n, sizes in tried.items()})
    words = {name: rule(axes[name], tried[name]) for name in axes if name != "b"}
    every = set(words.values())
    said = every.pop() if len(every) == 1 else ", ".join(f"{n}: {w}" for n, w in words.items())
    if square and len(diagonal) > 1:
        said = f"square, {rule(diagonal, tried['h'])}"
    names = list(tried)
    together = [
        p
        for p, ok in done.items()
        if not ok and all(n in axes[name] for name, n in zip(names, p, strict=True))
    ]
    if together:
        said += f"; not every set of those ({together[0]} is refused)"
    if axes.get("b", tried.get("b")) != tried.get("b"):
        said += f"; batch {axes['b']}"
    return {
        "points": [[*p, ok] for p, ok in done.items()],
        "rule": said or "any",
        "axes": axes,
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


def chosen(
    stranger: Stranger, points: Sequence[Point], legal: Callable[[Point], bool], most: int
) -> list[Point]:
    """The points for comparing numbers: the smallest, the largest, odd sizes, batch 1 and 3."""
    names = [name for name, *_ in stranger.dims]
    free = [n for n, name in enumerate(names) if name != "b"]
    batch = names.index("b") if "b" in names else None

    def place(point: Point) -> tuple[int, Point]:
        return math.prod(point[n] for n in free), point

    mine = sorted((p for p in points if legal(p)), key=place)
    if not mine:
        return []
    odd = [p for p in mine if any(p[n] % 2 for n in free)]
    uneven = [p for p in mine if len({p[n] for n in free}) > 1]
    single = [p for p in mine if batch is not None and p[batch] == 1]
    three = [p for p in mine if batch is not None and p[batch] == 3]
    dice = random.Random(1)
    wanted = [mine[0], mine[-1]]
    for group in (odd, uneven, single, three, mine):
        wanted += dice.sample(group, min(len(group), most // 4))
    return list(dict.fromkeys(wanted))[:most]
