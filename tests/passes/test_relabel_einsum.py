"""relabel_einsum: equations without an output, and too many labels."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES

P = PASSES["relabel_einsum"]


def graph_of(equation: str) -> gs.Graph:
    x, y, z = (gs.Variable(name, np.float32) for name in "xyz")
    node = gs.Node("Einsum", "e", {"equation": equation}, [x, y], [z])
    return gs.Graph([node], [x, y], [z], opset=18)


@pytest.mark.parametrize("equation", ["bch,bcH", "Ac,cb", "zB,zA", "...cH,...cb"])
def test_the_order_of_an_output_that_is_not_written_stays(equation: str) -> None:
    """Capitals come before small letters. The standard follows numpy, which is the reference."""
    graph = graph_of(equation)
    assert P.run(graph).modified
    new = graph.nodes[0].attrs["equation"]
    assert new == new.lower()
    rng = np.random.default_rng(0)
    sizes = {c: 2 + n for n, c in enumerate(sorted(set(equation) - set(",.")))}
    terms = [term.replace("...", "") for term in equation.split(",")]
    x, y = (rng.normal(size=[sizes[c] for c in term]) for term in terms)
    np.testing.assert_allclose(np.einsum(equation, x, y), np.einsum(new, x, y))


def test_more_labels_than_letters_are_refused() -> None:
    graph = graph_of("abcdefghijklmno,pqrstuvwxyzA")
    (refused,) = P.run(graph).refused
    assert "27 labels" in refused.detail
