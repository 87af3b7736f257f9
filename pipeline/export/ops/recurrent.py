"""nn.RNN as ONNX RNN nodes, and nn.LSTM with ``proj_size`` as LSTM nodes, one for each layer.

torch's exporter has no translation of RNN, and unrolls the time axis (torch 2.13).
`pipeline.export.torch_2_13.recurrent` keeps the axis symbolic.

ONNX's LSTM has no projection, and torch's exporter mistakes its weights for biases. But
``h = W_hr r`` for the hidden state r before the projection. So ``W_hh h = (W_hh W_hr) r``: the
layer is an LSTM without a projection whose recurrent weights are ``W_hh W_hr``, and whose output is
multiplied by ``W_hr``. The given h of the first step need not be a ``W_hr r``. So that h is more
channels of the layer's input, with the weights ``W_hh``; they are 0 at all other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import Size, Value, floats, ints, op, size, steps, tensor

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


def lstm(
    input: Value, hx: Sequence[Value], params: Sequence[Value], *flags: Any
) -> tuple[Value, Value, Value]:
    """``lstm.input``: the output, and the last hidden and cell states.

    `flags` is has_biases, num_layers, dropout, train, bidirectional and batch_first.
    """
    projected, cells = hx[0].shape[2], hx[1].shape[2]
    if projected == cells:
        found: tuple[Value, Value, Value] = core.aten_lstm(input, hx, params, *flags)
        return found
    has_biases, layers, _, train, bidirectional, batch_first = flags  # _: dropout
    if train:
        raise ExportError("it is in training mode; call eval() before the export")
    directions = 2 if bidirectional else 1
    each = 5 if has_biases else 3  # W_ih, W_hh, b_ih, b_hh, W_hr
    length = size(input, 1 if batch_first else 0)
    x = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input
    finals = []
    for layer in range(layers):
        first = layer * directions
        starts = [op.Slice(h, ints(first), ints(first + directions), ints(0)) for h in hx]
        own = params[first * each : (first + directions) * each]
        rows = [own[n * each : (n + 1) * each] for n in range(directions)]
        x, *last = _projected(x, length, starts, rows, cells)
        finals.append(last)
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    hidden, cell = (
        states[0] if layers == 1 else op.Concat(*states, axis=0)
        for states in zip(*finals, strict=True)
    )
    return x, hidden, cell


def _projected(
    x: Value,
    length: Size,
    starts: Sequence[Value],
    rows: Sequence[Sequence[Value]],
    cells: int,
) -> tuple[Value, Value, Value]:
    """One layer with a projection; see above.

    Args:
        x: the input, [time, batch, channels].
        length: the time.
        starts: the hidden states [directions, batch, projected] and the cell states.
        rows: for each direction its W_ih, W_hh, maybe b_ih and b_hh, and W_hr.
        cells: the hidden size before the projection.

    Returns:
        The output [time, batch, directions * projected], and the last hidden and cell states.
    """
    hidden, cell = starts
    zero = op.CastLike(floats(0.0), x)
    places = op.Reshape(steps(length), ints(-1, 1, 1))
    given = [x]
    for n in range(len(rows)):
        at = (
            op.Sub(tensor(length), ints(1)) if n else ints(0)
        )  # the second direction starts at the end
        own = op.Slice(hidden, ints(n), ints(n + 1), ints(0))
        given.append(op.Where(op.Equal(places, at), own, zero))

    weights = []
    for n, row in enumerate(rows):
        others = [row[1] if k == n else op.Expand(zero, op.Shape(row[1])) for k in range(len(rows))]
        weights.append(_iofc(op.Concat(row[0], *others, axis=1), cells))
    recurrent = [_iofc(op.MatMul(row[1], row[-1]), cells) for row in rows]
    bias = None
    if len(rows[0]) == 5:
        pairs = [[_iofc(b, cells) for b in row[2:4]] for row in rows]
        bias = _stacked([op.Concat(*pair, axis=0) for pair in pairs])
    y, last, last_cell = op.LSTM(
        op.Concat(*given, axis=2), _stacked(weights), _stacked(recurrent), bias, None,
        op.Expand(zero, op.Shape(cell)), cell,
        direction="bidirectional" if len(rows) == 2 else "forward",
        hidden_size=cells,
    )  # fmt: skip
    down = _stacked([op.Transpose(row[-1], perm=[1, 0]) for row in rows])
    y = op.Transpose(op.MatMul(y, down), perm=[0, 2, 1, 3])
    return op.Reshape(y, ints(0, 0, -1)), op.MatMul(last, down), last_cell


def _iofc(weight: Value, cells: int) -> Value:
    """The rows of torch's gates (input, forget, cell, output) in the order of ONNX."""
    ends = ((0, cells), (3 * cells, 4 * cells), (cells, 3 * cells))
    parts = [op.Slice(weight, ints(first), ints(last), ints(0)) for first, last in ends]
    return op.Concat(*parts, axis=0)


def _stacked(parts: Sequence[Value]) -> Value:
    new = [op.Unsqueeze(part, ints(0)) for part in parts]
    return new[0] if len(new) == 1 else op.Concat(*new, axis=0)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.rnn_tanh.input: rnn_tanh,
    aten.rnn_relu.input: rnn_relu,
    aten.lstm.input: lstm,
}
