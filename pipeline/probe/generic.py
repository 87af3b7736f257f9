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
from pipeline.spec.dims import Dim, kept_rules

_Steps = list[tuple[str, tuple[int, ...]]]
_MOVES = ("clone", "view", "_unsafe_view", "alias", "slice", "constant_pad_nd")


def generic_examples(eager: EagerModule, rules: Sequence[str]) -> list[dict[str, int]]:
    """The sets of `examples`, after the smallest set that is like the opts inside the model.

    If the model runs the same operators at its largest sizes, the set is like these too: a part
    that is one window at the opts may be several at larger sizes.

    Args:
        eager: The module and its inputs.
        rules: The rules on sizes.

    Returns:
        The sets as `examples` orders them if the first one is such a set, or if there is none.
    """
    every = examples(eager.inputs, rules)
    dims = dims_of(eager.inputs)
    opts = {name: dim.opt for name, dim in dims.items()}
    if not kept_rules(rules, opts):
        return every
    seen: dict[tuple[int, ...], _Steps | None] = {}

    def steps(sizes: Mapping[str, int]) -> _Steps | None:
        key = tuple(sizes.values())
        if key not in seen:
            seen[key] = inner_sizes(eager, sizes)
        return seen[key]

    wanted = steps(opts)
    if wanted is None:
        return every
    goals = [(wanted, opts)]
    for less in (0, 1):  # the largest size may be one at which nothing is padded
        ends = {name: max(dim.max - less * dim.multiple_of, dim.opt) for name, dim in dims.items()}
        largest = steps(ends) if kept_rules(rules, ends) else None
        if largest is not None and _is_like(largest, wanted):
            if not _is_like(wanted, largest):
                goals.insert(0, (largest, ends))
            break
    for goal, most in goals:
        for sizes in (*every[:1], *_larger(every[0], most, dims, rules), *every[1:]):
            found = steps(sizes)
            if found is not None and _is_like(found, goal):
                return [sizes, *(other for other in every if other != sizes)]
    return every


def _is_like(found: _Steps, wanted: _Steps) -> bool:
    """True if the same operators ran, and no axis is 0 or 1 that is larger in `wanted`."""
    found, wanted = _without_moves(found), _without_moves(wanted)
    return len(found) == len(wanted) and all(
        op == other
        and len(shape) == len(sizes)
        and all(a > 1 or a >= b for a, b in zip(shape, sizes, strict=True))
        for (op, shape), (other, sizes) in zip(found, wanted, strict=True)
    )


def _without_moves(steps: _Steps) -> _Steps:
    """Without what only copies, names, pads or crops memory: some sizes need no such step."""
    return [(op, shape) for op, shape in steps if op.split(".")[1] not in _MOVES]


def _larger(
    first: Mapping[str, int],
    most: Mapping[str, int],
    dims: Mapping[str, Dim],
    rules: Sequence[str],
) -> Iterator[dict[str, int]]:
    """Sets of 2, 4, 8, ... times the first sizes, different from each other, up to `most`."""
    factor = 1
    while any(factor * first[name] < most[name] for name in dims):
        factor *= 2
        sizes: dict[str, int] = {}
        for name, dim in dims.items():
            least = max(first[name], min(factor * first[name], most[name]))
            legal = legal_sizes(dim, 1 << 12)
            fit = [n for n in legal if n >= least] or legal[-1:]
            sizes[name] = next((n for n in fit if n not in sizes.values()), fit[0])
        if kept_rules(rules, sizes):
            yield sizes
