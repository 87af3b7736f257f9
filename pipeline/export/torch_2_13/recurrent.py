"""LSTM, GRU and RNN over a dynamic time axis.

To compute shapes, torch runs a decomposition that makes one copy of the cell for each step of the
example, and time becomes a constant. torch.onnx.export enters two context managers
(torch.export._patches) that make it a loop instead, for LSTM and GRU; here RNN has such a loop too.
The exporter then writes one ONNX LSTM or GRU node, and `pipeline.export.ops.recurrent` an RNN node.
The loops have no effect if the process exported the layer before: each op caches its dispatch. So
the cache is emptied here, before and after (torch 2.13; `OpOverload._dispatch_cache`). Dynamo
traces the loop and remembers sizes too: a batch that was fixed in an earlier export would be fixed
again. torch.export and torch.onnx.export both need this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import _higher_order_ops
from torch._decomp import decompositions
from torch.export._patches import (
    _register_rnn_while_loop_decomposition,
    register_gru_while_loop_decomposition,
    register_lstm_while_loop_decomposition,
)
from torch.nn import functional

_OPS: tuple[Any, ...] = (
    torch.ops.aten.lstm.input,
    torch.ops.aten.gru.input,
    torch.ops.aten.rnn_tanh.input,
    torch.ops.aten.rnn_relu.input,
)


@contextlib.contextmanager
def dynamic_time() -> Iterator[None]:
    """Keeps the time axis of LSTM, GRU and RNN symbolic."""
    _forget()
    torch._dynamo.reset()
    try:
        with (
            register_lstm_while_loop_decomposition(),
            register_gru_while_loop_decomposition(),
            _register_rnn_while_loop_decomposition(
                torch.ops.aten.rnn_tanh.input, partial(_rnn, torch.tanh)
            ),
            _register_rnn_while_loop_decomposition(
                torch.ops.aten.rnn_relu.input, partial(_rnn, torch.relu)
            ),
        ):
            yield
    finally:
        _forget()


def _typeless(module: Any) -> Any:
    """A module of torch whose functions have no types."""
    return module


def _forget() -> None:
    for operator in _OPS:
        operator._dispatch_cache.clear()


def _rnn(
    activation: Callable[[torch.Tensor], torch.Tensor],
    input: torch.Tensor,
    hx: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    *more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rnn_tanh.input`` or ``rnn_relu.input`` as a loop over time.

    `more` is num_layers, dropout, train, bidirectional and batch_first, as in torch's op.
    """
    given = _typeless(decompositions).gather_params(params, has_biases, False)
    out, last = _typeless(decompositions)._rnn_helper(
        input, list(hx.unbind(0)), given, has_biases, *more, partial(_layer, activation)
    )
    return out, torch.stack(last, 0)


def _layer(
    activation: Callable[[torch.Tensor], torch.Tensor],
    input: torch.Tensor,
    hidden: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer in one direction: [time, batch, channels]."""
    steps = functional.linear(input, params[0], params[2] if has_biases else None)
    steps = steps.flip(0) if reverse else steps
    length = steps.size(0)
    # a while_loop refuses weights that share storage
    weight = params[1].clone()
    bias = params[3].clone() if has_biases else None
    found = torch.empty(length, *hidden.shape, dtype=hidden.dtype, device=hidden.device)

    def unfinished(step: Any, found: Any, hidden: Any) -> Any:
        del found, hidden
        return step < length

    def once(step: Any, found: Any, hidden: Any) -> Any:
        n = step.item()
        _typeless(torch)._check(n >= 0)
        _typeless(torch)._check(n <= length - 1)
        hidden = activation(steps[n] + functional.linear(hidden, weight, bias))
        found = found.clone()
        found[n] = hidden
        return step + 1, found, hidden

    start = torch.tensor(0, dtype=torch.int64)
    loop = _typeless(_higher_order_ops).while_loop
    _, found, hidden = loop(unfinished, once, [start, found, hidden.clone()])
    return (found.flip(0) if reverse else found), hidden
