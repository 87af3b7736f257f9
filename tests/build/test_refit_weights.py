"""The weights that a refit takes from a network that TensorRT's parser has read.

Refitting itself needs a GPU: tests/gpu/test_refit_gpu.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from pipeline.build.network import OpenNetwork, open_network
from pipeline.build.refit import network_weights, set_weights
from pipeline.errors import InputError
from pipeline.machine.target import TARGETS, installed_version, use

TARGET = TARGETS["rtx-1.7"]
pytestmark = pytest.mark.skipif(
    installed_version(TARGET) is None, reason="without a GPU, only TensorRT-RTX parses"
)
_NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b,3,h,w] x) => (float[b,5] y)
{
    a = Conv<pads = [1, 1, 1, 1]>(x, first, bias)
    n = BatchNormalization<epsilon = 0.001>(a, scale, shift, mean, var)
    d = ConvTranspose(n, back)
    p = GlobalAveragePool(d)
    f = Flatten(p)
    y = Gemm<transB = 1>(f, last, out)
}"""
_SHAPES = {
    "first": (4, 3, 3, 3), "bias": (4,), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,),
    "back": (4, 6, 2, 2), "last": (5, 6), "out": (5,),
}  # fmt: skip


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.uniform(0.5, 1, s).astype(np.float32) for n, s in _SHAPES.items()}


@pytest.fixture
def opened(weights: dict[str, np.ndarray]) -> OpenNetwork:
    model = onnx.parser.parse_model(_NET)
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}{number}"
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    made = open_network(use(TARGET), TARGET)
    assert made.parse(model.SerializeToString()) == []
    return made


def test_weights_are_as_the_parser_changed_them(
    opened: OpenNetwork, weights: dict[str, np.ndarray]
) -> None:
    trt = use(TARGET)
    arrays = [a for _, _, a in network_weights(trt, opened.network)]
    found = {(n, role.name): a for n, role, a in network_weights(trt, opened.network)}
    assert len(found) == len(arrays)
    assert np.array_equal(found["Conv0", "KERNEL"], weights["first"].ravel())
    assert np.array_equal(found["Conv0", "BIAS"], weights["bias"])
    assert np.array_equal(found["ConvTranspose2", "KERNEL"], weights["back"].ravel())
    assert ("ConvTranspose2", "BIAS") not in found  # it has none
    # the parser makes one scale and one shift of the four weights of a batch normalisation
    scale = weights["scale"] / np.sqrt(weights["var"] + np.float32(0.001))
    shift = weights["shift"] - weights["mean"] * scale
    for wanted in (scale, shift, weights["last"], weights["out"]):
        assert any(
            a.size == wanted.size and np.allclose(a, wanted.ravel(), rtol=1e-5) for a in arrays
        )


class Refitter:
    """A pretended refitter: it keeps what it gets, and refuses weights of another size."""

    def __init__(self, sizes: dict[tuple[str, Any], int]) -> None:
        self.sizes, self.got = sizes, dict[tuple[str, Any], np.ndarray]()

    def get_all(self) -> tuple[list[str], list[Any]]:
        return [name for name, _ in self.sizes], [role for _, role in self.sizes]

    def set_weights(self, name: str, role: Any, weights: np.ndarray) -> bool:
        self.got[name, role] = weights
        return bool(weights.size == self.sizes[name, role])


def test_a_refitter_gets_what_it_can_take(opened: OpenNetwork) -> None:
    trt = use(TARGET)
    kernel, bias = ("Conv0", trt.WeightsRole.KERNEL), ("Conv0", trt.WeightsRole.BIAS)
    refitter = Refitter({kernel: 108, bias: 4})
    set_weights(trt, refitter, opened.network)
    assert refitter.got.keys() == {kernel, bias}


def test_weights_of_another_size_are_refused(opened: OpenNetwork) -> None:
    trt = use(TARGET)
    refitter = Refitter({("Conv0", trt.WeightsRole.KERNEL): 107})
    text = "the kernel of layer Conv0 does not fit the engine: it has 108 elements of float32"
    with pytest.raises(InputError, match=text):
        set_weights(trt, refitter, opened.network)
