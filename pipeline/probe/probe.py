"""Finds the sizes at which a model runs, by running it without torch.export.

torch.export reports a rule only if the model's code or an operator's meta function adds a guard.
It may crash. It may also miss a check in Python, a table's length or a condition of a kernel. So
each dim is tried at the ends of its range, at consecutive sizes and over the range. The other dims
stay at sizes where the module runs. Then dims are tried together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.probe.joint import combinations, depends, equal_rules, group_rule, joint_rule
from pipeline.probe.rules import banded, fitted
from pipeline.probe.runs import SizeProbe, SizeRuns, legal_range
from pipeline.probe.sample_sizes import examples
from pipeline.probe.search import Search
from pipeline.spec.dims import Dim
from pipeline.spec.rules import Refusal, Rule
from pipeline.spec.tensors import Input

if TYPE_CHECKING:
    import torch

__all__ = ["SECONDS", "Probe", "Probed", "probe", "probe_with"]

SECONDS = 20.0  # of CPU time for trying sizes
_ROUND = (64, 32, 16, 8, 4, 2)
# common sizes of image models
_COMMON = (
    224, 256, 64, 128, 512, 96, 192, 384, 32, 320, 299, 160, 112, 240, 288, 336, 448, 518, 640,
    768, 1024, 48, 16, 33, 65, 129, 257, 31, 63, 127, 255,
)  # fmt: skip
_SMALL = (128, 96)  # if 64 is too small
_BATCHES = (1, 2, 4, 8, 16, 3, 6, 5, 10, 12, 32)
_BATCHED = 6  # sets of sizes that are tried with each of these batches
_JOINT_ROUNDS = 2  # rules of several dims may hide others
_RETRIED = 3  # refused sizes at which the other dims are changed
_FEW = 0.1  # the part of the good sizes that a Dim may exclude, for a simpler rule


@dataclass(frozen=True)
class Probe:
    """The result for one dim.

    Args:
        dim: The dim as it was declared.
        taken: The dim's sizes that ran, with the other dims at the base.
        refused: The dim's sizes that failed, with the model's error.
        rule: The narrower dim; None if every size that was tried runs.
    """

    dim: Dim
    taken: tuple[int, ...]
    refused: tuple[Refusal, ...]
    rule: Rule | None


@dataclass(frozen=True)
class Probed:
    """The result for a module.

    Args:
        base: Sizes of all dims at which the module runs; None if it ran at no size.
        probes: The result for each dynamic dim; empty if the module ran at no size.
        joint: The rules on several dims, which no Dim can express.
        tried: The number of sets of sizes that were tried.
        with_values: The number of these that ran with values. The others ran as shapes only.
        seconds: The time of the probe in seconds.
        complete: False if time ran out before all sizes were tried.
    """

    base: Mapping[str, int] | None
    probes: tuple[Probe, ...]
    joint: tuple[Rule, ...]
    tried: int
    with_values: int
    seconds: float
    complete: bool

    @property
    def rules(self) -> list[Rule]:
        """The rules on single dims, then the rules on several dims."""
        return [p.rule for p in self.probes if p.rule is not None] + list(self.joint)

    @property
    def words(self) -> str:
        """What was tried, in one line."""
        alone = self.tried - self.with_values
        text = f"{self.tried} sets of sizes tried in {self.seconds:.1f} s"
        text += f", {alone} of them as shapes only" if alone else ""
        text += (
            ""
            if self.complete
            else ", and time ran out before all were tried: --search-seconds N gives more"
        )
        return text if self.rules else f"every size that was tried runs: {text}"


def probe(
    inputs: Sequence[Input],
    module: torch.nn.Module,
    seed: int,
    rules: Sequence[str] = (),
    budget_seconds: float = SECONDS,
    *,
    brief: bool = False,
) -> Probed:
    """Finds the sizes at which a module runs, by running it.

    Args:
        inputs: The inputs, in the order of the module's arguments.
        module: The module, called with one tensor for each input.
        seed: The seed of the inputs' values.
        rules: The rules on sizes; sizes that break one are not tried.
        budget_seconds: The approximate limit of CPU time, so that a busy machine finds the same.
        brief: Try few sizes of a dim if none of them fails and a run is long, because torch.export
            comes next and finds most rules.
    """
    import torch

    from pipeline.probe.torch_runner import TorchProbe

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for small inputs more threads are slower
    try:
        return probe_with(
            inputs, TorchProbe(inputs, module, seed), rules, budget_seconds, brief=brief
        )
    finally:
        torch.set_num_threads(threads)


def probe_with(
    inputs: Sequence[Input],
    runner: SizeProbe,
    rules: Sequence[str],
    budget_seconds: float,
    *,
    brief: bool = False,
) -> Probed:
    """Does the same as `probe`, with a runner of your choice."""
    runs = SizeRuns(inputs, runner, rules, budget_seconds)
    dims = {name: dim for name, dim in runs.dims.items() if not dim.static}
    runs.share(0.4)
    base = _base(runs, dims)
    if base is None:
        return _done(runs, None, (), _nowhere(runs, dims))
    searches: dict[str, Search] = {}
    runs.brief = brief = brief and not runs.quick
    for k, (name, dim) in enumerate(dims.items()):
        runs.share(0.8 / (len(dims) - k + 1))
        searches[name] = _searched(runs, dim, base, brief=brief)
    unsettled = [name for name, search in searches.items() if search.bad and not search.settled]
    for k, name in enumerate(unsettled):  # sizes that were tried are not run again
        runs.share(0.9 / (len(unsettled) - k))
        searches[name] = _searched(runs, dims[name], base)
    runs.share(1.0)
    joint: list[Rule] = []
    vague: set[str] = set()
    for _ in range(_JOINT_ROUNDS):
        found = _joint(runs, dims, base, searches)
        joint += found.values()
        runs.rules = (*runs.rules, *(rule.size_rule for rule in found.values() if rule.size_rule))
        for name in {n for names in found for n in names}:
            searches[name] = _searched(runs, dims[name], base, _equal_to(name, joint))
        vague |= {n for names, rule in found.items() for n in names if not rule.size_rule}
        if vague:
            break
    probes = []
    for name, dim in dims.items():
        search, equal = searches[name], _equal_to(name, joint)
        refused = tuple(
            runs.refused[runs.key({**base, name: n, **dict.fromkeys(equal, n)})] for n in search.bad
        )
        rule = None if name in vague else _rule(dim, search, refused)
        probes.append(Probe(dim, tuple(search.good), refused, rule))
    return _done(runs, base, tuple(probes), joint)


def _done(
    runs: SizeRuns, base: Mapping[str, int] | None, probes: tuple[Probe, ...], joint: Sequence[Rule]
) -> Probed:
    return Probed(
        base, probes, tuple(joint), len(runs.results), runs.with_values, runs.seconds,
        not runs.out_of_time,
    )  # fmt: skip


def _searched(
    runs: SizeRuns,
    dim: Dim,
    base: Mapping[str, int],
    equal: Sequence[str] = (),
    *,
    brief: bool = False,
) -> Search:
    """Searches one dim. The dims `equal` have the same size, the others stay at the base."""

    def takes(size: int) -> bool | None:
        return runs.takes({**base, dim.name: size, **dict.fromkeys(equal, size)})

    search = Search(legal_range(dim), base[dim.name], takes, lambda: runs.ended)
    search.explore(brief=brief)
    return search


def _base(runs: SizeRuns, dims: Mapping[str, Dim]) -> dict[str, int] | None:
    """Sizes at which the module runs, with values if that is affordable, otherwise as shapes."""
    late = []
    for sizes in _candidates(runs, dims):
        if not runs.affordable(sizes):
            late.append(sizes)
        elif runs.takes(sizes):
            return sizes
        if runs.ended:
            break
    runs.share(0.5)
    return next((sizes for sizes in late if runs.takes(sizes)), None)


def _candidates(runs: SizeRuns, dims: Mapping[str, Dim]) -> Iterator[dict[str, int]]:
    """Sets of sizes at which the module may run; likely and small ones come first."""
    opts = {name: dim.opt for name, dim in runs.dims.items()}
    small = {n: next((k for k in legal_range(d)[:3] if k > 1), d.min) for n, d in dims.items()}
    first = {i.shape[0].name for i in runs.inputs if i.shape and isinstance(i.shape[0], Dim)}
    batches = [n for n in dims if n in first]
    rest = [n for n in dims if n not in first] or batches
    few = {**opts, **{n: small[n] for n in batches if rest is not batches}}
    every = [{**few, **{n: _near(dims[n], k, 64) for n in rest}} for k in _ROUND]
    every += [{**few, **dict.fromkeys(rest, k)} for k in _SMALL]
    every += [few, opts]
    every += [{**few, **{n: _near(dims[n], k, dims[n].opt) for n in rest}} for k in _ROUND]
    every += [{**few, **dict.fromkeys(rest, k)} for k in _COMMON]
    every += examples(runs.inputs, runs.rules)
    every += [{name: getattr(dim, at) for name, dim in runs.dims.items()} for at in ("min", "max")]
    batched = [
        {**sizes, **dict.fromkeys(batches, n)}
        for sizes in (opts, *every[:_BATCHED], *every[-2:])
        for n in _BATCHES
        if batches
    ]
    seen: set[tuple[int, ...]] = set()

    def fresh(sizes: Mapping[str, int]) -> bool:
        key = runs.key(sizes)
        new = key not in seen and runs.legal(sizes)
        seen.add(key)
        return new

    for k, sizes in enumerate(every + batched):
        if not fresh(sizes):
            continue
        yield sizes
        if k < len(_ROUND) + len(_SMALL):
            continue
        failed = runs.refused.get(runs.key(sizes))
        # numbers in the model's error: "Expected size 224"
        for number in dict.fromkeys(map(int, re.findall(r"\d+", failed.error if failed else ""))):
            asked = {**sizes, **dict.fromkeys(rest, number)}
            if fresh(asked):
                yield asked


def _near(dim: Dim, multiple: int, wanted: int) -> int:
    """The legal multiple nearest to a size, or the dim's opt if no multiple is legal."""
    low, high = -(-dim.min // multiple) * multiple, dim.max // multiple * multiple
    size = min(max(round(wanted / multiple) * multiple, low), high)
    return size if size in legal_range(dim) else dim.opt


def _nowhere(runs: SizeRuns, dims: Mapping[str, Dim]) -> list[Rule]:
    first = next(iter(runs.refused.values()), None)
    if first is None:
        return []
    name, tried = next(iter(dims), next(iter(runs.dims))), len(runs.results)
    return [Rule("nowhere", name, counts=(tried, tried), failed=first, line=first.line)]


def _joint(
    runs: SizeRuns, dims: Mapping[str, Dim], base: Mapping[str, int], searches: dict[str, Search]
) -> dict[tuple[str, ...], Rule]:
    """The rules on several dims, by the dims."""
    if len(dims) < 2:
        return {}
    taken = {n: s.run() for n, s in searches.items()}
    values = {
        n: list(dict.fromkeys((run[0], run[-1], run[len(run) // 2], dims[n].opt)))
        for n, run in taken.items()
    }
    groups: list[tuple[str, ...]] = []
    for name, search in searches.items():
        border = [search.low - search.step, search.high + search.step]
        sizes = [n for n in border if n in search.bad]
        sizes += sorted(search.bad, key=lambda n: abs(n - base[name]))[:_RETRIED]
        # these keep the multiples that the dims also need
        sizes += sorted(search.bad, key=lambda n: -math.gcd(n, base[name]))[:_RETRIED]
        for size in dict.fromkeys(sizes):
            if others := depends(runs, base, name, size, values):
                groups.append((name, *others))
                break
    groups = groups or combinations(runs, base, taken)
    found: dict[tuple[str, ...], Rule] = {}
    for group in groups:
        if len(group) > 2 and (equal := equal_rules(runs, base, group)):
            return {rule.dims: rule for rule in equal}
        pairs = [tuple(n for n in dims if n in (group[0], other)) for other in group[1:]]
        for first, second in pairs:
            if (first, second) not in found:
                legal = {n: legal_range(dims[n]) for n in (first, second)}
                rule = joint_rule(runs, base, (first, second), legal)
                found |= {} if rule is None else {(first, second): rule}
        if not any(pair in found for pair in pairs):
            found[group] = group_rule(runs, group)
    return found


def _equal_to(name: str, joint: Sequence[Rule]) -> list[str]:
    """The dims that must equal this one."""
    group = {name}
    for _ in joint:
        for rule in joint:
            if rule.one_dim and group & {*rule.dims}:
                group |= {*rule.dims}
    return sorted(group - {name})


def _rule(dim: Dim, search: Search, refused: Sequence[Refusal]) -> Rule | None:
    """The rule on one dim behind the sizes at which the model runs."""
    if not search.bad:
        return None
    name, outside = dim.name, search.outside()
    failed = min(refused, key=lambda r: abs(r.sizes[name] - search.base))
    counts, fails = (len(search.bad), len(search.tested)), tuple(search.bad)
    if not search.settled:
        return Rule("unsettled", name, fails=fails, counts=counts, failed=failed, line=failed.line)
    if len(outside) <= max(1, _FEW * len(search.good)):
        rule = fitted(dim, search.run())
        if rule.kind == "multiple":  # 65 fails for each of several reasons, 80 for the last one
            failed = min(
                refused,
                key=lambda r: (
                    -math.gcd(r.sizes[name] - rule.offset, rule.multiple),
                    abs(r.sizes[name] - search.base),
                ),
            )
        return replace(rule, runs=tuple(outside), failed=failed, line=failed.line)
    if found := search.residues():
        return replace(banded(dim, *found), failed=failed, line=failed.line)
    return Rule(
        "irregular", name, runs=tuple(sorted(search.good)), fails=fails, counts=counts,
        failed=failed, line=failed.line,
    )  # fmt: skip
