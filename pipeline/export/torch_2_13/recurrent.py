"""LSTM and GRU over a dynamic time axis.

To compute shapes, torch runs a decomposition that makes one copy of the cell for each step of the
example, and time becomes a constant. torch.onnx.export enters two context managers
(torch.export._patches) that make it a loop instead; the exporter then writes one ONNX LSTM or GRU
node. They have no effect if the process exported an LSTM or GRU before: each op caches its
dispatch. So the cache is emptied here, before and after (torch 2.13; `OpOverload._dispatch_cache`).
torch.export and torch.onnx.export both need this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.export._patches import (
    register_gru_while_loop_decomposition,
    register_lstm_while_loop_decomposition,
)

_OPS: tuple[Any, ...] = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)


@contextlib.contextmanager
def dynamic_time() -> Iterator[None]:
    """Keeps the time axis of LSTM and GRU symbolic."""
    _forget()
    try:
        with register_lstm_while_loop_decomposition(), register_gru_while_loop_decomposition():
            yield
    finally:
        _forget()


def _forget() -> None:
    for operator in _OPS:
        operator._dispatch_cache.clear()
