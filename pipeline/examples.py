"""Example sizes and inputs for an export, and running a module on them without torch.export."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch

from pipeline.dims import Dim
from pipeline.guards import legal_sizes
from pipeline.spec import Input


def example_args(
    inputs: Sequence[Input], seed: int, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Random inputs at these dim sizes, in order."""
    return tuple(torch.from_numpy(i.sample(sizes, seed)) for i in inputs)


def runs(
    inputs: Sequence[Input], module: torch.nn.Module, seed: int, sizes: Mapping[str, int]
) -> bool:
    """True if the module runs at these sizes without torch.export."""
    try:
        with torch.no_grad(), quiet():
            module(*example_args(inputs, seed, sizes))
    except Exception:
        return False
    return True


def dims_of(inputs: Sequence[Input]) -> dict[str, Dim]:
    """The dims by name."""
    return {dim.name: dim for i in inputs for dim in i.dims}


def examples(inputs: Sequence[Input]) -> list[dict[str, int]]:
    """Sets of legal sizes to export at, in the order in which to try them.

    Small and different ones first; then round ones, different and equal; then the opts. None is
    the dim's first size where there is another: torch specialises a size of 0 or 1, and equal
    sizes may hide a mix-up.
    """

    def chosen(rounds: Sequence[int], *, distinct: bool) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, dim in dims_of(inputs).items():
            legal = legal_sizes(dim, 1 << 12)[1:] or [dim.min]
            fresh = [n for n in legal if n > 1 and not (distinct and n in sizes.values())]
            fresh = fresh or legal[-1:]
            sizes[name] = next((n for step in rounds for n in fresh if n % step == 0), fresh[0])
        return sizes

    every = [
        chosen((1,), distinct=True),
        chosen((64, 32, 16, 8, 4, 2), distinct=True),
        {name: dim.opt for name, dim in dims_of(inputs).items()},
        chosen((64, 32, 16, 8, 4, 2), distinct=False),
    ]
    return [sizes for n, sizes in enumerate(every) if sizes not in every[:n]]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch's warnings, prints and logs out of the way; errors still come as exceptions."""
    handlers = [
        (handler, handler.level)
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch"
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for handler, _ in handlers:
            handler.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for handler, level in handlers:
                handler.setLevel(level)
