"""Notices a branch on a tensor's values whose error the model catches itself.

Example: ``try: (if x.max() > 1: x = x / x.max()) except Exception: pass``. torch.export can't take
such a branch, and raises. The model catches that error, so the program lacks the branch, and
nothing tells. torch itself raises and catches such errors too: those stay unnoticed here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipeline.export.exchange import Exchange
from pipeline.probe.code_files import is_framework, is_model_file

_raised: ContextVar[list[Exception] | None] = ContextVar("_raised", default=None)


def _noting(kind: type[Exception]) -> Callable[..., None]:
    own: Callable[..., None] = vars(kind)["__init__"]

    def made(self: Exception, *args: Any, **more: Any) -> None:
        own(self, *args, **more)
        raised = _raised.get()
        if raised is not None:
            raised.append(self)

    return made


_KINDS = (GuardOnDataDependentSymNode, DataDependentOutputException)
_exchange = Exchange({(kind, "__init__"): _noting(kind) for kind in _KINDS})


@contextmanager
def noting_branches() -> Iterator[list[Exception]]:
    """Gives the errors on tensors' values that torch makes meanwhile, see `swallowed`."""
    raised: list[Exception] = []
    token = _raised.set(raised)
    try:
        with _exchange.used():
            yield raised
    finally:
        _raised.reset(token)


def swallowed(raised: list[Exception]) -> tuple[Exception, str] | None:
    """The first error that the model caught, and the model's line that made it; None if none.

    Python notes each function that an error leaves: the first is the one that caught it.
    """
    for error in raised:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and _of_model(frames[0].filename):
            frame = next(f for f in reversed(frames) if _of_model(f.filename))
            line = f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
            return error, line
    return None


def _of_model(file: str) -> bool:
    return is_model_file(file) and not is_framework(file)
