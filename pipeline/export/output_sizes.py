"""Compares torch.export's output sizes with the dims and with the model's own outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from pipeline.errors import InputError, SizeError
from pipeline.export.torch_messages import of_rounding
from pipeline.probe.eager import EagerModule, output_sizes
from pipeline.probe.fit import fit_line
from pipeline.probe.grid import legal_sizes
from pipeline.spec.dims import Dim, DimExpr, evaluate, kept_rules, sizes_text
from pipeline.spec.model import ModelSpec, inner_inputs

_BENT = re.compile(r"//|%|m(in|ax)\(")  # a formula that is not linear


def check_names(spec: ModelSpec, shapes: Sequence[Sequence[int | str]]) -> None:
    """Raises `SizeError` for the outputs whose sizes are no integer expressions of the dims."""
    known = {dim.name for i in inner_inputs(spec) for dim in i.dims}
    found: list[SizeError] = []
    for output, shape in zip(spec.outputs, shapes, strict=True):
        for axis, size in enumerate(shape):
            where = f"output {output.name} axis {axis}: its size is {size}"
            try:
                unknown = DimExpr(str(size)).names - known
            except InputError:
                what = f"{where}, which is no integer expression of the dims"
                found.append(SizeError(what, do=of_rounding(str(size))))
                continue
            if unknown:
                what = f"{where}, and {', '.join(sorted(unknown))} depends on the data: no shape "
                what += "can be declared"
                found.append(SizeError(what, do="return a tensor of a fixed size, or a mask"))
    if found:
        first, *others = found
        raise SizeError(first.what, do=first.do, others=tuple(others)).of(spec.name)


def true_shapes(
    spec: ModelSpec, module: torch.nn.Module, shapes: Sequence[Sequence[int | str]], seed: int
) -> list[list[int | str]]:
    """The output shapes, each compared with the module's own output at many sizes.

    torch's formula can be wrong (2.13: a pool with ``ceil_mode``). Then a quotient that gives the
    module's sizes replaces it.

    Args:
        spec: the spec.
        module: the module that the spec builds.
        shapes: torch's shape of each output, in terms of the dims.
        seed: the seed of the inputs' values.

    Raises:
        SizeError: torch's formula is wrong, and no quotient gives the module's sizes.
    """
    eager = EagerModule(inner_inputs(spec), module, seed)
    dims = {dim.name: dim for i in eager.inputs for dim in i.dims}
    probes = [{name: getattr(dim, at) for name, dim in dims.items()} for at in ("opt", "max")]
    bent = [str(size) for shape in shapes for size in shape if _BENT.search(str(size))]
    if bent:
        period = max((int(n) for text in bent for n in re.findall(r"\d+", text)), default=1)
        names = set().union(*(DimExpr(text).names for text in bent))
        free = {name: dim for name, dim in dims.items() if name in names}
        least = {name: dim.min for name, dim in dims.items()}  # the fastest, where all is linear
        along = _diagonal(free, min(max(16, period + 4), 64))
        probes += [{**least, **sizes} for sizes in along]
    seen = []
    for sizes in probes:
        if not kept_rules(spec.rules, sizes):
            continue
        got = output_sizes(eager, sizes)
        if got is not None and len(got) == len(shapes):
            seen.append((sizes, got))
    result = []
    for index, (output, shape) in enumerate(zip(spec.outputs, shapes, strict=True)):
        new = list(shape)
        for axis, size in enumerate(shape):
            points = [(sizes, got[index][axis]) for sizes, got in seen if len(got[index]) > axis]
            wrong = [(sizes, got) for sizes, got in points if _value(size, sizes) != got]
            if not wrong:
                continue
            fit = _fit(dims, size, points)
            if fit is None:
                raise SizeError(
                    f"model {spec.name}: output {output.name} axis {axis}: torch.export "
                    f"computes the size {size}, but the model gives {wrong[0][1]} at "
                    f"{sizes_text(wrong[0][0])}. The output may have another form at some "
                    "sizes. If so, declare a range without them"
                )
            new[axis] = fit
        result.append(new)
    return result


def _diagonal(dims: Mapping[str, Dim], count: int) -> list[dict[str, int]]:
    """Sets of sizes: each dim takes its smallest sizes and some others, in a different step."""
    runs = {name: legal_sizes(dim, 2 * count)[: count + 4] for name, dim in dims.items()}
    runs = {n: [*run, *legal_sizes(dims[n], 8)[4:]] for n, run in runs.items()}
    most = max(map(len, runs.values()))
    return [
        {n: run[(k + i) % len(run)] for i, (n, run) in enumerate(runs.items())} for k in range(most)
    ]


def _value(size: int | str, sizes: Mapping[str, int]) -> int | None:
    try:
        return evaluate(size, sizes)
    except InputError:  # a division that is not exact
        return None


def _fit(
    dims: Mapping[str, Dim], size: int | str, points: Sequence[tuple[Mapping[str, int], int]]
) -> str | None:
    """A quotient of the only dim in a wrong formula; it gives all sizes that were seen."""
    names = DimExpr(str(size)).names
    if len(names) != 1:
        return None
    (name,) = names
    at = {sizes[name]: got for sizes, got in points}
    if any(at[sizes[name]] != got for sizes, got in points):  # another dim plays a part
        return None
    few = len(at) < len(legal_sizes(dims[name], 1 << 14))
    found = fit_line(at)
    if found is None or (few and len(at) < 3 * found.c):
        return None
    return found.text(name)
