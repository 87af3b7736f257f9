"""Finds declared sizes at which an ONNX file fails, and the rule that explains them.

A file can only state that an axis is free or fixed. It can't state a rule, such as multiples of 8
or a height that equals the width. An exporter may also bake a size into a Reshape.
`pipeline.probe.probe` finds such rules by running the file in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.errors import ConstraintError, ExportError
from pipeline.probe.apply import Applied, apply, may_apply
from pipeline.probe.onnx_runner import Failure, OnnxProbe, Sizes
from pipeline.probe.probe import probe_with
from pipeline.probe.rules import by_values
from pipeline.probe.sums import always
from pipeline.spec.dims import DimExpr, SizeRule, kept_rules
from pipeline.spec.model import ModelSpec
from pipeline.spec.rules import Refusal, Rule


def fit_to_file(
    spec: ModelSpec, runner: OnnxProbe, budget: float
) -> tuple[Applied, dict[str, int]]:
    """Narrows the dims of a spec to the sizes at which its file runs.

    Args:
        spec: The spec of the file.
        runner: Runs the file. Afterwards it uses the narrowed spec.
        budget: The CPU time for trying sizes, in seconds.

    Returns:
        The spec with the rules that narrowed it, and sizes at which the file runs.

    Raises:
        ConstraintError: The file does not run at every declared size, and a dim is not `auto`.
        ExportError: The file runs at none of the sizes that were tried.
    """
    if not any(not dim.static for dim in spec.dims.values()):
        only = {name: dim.min for name, dim in spec.dims.items()}
        if broken := runner.fails(only):
            raise ExportError(f"model {spec.name}: the file {broken}{by_values(spec)}")
        return Applied(spec, ()), only
    found = probe_with(spec.inputs, runner, spec.rules, budget)
    if found.base is None:
        small = "all its sizes are too large to run it here"
        why = found.rules[0].text("the file") if found.rules else small
        raise ExportError(f"model {spec.name}: {why}{by_values(spec)}")
    refused = [rule for rule in found.rules if not may_apply(spec, rule)]
    if refused:
        if sums := always(spec, runner, found.base):
            raise _sum_error(spec, sums, refused)
        raise _error(spec, refused)
    applied = apply(spec, found.rules)
    if applied.left:
        raise _error(spec, applied.left)
    spec = applied.spec
    runner.narrow(spec)
    base = {name: dim.legal(found.base[name]) for name, dim in spec.dims.items()}
    for sizes in mixed(spec, base):
        if broken := runner.fails(sizes):
            raise ExportError(
                f"model {spec.name}: the file {broken}. No rule on one dim explains this. Add a "
                "rule to the spec that excludes these sizes, or choose ranges without them"
            )
    # narrowing may move the base to sizes at which the file fails
    if not isinstance(runner.at(base), tuple):
        runs_at = (sizes for sizes in mixed(spec, base) if isinstance(runner.at(sizes), tuple))
        base = next(runs_at, base)
    return applied, base


def _error(spec: ModelSpec, rules: Sequence[Rule]) -> ConstraintError:
    more = f" (and {len(rules) - 1} more)" if len(rules) > 1 else ""
    return ConstraintError(
        f"model {spec.name}: the file runs at fewer sizes than you declared: {rules[0]}{more}",
        detail="\n".join(map(str, rules)),
        rules=tuple(rules),
    )


def _sum_error(
    spec: ModelSpec, sums: Mapping[str, tuple[str, Failure]], refused: Sequence[Rule]
) -> ConstraintError:
    """The error for dims that are always the sum or the product of two others."""
    rules = [
        Rule(
            "expression",
            name,
            tuple(sorted(DimExpr(text).names)),
            formula=text,
            failed=Refusal(broken.sizes, broken.reason),
        )
        for name, (text, broken) in sums.items()
    ]
    options = " ".join(f"--dim {name}={text}" for name, (text, _) in sums.items())
    return ConstraintError(
        f"model {spec.name}: the file runs at fewer sizes than you declared: "
        f"{'; '.join(rule.text('the file') for rule in rules)}; "
        f"pass the expression in place of a range: {options}",
        detail="\n".join(map(str, refused)),
        rules=tuple(rules),
    )


def mixed(spec: ModelSpec, base: Sizes) -> Iterator[dict[str, int]]:
    """Sets of sizes in which all dims differ from `base`: small, odd, min, opt and max."""
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
        legal = with_rules(spec, sizes)
        if legal is not None:
            yield legal


def with_rules(spec: ModelSpec, sizes: Sizes) -> dict[str, int] | None:
    """The sizes, changed to keep rules like ``h == w``; None if they break another rule."""
    changed = dict(sizes)
    for text in spec.rules:
        rule, left = SizeRule(text), SizeRule(text).left.text
        if rule.sign == "==" and left in changed and not kept_rules([text], changed):
            changed[left] = rule.right.value(changed)
            if spec.dims[left].legal(changed[left]) != changed[left]:
                return None
    return changed if kept_rules(spec.rules, changed) else None
