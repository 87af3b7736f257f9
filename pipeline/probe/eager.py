"""Example sizes and inputs for an export, and running a module on them without torch.export."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.probe.grid import legal_sizes
from pipeline.spec.dims import Dim, kept_rules, shape_at
from pipeline.spec.model import Input

if TYPE_CHECKING:
    import torch

_EAGER = 1 << 18  # of the inputs up to which a model is run to see its output shapes
_SEARCHED = 1 << 12  # sets of sizes among which one that keeps the rules is looked for


def example_args(
    inputs: Sequence[Input], seed: int, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Random inputs at these dim sizes, in order."""
    import torch

    return tuple(torch.from_numpy(i.sample(sizes, seed)) for i in inputs)


def runs(
    inputs: Sequence[Input], module: torch.nn.Module, seed: int, sizes: Mapping[str, int]
) -> bool:
    """True if the module runs at these sizes without torch.export."""
    import torch

    try:
        with torch.no_grad(), quiet():
            module(*example_args(inputs, seed, sizes))
    except Exception:
        return False
    return True


def dims_of(inputs: Sequence[Input]) -> dict[str, Dim]:
    """The dims by name."""
    return {dim.name: dim for i in inputs for dim in i.dims}


def examples(inputs: Sequence[Input], rules: Sequence[str] = ()) -> list[dict[str, int]]:
    """Sets of legal sizes that keep the rules, to export at, in the order in which to try them.

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
    every = [sizes for n, sizes in enumerate(every) if sizes not in every[:n]]
    kept = [sizes for sizes in every if kept_rules(rules, sizes)]
    return kept or _kept_by_search(dims_of(inputs), rules) or every[:1]


def _kept_by_search(dims: Mapping[str, Dim], rules: Sequence[str]) -> list[dict[str, int]]:
    """The first sizes that keep the rules, if some do: few of each dim, not the first ones."""
    few = max(int(_SEARCHED ** (1 / len(dims))), 4) if dims else 4
    every = [
        [*(legal_sizes(dim, 2 * few)[1:] or [dim.min])[:few], dim.opt] for dim in dims.values()
    ]
    for row in itertools.product(*every):
        sizes = dict(zip(dims, row, strict=True))
        if kept_rules(rules, sizes):
            return [sizes]
    return []


def elements(inputs: Sequence[Input], sizes: Mapping[str, int]) -> int:
    """How many elements the inputs have at these sizes."""
    return sum(math.prod(shape_at(i.shape, sizes)) for i in inputs)


def output_sizes(
    inputs: Sequence[Input], module: torch.nn.Module, seed: int, sizes: Mapping[str, int]
) -> list[tuple[int, ...]] | None:
    """The shapes that the module gives at these sizes, by running it without torch.export.

    Large inputs go through as shapes without values. None where the module does not run.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with torch.no_grad(), quiet():
            if elements(inputs, sizes) <= _EAGER:
                result = module(*example_args(inputs, seed, sizes))
            else:
                with untouched(module), FakeTensorMode(allow_non_fake_inputs=True):
                    result = module(
                        *(
                            torch.empty(
                                shape_at(i.shape, sizes),
                                dtype=torch.from_numpy(np.empty(0, i.dtype)).dtype,
                            )
                            for i in inputs
                        )
                    )
            return [tuple(int(n) for n in t.shape) for t in flat_tensors(result)]
    except Exception:
        return None


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Undoes what a run sets on the module: a cached tensor that has no values."""
    saved = [
        (part, {k: dict(v) if type(v) is dict else v for k, v in vars(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes in saved:
            vars(part).clear()
            vars(part).update(attributes)


def flat_tensors(result: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(result))


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


def model_line(stack: traceback.StackSummary, framework: str) -> str:
    """The innermost frame that belongs to the model, as ``file:line in function: code``.

    Frames of torch (`framework` is its folder), of the pipeline and of the standard library's
    plumbing are passed over.
    """
    own = str(Path(__file__).parents[1])
    inside = False
    found = ""
    framework = f"{framework}{os.sep}"  # torchvision's folder begins as torch's does
    for frame in stack:
        if frame.filename.startswith(framework):
            inside = True
        elif inside and not _plumbing(frame.filename, own):
            found = f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return found


def _plumbing(filename: str, own: str) -> bool:
    return (
        filename.startswith((own, "<"))
        or f"{Path(logging.__file__).parent}" in filename
        or Path(filename).parent == Path(traceback.__file__).parent
    )
