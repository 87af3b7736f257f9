"""Sizes that an ONNX file does not take though it declares them: what rule is behind it.

A file says that an axis is free, or fixed; a rule (multiples of 8, the height equals the width)
it can't say, and an exporter that baked a size into a Reshape did not notice.
`pipeline.probe.probe` finds it by running the file in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.errors import ConstraintError, ExportError
from pipeline.probe.onnx_runner import Failure, Runs, Sizes
from pipeline.probe.probe import probe_way
from pipeline.probe.refine import refine
from pipeline.probe.rules import Rule
from pipeline.probe.sums import always
from pipeline.spec.dims import SizeRule, evaluate, kept_rules
from pipeline.spec.model import Input, ModelSpec


class _OnnxWay:
    """Runs an ONNX file; what it raises names the node. See `pipeline.probe.runs.Way`."""

    def __init__(self, inputs: Sequence[Input], runs: Runs) -> None:
        self._inputs, self._runs = inputs, runs

    def run(self, sizes: Sizes) -> None:
        feed = [i.sample(sizes, self._runs.seed) for i in self._inputs]
        found = self._runs.with_values(feed)
        if isinstance(found, Failure):
            raise RuntimeError(found.reason)

    def shapes(self, sizes: Sizes) -> None:
        """ONNX Runtime runs values only."""

    def line(self, error: Exception) -> str:
        del error
        return ""


def legal(
    spec: ModelSpec, runs: Runs, budget: float
) -> tuple[ModelSpec, list[str], dict[str, int]]:
    """Holds every dim against what the file takes.

    Returns:
        The spec, with dims narrowed and rules added where that may be; what was done, in words;
        and sizes at which the file runs.

    Raises:
        ConstraintError: the file does not take every declared size, and a dim is not `auto`.
        ExportError: it runs at no sizes that were tried.
    """
    if not any(not dim.static for dim in spec.dims.values()):
        only = {name: dim.min for name, dim in spec.dims.items()}
        if broken := runs.fails(only):
            raise ExportError(f"model {spec.name}: the file {broken}{by_values(spec)}")
        return spec, [], only
    found = probe_way(spec.inputs, _OnnxWay(spec.inputs, runs), spec.rules, budget)
    if found.base is None:
        words = found.rules[0].words if found.rules else "no sizes were small enough to run it"
        raise ExportError(
            f"model {spec.name}: {words.replace('the model', 'the file', 1)}{by_values(spec)}"
        )
    unmended = [rule for rule in found.rules if not _mendable(spec, rule)]
    if unmended:
        sums = always(spec, runs, found.base)
        if sums:
            raise ConstraintError(_told(spec, sums), detail="\n".join(map(str, unmended)))
        more = f" (and {len(unmended) - 1} more)" if len(unmended) > 1 else ""
        raise ConstraintError(
            f"model {spec.name}: the file takes fewer sizes than it declares: {unmended[0]}{more}",
            detail="\n".join(map(str, unmended)),
        )
    spec = refine(spec, [rule for rule in found.rules if rule.refined is not None])
    added = [r.size_rule for r in found.rules if r.refined is None and r.size_rule]
    spec = replace(spec, rules=(*spec.rules, *added))
    runs.take(spec)
    base = {name: spec.dims[name].legal(size) for name, size in found.base.items()}
    for sizes in mixed(spec, base):
        if broken := runs.fails(sizes):
            raise ExportError(
                f"model {spec.name}: the file {broken}; that is no rule of one dim: state what "
                "the sizes keep together in the spec's rules, or choose ranges that keep it"
            )
    if not isinstance(runs.at(base), tuple):  # moved away from where it ran
        runs_at = (sizes for sizes in mixed(spec, base) if isinstance(runs.at(sizes), tuple))
        base = next(runs_at, base)
    return spec, [rule.words for rule in found.rules], base


def _told(spec: ModelSpec, sums: Mapping[str, tuple[str, Failure]]) -> str:
    """What the dims are that are no dims of their own, and how to say it."""
    rules = [f"{name} must be {text}: {broken}" for name, (text, broken) in sums.items()]
    options = " ".join(f"--dim {name}={text}" for name, (text, _) in sums.items())
    return (
        f"model {spec.name}: the file takes fewer sizes than it declares: {'; '.join(rules)}; "
        f"declare what it is in place of a range: {options}"
    )


def by_values(spec: ModelSpec) -> str:
    """A hint for a run that went wrong with random values of integers."""
    names = [i.name for i in spec.inputs if i.dtype.startswith(("int", "uint"))]
    if not names:
        return ""
    ranges = ", ".join(
        f"{i.name} {i.low:g}..{i.high - 1:g}" for i in spec.inputs if i.name in names
    )
    return (
        f"; if the values of its integer inputs are to blame ({ranges}): give the Input a range "
        "(low=, high=), or make what sets a shape or an axis a constant in the file"
    )


def _mendable(spec: ModelSpec, rule: Rule) -> bool:
    """True if the pipeline may do what the rule asks for."""
    if rule.refined is not None:
        return spec.auto(rule.dim)
    return bool(rule.size_rule) and all(spec.auto(n) for n in SizeRule(rule.size_rule).names)


def mixed(spec: ModelSpec, base: Sizes) -> Iterator[dict[str, int]]:
    """Sets of sizes with all dims away from `base`: small ones, odd ones, min and opt, the max."""
    dims = spec.dims

    def moved(k: int, more: int) -> dict[str, int]:
        return {
            name: dim.legal(base[name] + dim.multiple_of * k * (1 + n * more))
            for n, (name, dim) in enumerate(dims.items())
        }

    every = [moved(k, 1) for k in range(1, 5)]
    every += [moved(k, 0) for k in (1, 2, 3, 5, 8, 13) if spec.rules]
    every += [
        {name: dim.min for name, dim in dims.items()},
        {name: dim.opt for name, dim in dims.items()},
        {name: dim.legal(dim.opt, odd=True) for name, dim in dims.items()},
        {name: dim.max for name, dim in dims.items()},
    ]
    for sizes in every:
        kept = with_rules(spec, sizes)
        if kept is not None:
            yield kept


def with_rules(spec: ModelSpec, sizes: Sizes) -> dict[str, int] | None:
    """The sizes, those changed that a rule like ``h == w`` gives; None if they break another."""
    kept = dict(sizes)
    for text in spec.rules:
        left, equal, right = (part.strip() for part in text.partition("=="))
        if equal and left in kept and not kept_rules([text], kept):
            kept[left] = evaluate(right, kept)
            if spec.dims[left].legal(kept[left]) != kept[left]:
                return None
    return kept if kept_rules(spec.rules, kept) else None
