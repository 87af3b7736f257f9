"""Chooses example sizes at which no size inside the model is 0 or 1 by chance.

torch.export makes a number of such a size, and takes the side of each branch that the example
takes. So an example should be like the opts inside the model: the same operators, and an axis of 0
or 1 only where the opts have one too. A range that starts at a convolution's kernel size, or at the
smallest size of a feature pyramid, has such an axis at its smallest sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.probe.eager import EagerModule, inner_sizes
from pipeline.probe.grid import legal_sizes
from pipeline.probe.sample_sizes import dims_of, examples
from pipeline.spec.dims import kept_rules

_Steps = list[tuple[str, tuple[int, ...]]]


def generic_examples(eager: EagerModule, rules: Sequence[str]) -> list[dict[str, int]]:
    """The sets of `examples`, after the smallest set that is like the opts inside the model.

    Args:
        eager: The module and its inputs.
        rules: The rules on sizes.

    Returns:
        The sets as `examples` orders them if the first one is such a set, or if there is none.
    """
    every = examples(eager.inputs, rules)
    opts = {name: dim.opt for name, dim in dims_of(eager.inputs).items()}
    if every[0] == opts or not kept_rules(rules, opts):
        return every
    wanted = _steps(eager, opts)
    if wanted is None:
        return every
    for sizes in (*every[:1], *_larger(eager, every[0], rules), *every[1:]):
        found = _steps(eager, sizes)
        if found is not None and _is_like(found, wanted):
            return [sizes, *(other for other in every if other != sizes)]
    return every


def _steps(eager: EagerModule, sizes: Mapping[str, int]) -> _Steps | None:
    return inner_sizes(eager.inputs, eager.module, eager.seed, sizes)


def _is_like(found: _Steps, wanted: _Steps) -> bool:
    return len(found) == len(wanted) and all(
        op == other
        and len(shape) == len(sizes)
        and all(a > 1 or a >= b for a, b in zip(shape, sizes, strict=True))
        for (op, shape), (other, sizes) in zip(found, wanted, strict=True)
    )


def _larger(
    eager: EagerModule, first: Mapping[str, int], rules: Sequence[str]
) -> Iterator[dict[str, int]]:
    """Sets of 2, 4, 8, ... times the first sizes, different from each other, up to the opts."""
    dims = dims_of(eager.inputs)
    factor = 1
    while any(factor * first[name] < dim.opt for name, dim in dims.items()):
        factor *= 2
        sizes: dict[str, int] = {}
        for name, dim in dims.items():
            least = max(first[name], min(factor * first[name], dim.opt))
            legal = [n for n in legal_sizes(dim, 1 << 12) if n >= least]
            sizes[name] = next((n for n in legal if n not in sizes.values()), legal[0])
        if kept_rules(rules, sizes):
            yield sizes
