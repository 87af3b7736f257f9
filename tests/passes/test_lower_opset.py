"""Opset lowering: the tables compared with the standard, and graphs as torch exports them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from pass_harness import apply, assert_same, run
from torch.nn import functional

from pipeline.passes import expand_functions, lower_opset
from pipeline.passes.case import Case, Shapes
from pipeline.passes.lowering import CONVERTERS, NEWEST, SAME

LEVELS = {
    17: (expand_functions.TO_17, lower_opset.TO_17),
    19: (expand_functions.TO_19, lower_opset.TO_19),
}


def history() -> dict[str, list[onnx.defs.OpSchema]]:
    """Every op of the standard with its schemas, oldest first."""
    ops: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            ops.setdefault(schema.name, []).append(schema)
    return {name: sorted(all_, key=lambda s: s.since_version) for name, all_ in ops.items()}


def changes() -> list[tuple[onnx.defs.OpSchema, onnx.defs.OpSchema]]:
    return [
        (old, new)
        for schemas in history().values()
        for old, new in pairwise(schemas)
        if 17 < new.since_version <= NEWEST
    ]


def lower(model: onnx.ModelProto, level: int) -> onnx.ModelProto:
    for p in LEVELS[level]:
        model, result = apply(p, model)
        assert not result.refused
    onnx.checker.check_model(model, full_check=True)
    (opset,) = (o.version for o in model.opset_import if o.domain == "")
    assert opset == level
    return model


def case(opset: int, text: str, *shapes: Shapes) -> Case:
    return Case("lower_opset_17", "x", "positive", text, shapes, opset=opset)


def assert_lowered_the_same(made: Case, level: int) -> None:
    after = lower(made.model(), level)
    for shapes in made.shapes:
        feeds = made.feeds(shapes)
        assert_same(run(made.model(), feeds), run(after, feeds))


def test_the_tables_hold_every_op_that_changed() -> None:
    missing = {new.name for _, new in changes()} - CONVERTERS.keys() - SAME
    # both levels lack Attention; TensorRT has no optionals, so they are refused
    assert missing == {"Attention", "OptionalGetElement", "OptionalHasElement"}


def test_ops_that_only_take_more_types_have_the_same_inputs_attributes_and_outputs() -> None:
    compared = 0
    for old, new in changes():
        if new.name not in SAME:
            continue
        compared += 1
        for one, other in ((old.inputs, new.inputs), (old.outputs, new.outputs)):
            assert [(f.name, f.option) for f in one] == [(f.name, f.option) for f in other]
            for a, b in zip(one, other, strict=True):
                assert a.types <= b.types
        assert old.attributes.keys() == new.attributes.keys()
        for key, attribute in old.attributes.items():
            assert attribute.default_value == new.attributes[key].default_value
    assert compared > 60


@pytest.mark.parametrize("level", [17, 19])
@pytest.mark.parametrize("axis", ["", "-2", "1"])
def test_the_axis_of_dft(axis: str, level: int) -> None:
    """This is not a case, because TensorRT has no DFT."""
    given = f"<int64 a = {{{axis}}}>{{ y = DFT(x, , a) }}" if axis else "{ y = DFT(x) }"
    text = f"(float[n,w,v,1] x) => (float[n,w,v,2] y) {given}"
    assert_lowered_the_same(case(20, text, {"x": (1, 4, 3, 1)}, {"x": (2, 6, 5, 1)}), level)


def test_forms_that_tensorrt_rtx_does_not_parse_either() -> None:
    """There are no cases for level 17, because RTX needs other passes for these forms."""
    image: tuple[Shapes, ...] = ({"x": (1, 4, 3, 5)}, {"x": (2, 4, 6, 8)})
    sizes = (
        "(float[n,4,h,w] x) => (float[n,4,7,9] y) <int64[2] s = {7, 9}>"
        '{ y = Resize<mode="cubic", axes=[2, 3], antialias=0>(x, , , s) }'
    )
    anything = "(bool[n,4,h,w] x) => (bool[n,4,h,1] y) <int64[1] a = {3}> { y = ReduceMin(x, a) }"
    assert_lowered_the_same(case(18, sizes, *image), 17)
    assert_lowered_the_same(case(20, anything, *image), 17)


def test_bfloat16_goes_through_float32_where_the_older_form_lacks_it() -> None:
    made = case(
        22,
        "(bfloat16[n,2,h,w] x, bfloat16[3,2,1,1] k) => (bfloat16[n,3,h,w] y) { y = Conv(x, k) }",
    )
    after = lower(made.model(), 19)
    assert [node.op_type for node in after.graph.node] == ["Cast", "Cast", "Conv", "Cast"]
    assert after.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16


def test_one_node_that_cannot_be_lowered_leaves_all_as_it_was() -> None:
    made = case(
        18,
        "(int32[n,4] x, float[n,4] v) => (int32[n,4] y, float[n,1] m) <int64[1] a = {1}>"
        "{ y = BitwiseNot(x) m = ReduceMean(v, a) }",
    )
    source = onnx.shape_inference.infer_shapes(made.model())
    graph = gs.import_onnx(source)
    result = lower_opset.TO_17.run(graph)
    assert not result.rewritten
    assert [change.op for change in result.refused] == ["BitwiseNot"]
    assert gs.export_onnx(graph) == gs.export_onnx(gs.import_onnx(source))


def test_the_opset_of_the_model_that_was_read_stays() -> None:
    source = case(20, "(float[n] x) => (float[n] y) { y = Relu(x) }").model()
    graph = gs.import_onnx(source)
    assert lower_opset.TO_19.run(graph).modified
    assert gs.export_onnx(graph).opset_import[0].version == 19
    assert source.opset_import[0].version == 20


def test_opsets_that_the_tables_do_not_know_are_refused() -> None:
    newer = [schemas[-1] for schemas in history().values() if schemas[-1].since_version > NEWEST]
    if not newer:
        pytest.skip(f"this onnx ends at opset {NEWEST}")
    op = next(schema for schema in newer if schema.name == "Softplus" or schema.max_input == 1)
    x, y = gs.Variable("x", np.float32, [2]), gs.Variable("y", np.float32, [2])
    graph = gs.Graph([gs.Node(op.name, "n", {}, [x], [y])], [x], [y], opset=op.since_version)
    assert "not known" in lower_opset.TO_19.run(graph).refused[0].detail


class Everyday(torch.nn.Module):
    """The ops that newer opsets changed, as torch writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(2, 8)
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional.gelu(self.norm(x)) + functional.mish(x)
        y = functional.pad(y, (1, 2, 0, 1), mode="reflect")
        sampled = functional.grid_sample(y, grid, align_corners=False)
        tokens = sampled.flatten(2).transpose(1, 2)
        q, k, v = self.project(tokens).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        first, second, third = torch.split(y, [3, 3, 2], dim=1)
        pooled = first.mean((2, 3)) + second.amax((2, 3))
        return mixed[:, 0], pooled, third.norm(dim=1)


@pytest.fixture(scope="module", params=[20, 23])
def everyday(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    x, grid = torch.randn(2, 8, 6, 7), torch.rand(2, 4, 5, 2) * 2 - 1
    path = tmp_path_factory.mktemp("everyday") / "model.onnx"
    n, h, w = (torch.export.Dim(name, min=2, max=16) for name in ("n", "h", "w"))
    torch.onnx.export(
        Everyday().eval(),
        (x, grid),
        path,
        dynamo=True,
        opset_version=request.param,
        dynamic_shapes=({0: n, 2: h, 3: w}, {0: n}),
        verbose=False,
    )
    return path


@pytest.mark.parametrize("level", [17, 19])
def test_a_torch_export(everyday: Path, level: int) -> None:
    model = onnx.inliner.inline_local_functions(onnx.load(everyday))
    names = [value.name for value in model.graph.input]
    after = lower(model, level)
    rng = np.random.default_rng(0)
    for n, h, w in ((2, 6, 7), (3, 9, 4)):
        arrays = (rng.normal(size=(n, 8, h, w)), rng.uniform(-1, 1, (n, 4, 5, 2)))
        feeds = {k: a.astype(np.float32) for k, a in zip(names, arrays, strict=True)}
        assert_same(run(model, feeds), run(after, feeds))
