"""An op that can't be exported is refused by its name, the model's line and what to use instead."""

from __future__ import annotations

import pytest
import torch
from op_exports import Of, compare_op, export_op
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.export.ops.refusals import _INSTEAD
from pipeline.export.tries import affordable_elements
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def refused(tmp_path, function, example) -> ExportError:
    with pytest.raises(ExportError) as error:
        export_op(function, [example], tmp_path / "m.onnx", [[0]])
    return error.value


def test_the_op_and_the_line_of_the_model(tmp_path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            y = torch.special.i0(x)
            return y + 1

    error = refused(tmp_path, Model(), random(3, 4))
    assert str(error).startswith("aten.special_i0 at ")  # torch's own text says prims.bessel_i0
    assert "test_refusals.py:" in error.line
    assert error.line.endswith("in forward: y = torch.special.i0(x)")
    assert "it has no translation to ONNX; write this step with other ops" in str(error)
    assert "translating node" not in str(error)
    assert "translating node" in error.detail or "Failed to convert" in error.detail


def test_every_op_without_a_translation_is_named_at_once(tmp_path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            first = torch.special.i0(x).sum() + torch.special.i0(x + 1).sum()
            return x + first + torch.kthvalue(x, 1).values.sum()

    error = refused(tmp_path, Model(), random(3, 4))
    assert error.what == "aten.special_i0 can't be exported: it has no translation to ONNX"
    (other,) = error.others  # the second i0 is in the first one's line
    assert other.what == "aten.kthvalue can't be exported: it has no translation to ONNX"
    assert "return x + first" in other.line
    assert str(error).endswith(f"; also {other}")
    assert other.do.startswith("use torch.topk")


def test_an_op_that_torch_traces_but_cannot_run() -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            return functional.pad(x, (2, 2, 0, 0), mode="reflect") + 1

    graph = torch.export.export(Model(), (random(1, 2, 3, 8),)).module(check_guards=False)
    (pad,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.pad.default)
    pad.args = (pad.args[0], [2, 2], *pad.args[2:])  # as symbolic numbers of a branch are traced
    graph.recompile()
    with pytest.raises(ExportError) as error:
        affordable_elements(graph, [random(1, 2, 3, 8)])
    assert error.value.what == (
        "aten.pad can't be exported: torch traces it, but can't run it: Padding size 2 is not "
        "supported for 4D input tensor"
    )
    assert error.value.line.endswith('pad(x, (2, 2, 0, 0), mode="reflect") + 1')
    assert error.value.do.startswith("write this step with other ops")


def test_inside_the_whole_export(tmp_path) -> None:
    spec = ModelSpec(
        "m", lambda _: Of(torch.linalg.svdvals), (Input("x", (Dim("b", 1, 4, 9), 3, 3)),),
        (Output("y"),), Tolerance(1e-4, 1e-4, "a test"),
    )  # fmt: skip
    with pytest.raises(ExportError, match=r"^model m: aten.linalg_svdvals at .*before or after"):
        export(spec, None, tmp_path / "m.onnx")


def test_an_option_that_follows_a_size(tmp_path) -> None:
    def conv1d(x):
        kernel = x.new_ones(x.shape[0], 1, 3)
        return functional.conv1d(x.reshape(1, -1, 8), kernel, groups=x.shape[0])

    error = refused(tmp_path, conv1d, random(3, 1, 8))
    assert "ONNX needs a number for groups, which here follows a size" in str(error)
    assert "make groups a number" in str(error)


def test_a_layer_that_forward_makes(tmp_path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            layer = torch.nn.Linear(4, 4)
            layer.weight.data = torch.eye(4)
            return layer(x)

    error = refused(tmp_path, Model(), random(3, 4))
    assert "aten.uniform_ at " in str(error)
    assert "make it in __init__, with its final weights" in str(error)
    assert error.line.endswith("layer = torch.nn.Linear(4, 4)")


def test_a_divisor_with_a_window_that_may_be_smaller(tmp_path) -> None:
    """torch's exporter leaves the divisor out, and the last column is then another."""
    pool = torch.nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=9)
    assert "leave ceil_mode out" in str(refused(tmp_path, pool, random(2, 3, 7, 6)))


def test_a_parametrized_weight(tmp_path) -> None:
    layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4)).eval()
    with torch.no_grad():
        expected = layer(random(3, 4))
    error = refused(tmp_path, layer, random(3, 4))
    assert "remove_parametrizations(module, name)" in str(error)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    export_op(layer, [random(3, 4)], tmp_path / "m.onnx", [[0]])
    compare_op(layer, tmp_path / "m.onnx", [random(5, 4)], near=1e-5)
    torch.testing.assert_close(layer(random(3, 4)), expected)


def grouped(x):
    """Rows 0 and 1 by the first matrix, the others by the second."""
    weights = torch.arange(2 * 4 * 3, dtype=torch.float32).reshape(2, 4, 3) / 9
    ends = torch.tensor([2, 7])
    group = (torch.arange(x.shape[0])[:, None] >= ends).sum(1, keepdim=True)
    return sum(torch.where(group == n, x @ weights[n], 0.0) for n in range(2))


REPLACED = {
    "and_": (lambda x: x[: x.shape[0] & 3], lambda x: x[: x.shape[0] % 4]),
    "lshift": (lambda x: x + (x.shape[0] << 2), lambda x: x + x.shape[0] * 4),
    "rshift": (lambda x: x[: x.shape[0] >> 1], lambda x: x[: x.shape[0] // 2]),
    "aten.kthvalue": (
        lambda x: torch.kthvalue(x, 3, 1)[0],
        lambda x: torch.topk(x, 3, 1, largest=False)[0][:, -1],
    ),
    "aten.linalg_pinv": (
        torch.linalg.pinv,
        lambda x: torch.linalg.inv(x.mT @ x) @ x.mT,
    ),
    "aten.linalg_solve_triangular": (
        lambda x: torch.linalg.solve_triangular(x[:, :4].tril(), x[:, :4], upper=False),
        lambda x: torch.linalg.solve(x[:, :4].tril(), x[:, :4]),
    ),
    "aten.nanmedian": (
        lambda x: torch.nanmedian(x, 1)[0],
        lambda x: torch.median(torch.nan_to_num(x), 1)[0],
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_to_use_instead_can_be_exported(tmp_path, name) -> None:
    function, other = REPLACED[name]
    example = random(3, 7, 4)
    error = refused(tmp_path, function, example)
    assert name in str(error)
    assert _INSTEAD[name] in str(error)
    path = tmp_path / "m.onnx"
    export_op(other, [example], path, [[0]])
    compare_op(function, path, [random(5, 7, 4)], near=1e-2)
