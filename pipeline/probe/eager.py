"""Runs a module on random inputs without torch.export, and finds the line where it failed."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.probe.code_files import is_model_file
from pipeline.probe.sample_sizes import elements
from pipeline.probe.state import ModuleState, untouched
from pipeline.spec.dims import shape_at
from pipeline.spec.tensors import Feed, Input

if TYPE_CHECKING:
    import torch

    from pipeline.probe.fake_caches import FakeCaches

_EAGER = 1 << 18  # the most input elements of a run with values


@dataclass(frozen=True)
class EagerModule:
    """A module with random inputs, run without torch.export.

    Args:
        inputs: The module's inputs, in order.
        module: The module, called with one tensor for each input.
        seed: The seed of the inputs' values.
    """

    inputs: tuple[Input, ...]
    module: torch.nn.Module
    seed: int

    @cached_property
    def state(self) -> ModuleState:
        """What the module keeps when this is first read: recording it takes longer than a call."""
        return ModuleState(self.module)

    @cached_property
    def caches(self) -> FakeCaches:
        """The caches to empty after a run as shapes; kept, for the search takes all objects."""
        from pipeline.probe.fake_caches import FakeCaches

        return FakeCaches()

    def args(self, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        """Random inputs at these dim sizes, in order."""
        return example_args(self.inputs, self.seed, sizes)

    def runs_at(self, sizes: Mapping[str, int]) -> bool:
        """True if the module runs at these sizes."""
        import torch

        try:
            with torch.no_grad(), quiet(), self.state.restored():
                self.module(*self.args(sizes))
        except Exception:
            return False
        return True


def example_args(
    inputs: Sequence[Input], seed: int, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Random inputs at these dim sizes, in order."""
    import torch

    return tuple(torch.from_numpy(i.sample(sizes, seed)) for i in inputs)


def output_sizes(eager: EagerModule, sizes: Mapping[str, int]) -> list[tuple[int, ...]] | None:
    """The shapes of the module's outputs at these sizes, by running it without torch.export.

    Large inputs are run as shapes without values. Returns None if the module does not run.
    """
    import torch

    try:
        with torch.no_grad(), quiet(), untouched(eager.module):
            result = _called(eager, sizes, elements(eager.inputs, sizes) <= _EAGER)
            return [tuple(int(n) for n in t.shape) for t in flat_tensors(result)]
    except Exception:
        return None


def inner_sizes(
    eager: EagerModule, sizes: Mapping[str, int]
) -> list[tuple[str, tuple[int, ...]]] | None:
    """Each operator that a call of the module runs, with the shape of each tensor that it returns.

    The module runs as shapes without values, or with values if it needs them and the inputs are
    small. Returns None if it does not run.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[str, tuple[int, ...]]] = []

    class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            result = func(*args, **(kwargs or {}))
            found.extend(
                (str(func), tuple(t.shape))
                for t in flat_tensors(result)
                if isinstance(t, torch.Tensor)
            )
            return result

    small = elements(eager.inputs, sizes) <= _EAGER
    for values in (False, True) if small else (False,):
        found.clear()
        with contextlib.suppress(Exception), torch.no_grad(), quiet(), untouched(eager.module):
            _called(eager, sizes, values, Record())  # type: ignore[no-untyped-call]
            return found
    return None


def _called(
    eager: EagerModule,
    sizes: Mapping[str, int],
    values: bool,
    under: contextlib.AbstractContextManager[Any] | None = None,
) -> Any:
    """The result of a call, with values or as shapes alone."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    under = under or contextlib.nullcontext()
    if values:
        args = eager.args(sizes)
        with under:
            return eager.module(*args)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            args = tuple(
                torch.empty(
                    shape_at(i.shape, sizes), dtype=torch.from_numpy(np.empty(0, i.dtype)).dtype
                )
                for i in eager.inputs
            )
            with under:
                return eager.module(*args)
    finally:
        eager.caches.clear()


def call_module(module: torch.nn.Module, feed: Feed) -> Any:
    """Calls a module with copies of the inputs, in order, and returns its result."""
    import torch

    return module(*(torch.from_numpy(array.copy()) for array in feed.values()))


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """The tensors in a module's result, in order."""
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(result))


_TRACES = "torch.__trace"  # the logger of TORCH_TRACE, which writes to files only


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides torch's warnings, prints and logs; errors are still raised."""
    handlers = [
        (handler, handler.level)
        for name, logger in list(logging.root.manager.loggerDict.items())
        # without TORCH_TRACE, the handler of traces removes itself at its first record. If it got
        # none, torch would go on to make each record, with the Python stack
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch" and name != _TRACES
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
        and handler.level <= logging.CRITICAL  # not silent by another `quiet`
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

    Only frames inside the framework's own (`framework` is its folder) count.
    """
    inside = False
    found = ""
    framework = f"{framework}{os.sep}"  # torchvision's path also begins with torch's path
    for frame in stack:
        if frame.filename.startswith(framework):
            inside = True
        elif inside and is_model_file(frame.filename):
            found = f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return found


def bad_weight(module: torch.nn.Module) -> str:
    """The name of a weight with NaN or infinity; empty if there is none.

    A buffer counts only with NaN: one for a mask may have infinities.
    """
    import torch

    for name, weight in module.named_parameters():
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            return name
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and torch.isnan(buffer).any():
            return name
    return ""
