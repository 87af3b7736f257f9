"""nn.RNN, tanh or relu, as ONNX RNN nodes, one for each layer.

torch's exporter has no translation, and unrolls the time axis (torch 2.13).
`pipeline.export.torch_2_13.recurrent` keeps the axis symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import Value, ints, op

aten: Any = torch.ops.aten


def _translation(activation: str) -> Callable[..., tuple[Value, Value]]:
    """The translation of ``rnn_tanh.input`` or ``rnn_relu.input``.

    It gives the output, and the last hidden states [layers * directions, b, h].
    """

    def translate(
        input: Value, hx: Value, params: Sequence[Value], *flags: Any
    ) -> tuple[Value, Value]:
        has_biases, num_layers, _, train, bidirectional, batch_first = flags  # _: dropout
        options = (has_biases, num_layers, train, bidirectional, batch_first)
        return _rnn(input, hx, params, options, activation)

    return translate


rnn_tanh, rnn_relu = map(_translation, ("Tanh", "Relu"))


def _rnn(
    x: Value,
    hx: Value,
    params: Sequence[Value],
    options: tuple[bool, int, bool, bool, bool],
    activation: str,
) -> tuple[Value, Value]:
    has_biases, layers, train, bidirectional, batch_first = options
    if train:
        raise ExportError("it is in training mode; call eval() before the export")
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2  # W_ih, W_hh, b_ih, b_hh
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    finals = []
    for layer in range(layers):
        own = params[layer * directions * each : (layer + 1) * directions * each]
        weight, recurrent = (_stacked(own[n::each]) for n in (0, 1))
        bias = None
        if has_biases:
            pairs = zip(own[2::each], own[3::each], strict=True)
            bias = _stacked([op.Concat(*pair, axis=0) for pair in pairs])
        first = layer * directions
        start = op.Slice(hx, ints(first), ints(first + directions), ints(0))
        y, last = op.RNN(
            x, weight, recurrent, bias, None, start,
            activations=[activation] * directions,
            direction="bidirectional" if bidirectional else "forward",
            hidden_size=hx.shape[2],
        )  # fmt: skip
        finals.append(last)
        # [time, directions, batch, channels] to [time, batch, directions * channels]
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), ints(0, 0, -1))
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    return x, finals[0] if layers == 1 else op.Concat(*finals, axis=0)


def _stacked(parts: Sequence[Value]) -> Value:
    new = [op.Unsqueeze(part, ints(0)) for part in parts]
    return new[0] if len(new) == 1 else op.Concat(*new, axis=0)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.rnn_tanh.input: rnn_tanh,
    aten.rnn_relu.input: rnn_relu,
}
