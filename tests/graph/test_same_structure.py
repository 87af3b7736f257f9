"""Two ONNX files that differ in weights of an engine only, and files that differ in more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from pipeline.graph.same_structure import structure_change

_NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b,3] x, bool on) => (float[b,4] y)
{
    a = MatMul(x, w)
    s = Reshape(a, shape)
    c = Constant<value = float {0.5}>()
    m = Mul(s, c)
    y = If(on) <
        then_branch = then () => (float[b,4] t) { t = Add(m, bias) },
        else_branch = other () => (float[b,4] e) { e = Relu(m) }
    >
}"""
Change = Callable[[onnx.ModelProto], object]


def net(seed: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_NET)
    rng = np.random.default_rng(seed)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(rng.normal(size=(3, 4)).astype(np.float32), "w"),
            numpy_helper.from_array(rng.normal(size=4).astype(np.float32), "bias"),
            numpy_helper.from_array(np.array([-1, 4]), "shape"),
        ]
    )
    for number, node in enumerate(model.graph.node):
        node.name = f"node{number}"
    return model


@pytest.fixture
def change(tmp_path: Path) -> Callable[[Change], str]:
    def found(edit: Change) -> str:
        old, new = tmp_path / "old.onnx", tmp_path / "new.onnx"
        onnx.save(net(0), old)
        model = net(1)
        edit(model)
        onnx.save(model, new)
        return structure_change(old, new)

    return found


def weight(model: onnx.ModelProto, array: np.ndarray, name: str) -> None:
    (place,) = (n for n, t in enumerate(model.graph.initializer) if t.name == name)
    model.graph.initializer[place].CopyFrom(numpy_helper.from_array(array, name))


def test_other_values_of_float_weights(change: Callable[[Change], str]) -> None:
    def constant(model: onnx.ModelProto) -> None:
        value = numpy_helper.from_array(np.array(0.25, np.float32))
        model.graph.node[2].attribute[0].t.CopyFrom(value)

    assert change(lambda _: None) == ""
    assert change(constant) == ""


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda m: weight(m, np.ones((3, 5), np.float32), "w"),
            "the weight w has the shape [3, 5] instead of [3, 4]",
        ),
        (
            lambda m: weight(m, np.ones((3, 4), np.float16), "w"),
            "the weight w is float16 instead of float",
        ),
        (lambda m: weight(m, np.array([4, -1]), "shape"), "the weight shape has other integers"),
        (lambda m: m.graph.initializer.pop(0), "the weight w is missing"),
        (
            lambda m: m.graph.initializer.append(numpy_helper.from_array(np.ones(2), "z")),
            "the weight z is new",
        ),
        (lambda m: m.graph.node.pop(), "it has 4 nodes instead of 5"),
        (
            lambda m: setattr(m.graph.node[3], "op_type", "Div"),
            "the node node3 [Mul] is a Div now",
        ),
        (
            lambda m: setattr(m.graph.node[0], "name", "other"),
            "the node node0 [MatMul] is another one, or has other inputs or outputs",
        ),
        (
            lambda m: m.graph.node[1].attribute.append(helper.make_attribute("allowzero", 1)),
            "the attribute allowzero of node node1 [Reshape] differs",
        ),
        (
            lambda m: setattr(m.graph.node[4].attribute[0].g.node[0], "op_type", "Sub"),
            "the node t [Add] is a Sub now",
        ),
        (
            lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[1], "dim_value", 5),
            "the outputs differ",
        ),
        (lambda m: setattr(m.opset_import[0], "version", 16), "the opsets differ"),
    ],
)
def test_what_differs(change: Callable[[Change], str], edit: Change, text: str) -> None:
    assert change(edit) == text


def test_weights_in_files_of_their_own(tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        (tmp_path / name).mkdir()
        onnx.save(
            net(seed), tmp_path / name / "net.onnx", save_as_external_data=True,
            location="net.onnx.data", size_threshold=0,
        )  # fmt: skip
    old, new = tmp_path / "old" / "net.onnx", tmp_path / "new" / "net.onnx"
    assert structure_change(old, new) == ""
    model = net(1)
    weight(model, np.array([4, -1]), "shape")
    new.with_name("net.onnx.data").unlink()
    onnx.save(model, new, save_as_external_data=True, location="net.onnx.data", size_threshold=0)
    assert structure_change(old, new) == "the weight shape has other integers"


_FIXED = """<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
net (float[b,3,h,w] x, float factor) => (float[b,3,p,q] y)
{
    c = Conv(x, kernel)
    r = Resize(c, , scales)
    d = Pad(r, pads, value)
    e = Clip(d, low)
    f = own.Plugin<alpha = 0.5>(e, table)
    g = Add(f, shared)
    i = Identity(step)
    k = Resize(g, , i)
    o = ConstantOfShape<value = float[1] {0.5}>(sizes)
    l = Mul(k, o)
    m = Constant<value = float {2.0}>()
    n = Clip(l, , m)
    q = Clip(n, shared)
    y = If(on) <
        then_branch = then () => (float[b,3,p,q] t) { t = Mul(q, inner) },
        else_branch = other () => (float[b,3,p,q] z) { z = Clip(q, bound) }
    >
}"""


def fixed() -> onnx.ModelProto:
    model = onnx.parser.parse_model(_FIXED)
    arrays = {
        "kernel": np.full((3, 3, 1, 1), 0.5), "scales": np.array([1, 1, 2, 2]),
        "value": np.array(0.5), "low": np.array(0.5), "table": np.ones(3), "shared": np.array(0.5),
        "step": np.array([1, 1, 2, 2]), "inner": np.array(0.5), "bound": np.array(0.5),
    }  # fmt: skip
    weights = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    integers = {"pads": np.zeros(8, np.int64), "sizes": np.ones(1, np.int64)}
    weights += [numpy_helper.from_array(a, n) for n, a in integers.items()]
    model.graph.initializer.extend([*weights, numpy_helper.from_array(np.array(True), "on")])
    values = numpy_helper.from_array(np.array([0.5], np.float32), "sparse")
    places = numpy_helper.from_array(np.array([1]), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3]))
    return model


def twice(tensor: onnx.TensorProto) -> None:
    array = numpy_helper.to_array(tensor) * np.float32(2)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def changed(tmp_path: Path, edit: Change) -> str:
    old, new = tmp_path / "old.onnx", tmp_path / "new.onnx"
    onnx.save(fixed(), old)
    model = fixed()
    edit(model)
    onnx.save(model, new)
    return structure_change(old, new)


def by_name(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


@pytest.mark.parametrize("name", ["kernel", "inner"])
def test_numbers_that_a_refit_replaces(tmp_path: Path, name: str) -> None:
    assert changed(tmp_path, lambda m: twice(by_name(m, name))) == ""


@pytest.mark.parametrize("name", ["scales", "value", "low", "table", "shared", "step", "bound"])
def test_numbers_that_a_refit_keeps(tmp_path: Path, name: str) -> None:
    text = f"the weight {name} has other numbers, which a refit keeps"
    assert changed(tmp_path, lambda m: twice(by_name(m, name))) == text


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda m: setattr(m.graph.node[4].attribute[0], "f", 0.25),
            "the attribute alpha of node f [Plugin] differs",
        ),
        (
            lambda m: twice(m.graph.node[8].attribute[0].t),
            "the attribute value of node o [ConstantOfShape] has other numbers, which a refit "
            "keeps",
        ),
        (
            lambda m: twice(m.graph.node[10].attribute[0].t),
            "the attribute value of node m [Constant] has other numbers, which a refit keeps",
        ),
        (
            lambda m: twice(m.graph.sparse_initializer[0].values),
            "the weight sparse has other numbers, which a refit keeps",
        ),
        (
            lambda m: m.graph.sparse_initializer[0].indices.CopyFrom(
                numpy_helper.from_array(np.array([2]), "places")
            ),
            "the weight sparse has other integers",
        ),
        (lambda m: m.graph.sparse_initializer.pop(), "the weight sparse is missing"),
    ],
)
def test_attributes_and_sparse_weights(tmp_path: Path, edit: Change, text: str) -> None:
    assert changed(tmp_path, edit) == text


def test_not_a_number_equals_itself(tmp_path: Path) -> None:
    old, new = tmp_path / "old.onnx", tmp_path / "new.onnx"
    model = fixed()
    by_name(model, "low").CopyFrom(numpy_helper.from_array(np.array(np.nan, np.float32), "low"))
    for path in (old, new):
        onnx.save(model, path)
    assert structure_change(old, new) == ""
