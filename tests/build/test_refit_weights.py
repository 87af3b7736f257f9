"""The weights that a refit takes from a network that TensorRT's parser has read.

Refitting itself needs a GPU: tests/gpu/test_refit_gpu.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from numpy.lib.stride_tricks import as_strided
from onnx import numpy_helper

from pipeline.build.network import OpenNetwork, open_network
from pipeline.build.refit import check_names, network_weights, set_weights
from pipeline.errors import InputError
from pipeline.graph.same_structure import REPLACED
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


def test_strides_that_are_lost() -> None:
    """TensorRT 8.6.0 with NumPy 2 gave arrays that show their first number everywhere."""
    values = np.arange(1, 7, dtype=np.float16)

    class Convolution:
        type, name, bias = SimpleNamespace(name="CONVOLUTION"), "c", np.zeros(0, np.float16)
        kernel = as_strided(values, (6,), (0,))

    layer = Convolution()
    assert set(layer.kernel) == {1}
    network = SimpleNamespace(num_layers=1, get_layer=lambda _: layer)
    trt = SimpleNamespace(IConvolutionLayer=Convolution, WeightsRole=use(TARGET).WeightsRole)
    ((_, _, found),) = network_weights(trt, network)
    assert found.tolist() == values.tolist()


class Refitter:
    """A pretended refitter: it keeps what it gets, and refuses weights of another size.

    Like TensorRT 8.6's, it takes `Weights` only, no array.
    """

    def __init__(self, sizes: dict[tuple[str, Any], int]) -> None:
        self.sizes, self.got = sizes, dict[tuple[str, Any], np.ndarray]()

    def get_all(self) -> tuple[list[str], list[Any]]:
        return [name for name, _ in self.sizes], [role for _, role in self.sizes]

    def set_weights(self, name: str, role: Any, weights: Any) -> bool:
        assert type(weights) is use(TARGET).Weights
        self.got[name, role] = weights.numpy()
        return bool(weights.size == self.sizes[name, role])


def test_a_refitter_gets_what_it_can_take(
    opened: OpenNetwork, weights: dict[str, np.ndarray]
) -> None:
    trt = use(TARGET)
    kernel, bias = ("Conv0", trt.WeightsRole.KERNEL), ("Conv0", trt.WeightsRole.BIAS)
    refitter = Refitter({kernel: 108, bias: 4})
    given = set_weights(trt, refitter, opened.network)
    assert refitter.got.keys() == {kernel, bias} and len(given) == 2
    assert np.array_equal(refitter.got[kernel], weights["first"].ravel())


def test_weights_that_the_network_lacks_are_refused(opened: OpenNetwork) -> None:
    """TensorRT itself would keep the old ones: nothing that was set is combined with them."""
    trt = use(TARGET)
    kernel, other = ("Conv0", trt.WeightsRole.KERNEL), ("Conv9", trt.WeightsRole.KERNEL)
    refitter = Refitter({kernel: 108, other: 4, ("Conv9", trt.WeightsRole.BIAS): 4})
    text = r"lack 2 weights of the engine: Conv9 \(kernel\), Conv9 \(bias\)\. Build again"
    with pytest.raises(InputError, match=text):
        set_weights(trt, refitter, opened.network)


def test_names_that_the_file_lacks_are_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        net (float[3] x, bool on) => (float[3] y)
        {
            c = Constant<value = float {0.5}>()
            a = Mul(x, c)
            y = If(on) <
                then_branch = then () => (float[3] t)
                <float[1] inner = {1.0}> { t = Add(a, inner) },
                else_branch = other () => (float[3] e) { e = Add(a, w) }
            >
        }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    check_names(["c", "w", "inner", "tmp_refittable_weight_1"], path)
    text = r"lack 7 weights of the engine: a, w1, w2, w3, w4, \.\.\.\. Build again"
    with pytest.raises(InputError, match=text):
        check_names(["c", "a", "w", *(f"w{n}" for n in range(1, 7))], path)


_BOOL = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
# for each op of REPLACED: the node, and the shapes of its weights
_NODES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "Conv": ("Conv(i, a, c)", {"a": (5, 4, 3, 3), "c": (5,)}),
    "ConvTranspose": ("ConvTranspose(i, a, c)", {"a": (4, 5, 3, 3), "c": (5,)}),
    "BatchNormalization": (
        "BatchNormalization(i, a, c, d, e)",
        {"a": (4,), "c": (4,), "d": (4,), "e": (4,)},
    ),
    "LayerNormalization": ("LayerNormalization(x, a, c)", {"a": (4,), "c": (4,)}),
    "GroupNormalization": ("GroupNormalization<num_groups = 2>(i, a, c)", {"a": (2,), "c": (2,)}),
    "LSTM": (
        "LSTM<hidden_size = 3>(s, a, c, d)",
        {"a": (1, 12, 4), "c": (1, 12, 3), "d": (1, 24)},
    ),
    "GRU": ("GRU<hidden_size = 3>(s, a, c, d)", {"a": (1, 9, 4), "c": (1, 9, 3), "d": (1, 18)}),
    "RNN": ("RNN<hidden_size = 3>(s, a, c, d)", {"a": (1, 3, 4), "c": (1, 3, 3), "d": (1, 6)}),
    "MatMul": ("MatMul(x, a)", {"a": (4, 5)}),
    "Gemm": ("Gemm(x, a, c)", {"a": (4, 5), "c": (5,)}),
    "Einsum": ('Einsum<equation = "bi,ij->bj">(x, a)', {"a": (4, 5)}),
    "Concat": ("Concat<axis = 0>(x, a)", {"a": (2, 4)}),
    "Where": ("Where(on, x, a)", {"a": (1, 4)}),
    **{
        op: (f"{op}(x, a)", {"a": (1, 4)})
        for op in ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "PRelu")
    },
    **{op: (f"{op}(x, a)", {"a": (1, 4)}) for op in _BOOL},
    "Identity": ("Identity(a)", {"a": (1, 4)}),
    "Cast": ("Cast<to = 10>(a)", {"a": (1, 4)}),
    "Transpose": ("Transpose<perm = [1, 0]>(a)", {"a": (3, 4)}),
    "Reshape": ("Reshape(a, two)", {"a": (3, 4)}),
    "Flatten": ("Flatten(a)", {"a": (3, 4, 1)}),
    "Squeeze": ("Squeeze(a, zero)", {"a": (1, 4)}),
    "Unsqueeze": ("Unsqueeze(a, zero)", {"a": (4,)}),
    "Expand": ("Expand(a, two)", {"a": (1, 1)}),
    "Slice": ("Slice(a, zero, one, zero)", {"a": (3, 4)}),
    "Gather": ("Gather(a, k)", {"a": (7, 4)}),
}


def test_every_op_with_weights_has_a_node() -> None:
    assert _NODES.keys() == REPLACED.keys()


def arrays_of(node: str, weights: dict[str, np.ndarray], kind: str = "float") -> list[bytes]:
    """The weights of TensorRT's network of one node."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        net (float[b,4] x, float[b,4,h,w] i, float[n,b,4] s, bool[b,4] on, int64[k] k)
        => ({kind}[] y) {{ {node} }}"""
    )
    integers = {"two": np.array([6, 2]), "zero": np.array([0]), "one": np.array([1])}
    for name, array in {**integers, **weights}.items():
        if name in model.graph.node[0].input:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    trt = use(TARGET)
    opened = open_network(trt, TARGET)
    assert opened.parse(model.SerializeToString()) == []
    return [array.tobytes() for _, _, array in network_weights(trt, opened.network)]


@pytest.mark.parametrize("op", REPLACED)
def test_each_weight_is_in_the_network(op: str) -> None:
    """A changed weight of these ops changes a weight of TensorRT's network, so a refit has it."""
    node, shapes = _NODES[op]
    kind = "bool" if op in _BOOL else "float16" if op == "Cast" else "float"
    outputs = "y, last" if op in ("LSTM", "GRU", "RNN") else "y"
    rng = np.random.default_rng(0)
    weights = {n: rng.uniform(1, 2, shape).astype(np.float32) for n, shape in shapes.items()}
    before = arrays_of(f"{outputs} = {node}", weights, kind)
    for name, array in weights.items():
        assert arrays_of(f"{outputs} = {node}", {**weights, name: 2 * array}, kind) != before, name


@pytest.mark.parametrize(
    ("node", "value"), [("y = Resize(i, , a)", [1, 1, 2, 2]), ("y = Clip(x, a)", 0.5)]
)
def test_other_numbers_are_not_in_the_network(node: str, value: float | list[float]) -> None:
    assert arrays_of(node, {"a": np.array(value, np.float32)}) == []


def test_weights_of_another_size_are_refused(opened: OpenNetwork) -> None:
    trt = use(TARGET)
    refitter = Refitter({("Conv0", trt.WeightsRole.KERNEL): 107})
    text = "the kernel of layer Conv0 does not fit the engine: it has 108 elements of float32"
    with pytest.raises(InputError, match=text):
        set_weights(trt, refitter, opened.network)
