"""lib/layout: any chain of views is written anew with the same values, or left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from pass_harness import run

from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.layout import Layout, write
from pipeline.passes.lib.sizes import dims_of
from pipeline.passes.lib.views import chain_to, data_of, number_of

OPS = ("Reshape", "Transpose", "Gather", "Slice", "Unsqueeze", "Squeeze", "Mul")


class Views:
    """A random chain of views of ``[b, s, 24]``, as nodes and in numpy."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.base = gs.Variable("x", np.float32, ["b", "s", 24])
        self.graph = gs.Graph(inputs=[self.base], opset=18, ir_version=8)
        self.values = np.arange(3 * 5 * 24, dtype=np.float32).reshape(3, 5, 24)
        self.x, self.tensor = self.values, self.base
        for _ in range(int(self.rng.integers(2, 7))):
            self._add(str(self.rng.choice(OPS)))

    def _put(self, op: str, values: np.ndarray, *inputs: Any, **attrs: Any) -> None:
        name = f"t{len(self.graph.nodes)}"
        made = gs.Variable(name, np.float32)
        constants = [gs.Constant(f"{name}/{n}", np.array(i)) for n, i in enumerate(inputs)]
        self.graph.nodes.append(gs.Node(op, name, attrs, [self.tensor, *constants], [made]))
        self.values, self.tensor = values, made

    def _add(self, op: str) -> None:
        v, rng = self.values, self.rng
        axis = int(rng.integers(v.ndim))
        if op == "Transpose":
            perm = [int(a) for a in rng.permutation(v.ndim)]
            self._put(op, v.transpose(perm), perm=perm)
        elif op == "Unsqueeze" and v.ndim < 5:
            self._put(op, np.expand_dims(v, axis), [axis])
        elif op == "Squeeze" and v.shape[axis] == 1 and v.ndim > 1:
            self._put(op, v.squeeze(axis), [axis])
        elif op == "Gather" and v.shape[axis] % 2 == 0 and v.ndim > 2:
            n = int(rng.integers(-v.shape[axis], v.shape[axis]))
            self._put(op, v.take(n, axis), np.int64(n), axis=axis)
        elif op == "Slice" and v.shape[axis] % 2 == 0:
            half = v.shape[axis] // 2
            start = int(rng.integers(2)) * half
            part = v.take(range(start, start + half), axis)
            self._put(op, part, [start], [start + half], [axis])
        elif op == "Mul":
            self._put(op, v * np.float32(0.5), np.float32(0.5))
        elif op == "Reshape":
            self._reshape(v)

    def _reshape(self, v: np.ndarray) -> None:
        """Splits an even axis, or joins two axes; dynamic sizes stay in place or become -1."""
        even = [n for n, size in enumerate(v.shape) if size % 2 == 0]
        shape = list(v.shape)
        if even and self.rng.integers(2):
            n = int(self.rng.choice(even))
            shape[n : n + 1] = [2, shape[n] // 2] if self.rng.integers(2) else [shape[n] // 2, 2]
        elif v.ndim > 1:
            n = int(self.rng.integers(v.ndim - 1))
            shape[n : n + 2] = [shape[n] * shape[n + 1]]
        given = [-1 if size % 3 == 0 or size % 5 == 0 else size for size in shape]
        if given.count(-1) < 2:
            self._put("Reshape", v.reshape(shape), given)


@pytest.mark.parametrize("seed", range(300))
def test_the_same_values_at_the_same_places(seed: int) -> None:
    views = Views(seed)
    chain = chain_to(views.tensor)
    if not chain:
        return
    dims = dims_of(data_of(chain[0][0]))
    assert dims is not None
    layout = Layout(dims)
    steps = layout.steps(layout.axes) if all(layout.follow(*pair) for pair in chain) else None
    if not steps:
        return
    views.graph.nodes.append(gs.Node("Identity", "end", {}, [views.tensor]))
    end = views.graph.nodes[-1]
    end.outputs = [gs.Variable("y", np.float32)]
    views.graph.outputs = list(end.outputs)
    c = Chain(views.graph, end)
    made = write(c, views.base, steps, np.float32)
    c.op("Mul", made, np.array(layout.scale, np.float32), dtype=np.float32)
    c.finish()
    views.graph.cleanup()
    (y,) = run(gs.export_onnx(views.graph), {"x": views.x})
    np.testing.assert_array_equal(y, views.values)


def test_enough_chains_are_written() -> None:
    found = 0
    for seed in range(300):
        chain = chain_to(Views(seed).tensor)
        layout = Layout(dims_of(data_of(chain[0][0])) or []) if chain else None
        if layout and all(layout.follow(*pair) for pair in chain) and layout.steps(layout.axes):
            found += 1
    assert found > 100


def test_a_reshape_that_mixes_axes_is_not_followed() -> None:
    x = gs.Variable("x", np.float32, ["b", 6, 4])
    y = gs.Variable("y", np.float32)
    node = gs.Node("Reshape", "r", {}, [x, gs.Constant("s", np.array([0, 4, 6]))], [y])
    layout = Layout(dims_of(x) or [])
    assert not layout.follow(node, y)


def test_a_size_that_is_not_proven_is_not_split() -> None:
    x = gs.Variable("x", np.float32, ["b", "s", "c"])
    y = gs.Variable("y", np.float32)
    node = gs.Node("Reshape", "r", {}, [x, gs.Constant("s", np.array([0, 0, 2, -1]))], [y])
    assert not Layout(dims_of(x) or []).follow(node, y)


@pytest.mark.parametrize(("value", "number"), [(4.0, 0.25), (0.0, None)])
def test_numbers_are_computed_only_where_they_exist(value: float, number: float | None) -> None:
    four = gs.Constant("four", np.array(value, np.float32))
    y = gs.Variable("y", np.float32, [])
    gs.Node("Reciprocal", "r", {}, [four], [y])
    assert number_of(y) == number
