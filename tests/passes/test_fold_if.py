"""fold_if: the remaining branch, and the conditions that count as known."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, apply, inferred, own, run

from pipeline.machine.target import find_target
from pipeline.passes.lib.known import depends_on_data, known
from pipeline.rewrite.rewrite import rewrite

P = PASSES["fold_if"]


def condition(text: str) -> gs.Tensor:
    """The tensor `c` of a graph on ``float[n,3,h,w] x, float[n,3,h,w] z, bool b``."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> '
        "g (float[n,3,h,w] x, float[n,3,h,w] z, bool b) => (bool c) <int64 one = {1}, "
        "int64 three = {3}, int64 four = {4}, int64 two = {2}, bool yes = {1}> "
        f"{{ {text} }}"
    )
    return gs.import_onnx(inferred(model)).outputs[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s = Shape(x) d = Gather(s, one) c = Equal(d, three)", True),
        ("s = Shape(x) d = Gather(s, one) c = Less(d, three)", False),
        ("s = Shape(x) r = Size(s) c = Equal(r, four)", True),
        ("s = Shape<start=1, end=2>(x) d = Squeeze(s) c = GreaterOrEqual(d, four)", False),
        ("s = Shape(x) t = Shape(z) d = Gather(s, two) e = Gather(t, two) c = Equal(d, e)", True),
        ("s = Shape(x) d = Gather(s, two) e = Add(d, one) c = Greater(e, d)", True),
        ("n = Not(yes) c = And(b, n)", False),
        ("c = Or(yes, b)", True),
        ("c = Xor(yes, yes)", False),
        ("s = Shape(x) d = Gather(s, two) c = Equal(d, three)", None),
        ("s = Shape(x) d = Gather(s, two) e = Gather(s, three) c = Equal(d, e)", None),
        # a size of 0 is possible, although no exporter's symbol shows it
        ("s = Shape(x) d = Gather(s, two) e = Sub(d, d) c = Less(e, d)", None),
        ("c = And(yes, b)", None),
        ("c = Identity(b)", None),
    ],
)
def test_what_is_known(text: str, value: bool | None) -> None:
    found = known(condition(text))
    assert (None if found is None else bool(found.item())) is value


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("s = Shape(x) d = Gather(s, two) c = Equal(d, three)", False),
        ("c = Not(b)", True),
        ("m = ReduceMax<keepdims=0>(x) f = Cast<to=7>(m) c = Equal(f, one)", True),
    ],
)
def test_what_depends_on_data(text: str, data: bool) -> None:
    assert depends_on_data(condition(text)) is data


def test_what_only_the_dead_branch_needed_is_dropped() -> None:
    (case,) = (c for c in own("fold_if", "positive") if "dead branch" in c.name)
    after, _ = apply(P, case.model())
    assert [node.op_type for node in after.graph.node] == ["Relu"]


def test_the_taken_branch_keeps_its_names() -> None:
    (case,) = (c for c in own("fold_if", "positive") if c.name.startswith("nested"))
    source = case.model()
    after, result = apply(P, source)
    assert [node.op_type for node in after.graph.node] == ["Neg", "Abs", "Add"]
    assert {change.node for change in result.rewritten} == {"If_0", "If_0_then_branch_If_2"}


@pytest.mark.parametrize("dtype", ["FLOAT", "BFLOAT16", "INT64"])
def test_weights_of_a_branch_come_out_whole(dtype: str, tmp_path) -> None:
    """Through the stage: the branch's initializers are not in the file's list.

    A branch may return an initializer, or an outer tensor, unchanged.
    """
    kind = getattr(onnx.TensorProto, dtype)
    weight = onnx.helper.make_tensor("weight", kind, [], [3])
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["weight"], ["copy"], "copy")],
        "branch",
        [],
        [
            onnx.helper.make_tensor_value_info("copy", kind, []),
            onnx.helper.make_tensor_value_info("weight", kind, []),
        ],
        [weight],
    )
    node = onnx.helper.make_node(
        "If", ["yes"], ["y", "z"], "choice", then_branch=branch, else_branch=branch
    )
    outputs = [onnx.helper.make_tensor_value_info(name, kind, []) for name in "yz"]
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    graph = onnx.helper.make_graph([node], "g", [], outputs, [yes])
    source, after = tmp_path / "source.onnx", tmp_path / "after.onnx"
    opsets = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), source)
    rewrite(source, after, find_target("rtx-1.7"), [P])
    model = onnx.load(after)
    onnx.checker.check_model(model, full_check=True)
    assert {n.op_type for n in model.graph.node} == {"Identity"}
    values = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer]
    assert values
    assert all(value.shape == () and float(value) == 3 for value in values)
    assert all(t.data_type == kind for t in model.graph.initializer)


def test_torchscript_squeeze_of_a_dim_that_turns_out_static() -> None:
    """TorchScript writes an If for a dim that the export left dynamic.

    With the dim set to 1 afterwards, the If is folded, and the numbers equal torch's.
    """
    torch = pytest.importorskip("torch")

    class Squeeze(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x).squeeze(1)

    import io

    file = io.BytesIO()
    torch.onnx.export(
        Squeeze(),
        (torch.rand(2, 1, 6, 5),),
        file,
        dynamo=False,
        opset_version=17,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "n", 1: "c"}},
    )
    model = onnx.load_from_string(file.getvalue())
    assert "If" in {node.op_type for node in model.graph.node}
    assert P.run(gs.import_onnx(inferred(model))).refused
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    after, result = apply(P, model)
    assert len(result.rewritten) == 1
    assert "If" not in {node.op_type for node in after.graph.node}
    for n in (1, 3):
        x = torch.rand(n, 1, 6, 5) - 0.5
        (y,) = run(after, {"x": x.numpy()})
        np.testing.assert_array_equal(y, Squeeze()(x).numpy())
