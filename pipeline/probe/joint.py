"""Finds rules on several dims together: that they are equal, or a bound on their product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.probe.runs import SizeRuns, legal_range
from pipeline.spec.dims import SizeRule
from pipeline.spec.rules import Refusal, Rule

_SIDE = 6  # sizes of each of two dims that are combined
_COMBINATIONS = 16
_FEW = 4  # the same in a brief search
_LARGEST_MODULUS = 256
_EQUAL = 4  # fewest equal sizes that must run for a rule that two dims are equal
_ROUND = 6  # most products that are tried as a bound


def depends(
    runs: SizeRuns,
    base: Mapping[str, int],
    name: str,
    size: int,
    values: Mapping[str, Sequence[int]],
) -> list[str]:
    """The other dims that must change so that the model runs at a size that fails at the base.

    Args:
        runs: The runs of the model.
        base: Sizes of all dims at which the model runs.
        name: The dim.
        size: The dim's size, which fails with the other dims at the base.
        values: Other sizes to try, by dim.
    """
    others = [n for n in values if n != name]
    for other in others:
        near = [size, size + base[other] - base[name]]
        if base[name]:
            near.append(size * base[other] // base[name])
        for n in dict.fromkeys([*near, *values[other]]):
            if runs.takes({**base, name: size, other: n}):
                return [other]
    if len(others) > 1:  # a cube: all must be equal
        for some in (
            o for k in range(2, len(others) + 1) for o in itertools.combinations(others, k)
        ):
            if runs.takes({**base, name: size, **dict.fromkeys(some, size)}):
                return list(some)
    return []


def combinations(
    runs: SizeRuns, base: Mapping[str, int], taken: Mapping[str, Sequence[int]]
) -> list[tuple[str, ...]]:
    """The sets of dims whose sizes run one by one but fail together."""
    seed = np.random.default_rng(0)
    names = list(taken)
    every = [{n: taken[n][-1] for n in names}, {n: taken[n][0] for n in names}]
    every += [{n: taken[n][-(k == m)] for k, n in enumerate(names)} for m in range(len(names))]
    every += [
        # more small sizes, since their runs are faster
        {n: taken[n][int(seed.random() ** 3 * len(taken[n]))] for n in names}
        for _ in range(_FEW if runs.brief else _COMBINATIONS)
    ]
    found: list[tuple[str, ...]] = []
    for sizes in every:
        full = {**base, **sizes}
        if runs.takes(full) is not False:
            continue
        involved = tuple(names)
        for name in names:  # removes each dim that makes no difference
            fewer = tuple(n for n in involved if n != name)
            if runs.takes({**base, **{n: full[n] for n in fewer}}) is False:
                involved = fewer
        if len(involved) > 1 and involved not in found:
            found.append(involved)
    return found


def equal_rules(runs: SizeRuns, base: Mapping[str, int], group: Sequence[str]) -> list[Rule]:
    """Rules that three or more dims are equal, if other sizes than the base run only as equals."""
    a, *others = group
    sizes = [n for n in _few(legal_range(runs.dims[a])) if n != base[a]]
    ran = [n for n in sizes if runs.takes({**base, **dict.fromkeys(group, n)})]
    known = [runs.refused.get(runs.key({**base, a: n})) for n in (*ran, *sizes)]
    failed = next((refusal for refusal in known if refusal is not None), None)
    if not ran or failed is None:
        return []
    return [
        Rule("equal", a, (o,), size_rule=f"{a} == {o}", failed=failed, line=failed.line)
        for o in others
    ]


def joint_rule(
    runs: SizeRuns,
    base: Mapping[str, int],
    pair: tuple[str, str],
    values: Mapping[str, Sequence[int]],
) -> Rule | None:
    """The rule on two dims together, with the other dims at the base; None if all pairs run."""
    a, b = pair
    few = {}
    for n in pair:
        near = (base[n] * k // 4 for k in (1, 2, 8, 12, 16))  # possible multiples
        few[n] = sorted({*_few(values[n]), *(size for size in near if size in values[n])})
    for x, y in itertools.product(few[a], few[b]):
        runs.takes({**base, a: x, b: y})
    _along_lines(runs, base, pair, few)
    _try_products(runs, base, pair)
    good, bad = _points(runs, base, pair)
    if not bad:
        return None
    text = next(_separating(a, b, good, bad), "")
    if not text and len(good) >= _EQUAL and all(x == y for x, y in good):
        text = f"{a} == {b}"  # equal sizes that fail do so for another reason
    failed = _refusal(runs, base, pair, bad)
    rule = Rule("relation", a, (b,), size_rule=text, failed=failed, line=failed.line)
    if text in (f"{a} == {b}", f"{b} == {a}"):
        return replace(rule, kind="equal")
    if text:
        return rule
    equal = [x for x, y in good if x == y]
    rare = len(good) - len(equal) < len(bad) / 2
    if len(equal) >= _EQUAL and rare and all(x < min(equal) for x, y in bad if x == y):
        text = f"{a} == {b}"
    counts = (len(bad), len(good) + len(bad))
    example = {a: good[0][0], b: good[0][1]}
    return replace(rule, kind="dependent", size_rule=text, counts=counts, example=example)


def group_rule(runs: SizeRuns, group: Sequence[str]) -> Rule:
    """The rule on three or more dims whose pairs run, but which fail together."""
    a, *others = group
    ran = [dict(zip(runs.dims, key, strict=True)) for key, ok in runs.results.items() if ok]
    refused = [refusal.sizes for refusal in runs.refused.values()]
    product = "*".join(group)
    bounds = (
        f"{product} >= {1 + max(math.prod(s[n] for n in group) for s in refused)}",
        f"{product} <= {min(math.prod(s[n] for n in group) for s in refused) - 1}",
    )
    text = next((t for t in bounds if all(map(SizeRule(t).kept, ran))), "")
    failed = min(runs.refused.values(), key=lambda r: math.prod(r.sizes.values()))
    counts = (len(refused), len(refused) + len(ran))
    return Rule(
        "relation" if text else "dependent", a, tuple(others), size_rule=text, failed=failed,
        line=failed.line, counts=counts, example=ran[0],
    )  # fmt: skip


def _few(sizes: Sequence[int]) -> list[int]:
    picked = {round(k * (len(sizes) - 1) / (_SIDE - 1)) for k in range(_SIDE)}
    return [sizes[k] for k in sorted(picked)]


def _along_lines(
    runs: SizeRuns, base: Mapping[str, int], pair: tuple[str, str], few: Mapping[str, Sequence[int]]
) -> None:
    """Tries equal sizes and the base's ratio, and finds where each line of the grid fails."""
    a, b = pair
    for x in dict.fromkeys([*few[a], *few[b]]):
        for y in dict.fromkeys((x, x + base[b] - base[a], x * base[b] // max(base[a], 1))):
            runs.takes({**base, a: x, b: y})
    for x in few[a]:
        line = [n for n in few[b] if runs.takes({**base, a: x, b: n}) is not None]
        for low, high in itertools.pairwise(line):
            _border(runs, {**base, a: x}, b, low, high)


def _border(runs: SizeRuns, sizes: Mapping[str, int], name: str, low: int, high: int) -> None:
    first = runs.takes({**sizes, name: low})
    legal = legal_range(runs.dims[name])
    i, j = legal.index(low), legal.index(high)
    if first is runs.takes({**sizes, name: high}):
        return
    while j - i > 1:
        result = runs.takes({**sizes, name: legal[(i + j) // 2]})
        if result is None:
            return
        i, j = ((i + j) // 2, j) if result is first else (i, (i + j) // 2)


def _points(
    runs: SizeRuns, base: Mapping[str, int], pair: tuple[str, str]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pairs of sizes that ran, and those that failed, with the other dims at the base."""
    names = list(runs.dims)
    a, b = (names.index(n) for n in pair)
    found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for key, ok in runs.results.items():
        if all(n in pair or key[k] == base[n] for k, n in enumerate(names)):
            found[not ok].append((key[a], key[b]))
    return found


def _separating(
    a: str, b: str, good: Sequence[tuple[int, int]], bad: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """The rules that all good sizes keep and all bad sizes break."""
    for text in _candidates(a, b, np.array(good), np.array(bad)):
        rule = SizeRule(text)
        if all(rule.kept({a: x, b: y}) for x, y in good) and not any(
            rule.kept({a: x, b: y}) for x, y in bad
        ):
            yield text


def _candidates(a: str, b: str, good: np.ndarray, bad: np.ndarray) -> Iterator[str]:
    """Possible rules on two dims, simple ones first; their numbers come from the good sizes."""
    yield f"{a} == {b}"
    (x, y), (u, v) = good.T, bad.T
    yield f"{a} == {b} + {x[0] - y[0]}" if x[0] > y[0] else f"{b} == {a} + {y[0] - x[0]}"
    for n in range(2, 9):
        yield f"{a} == {n}*{b}"
        yield f"{b} == {n}*{a}"
    for p, q in ((a, b), (b, a)):
        yield f"{p} <= {q}"
        yield f"{p} < {q}"
        for n in range(2, 9):
            yield f"{p} <= {n}*{q}"
            yield f"{p} < {n}*{q}"
    for text, ran, failed in (
        (f"{a} + {b}", x + y, u + v), (f"{a}*{b}", x * y, u * v), (f"{a} - {b}", x - y, u - v),
    ):  # fmt: skip
        if ran.max() < failed.min():
            yield f"{text} <= {ran.max()}"
        if ran.min() > failed.max():
            yield f"{text} >= {ran.min()}"
        modulus = math.gcd(*(int(n - ran[0]) for n in ran))
        if 2 <= modulus <= _LARGEST_MODULUS:
            yield f"({text}) % {modulus} == {ran[0] % modulus}"


def _try_products(runs: SizeRuns, base: Mapping[str, int], pair: tuple[str, str]) -> None:
    """Tries round products between the good and the bad products, for a bound on the product.

    A bound is more likely 10000 than 9999.
    """
    a, b = pair
    good, bad = _points(runs, base, pair)
    if not good or not bad:
        return
    low, high = max(x * y for x, y in good), min(x * y for x, y in bad)
    tried = 0
    for unit in sorted((p**n for p in (2, 10) for n in range(1, 25)), reverse=True):
        product = (high - 1) // unit * unit
        if product <= low or tried == _ROUND:
            continue
        for x in sorted(legal_range(runs.dims[a]), key=lambda n: abs(n - math.sqrt(product))):
            sizes = {**base, a: x, b: product // max(x, 1)}
            if x and product % x == 0 and runs.legal(sizes):
                tried += 1
                if runs.takes(sizes) is False:
                    high = product
                else:
                    low = product
                break


def _refusal(
    runs: SizeRuns, base: Mapping[str, int], pair: tuple[str, str], bad: Sequence[tuple[int, int]]
) -> Refusal:
    a, b = pair
    x, y = min(bad, key=lambda p: (abs(p[0] - base[a]) + abs(p[1] - base[b]), p))
    return runs.refused[runs.key({**base, a: x, b: y})]
