"""Decomposing op by op gives the graph of torch's own way, and goes that way where it has to."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from op_exports import compare_op, export_op
from torch import nn
from torch.nn import functional
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter

from pipeline.export.torch_2_13.decompose import op_by_op

SIZES = ((1, 8, 6), (2, 16, 9), (3, 7, 13))


class Of(nn.Module):
    """A function of an image, with layers that it may use."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.group = nn.GroupNorm(2, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = functional.relu_(m.norm(m.conv(x)))
    z = m.norm(y)
    z += y
    return functional.relu_(z)


def _view_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    half = y[:, :2]
    y.add_(1.0)
    return half * 2 + y[:, 2:]


def _view_changed(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    y[:, :2].mul_(3.0)
    return y


def _view_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    y.mul_(2.0)
    half = y[:, :2]
    return half - y[:, 2:]


def _old_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    z = y.sigmoid_()
    y.add_(z)  # both names show the sum
    return y * 2 + z


def _not_dropped(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    same = functional.dropout(y, 0.5, training=False)
    y.add_(1.0)
    return same * 2


def _reshaped(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    flat = y.flatten(2)
    y.relu_()
    return flat.mean(-1)


def _transposed(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x).permute(0, 2, 3, 1)
    y += 1.0
    return y.contiguous().flatten(1, 2)


def _double(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x).double()
    y.add_(m.conv(x))
    return y.float()


def _integers(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = (m.conv(x) * 10).long()
    y.add_(1)
    return y // 2 + torch.arange(y.shape[-1])


def _mixed(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    count = torch.tensor(3) * y.shape[-1]
    return y * count + (y > 0) + torch.arange(y.shape[-1]) / 2


def _parts(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = m.conv(x).chunk(2, 1)
    a.mul_(2.0)
    return torch.cat([b, a], 1)


def _masked(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    y.masked_fill_(y < 0, -1.0)
    y[y > 0.5] = 0.5
    return y


def _compared(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    y.gt_(0.1)  # floats, where gt gives bools
    return y / 3


OP_BY_OP = {
    "residual": _residual,
    "view after a change": _view_after,
    "old name": _old_name,
    "transposed": lambda m, x: m.conv(x).permute(0, 2, 3, 1).contiguous().flatten(1, 2),
    "pooled": lambda m, x: functional.adaptive_avg_pool2d(m.conv(x), 1).flatten(1),
    "pooled channels last": lambda m, x: functional.adaptive_avg_pool2d(
        m.conv(x).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 1
    ),
    "dropped": lambda m, x: functional.dropout(m.conv(x), 0.5, training=False),
    "grouped": lambda m, x: m.group(m.conv(x)),
    "dropout that gives its input": _not_dropped,
    "mixed types": lambda m, x: m.conv(x) * (x[:, :1] > 0) + torch.arange(x.shape[-1]) / 2,
    "tuple": lambda m, x: m.conv(x).max(dim=1),
    "var": lambda m, x: torch.var_mean(m.conv(x), (2, 3)),
    "instance norm": lambda m, x: functional.instance_norm(m.conv(x)),
    "resized": lambda m, x: functional.interpolate(m.conv(x), scale_factor=2.0),
    "split": lambda m, x: m.conv(x).split(2, 1)[1],
    "attention": lambda m, x: functional.scaled_dot_product_attention(*[m.conv(x)] * 3),
    "unflattened": lambda m, x: m.conv(x).unflatten(1, (2, 2)).expand(-1, -1, 2, -1, -1),
    "input returned": lambda m, x: (x, m.conv(x)),
    "a number": lambda m, x: m.conv(x) * x.shape[-1],
    "the number of elements": lambda m, x: m.conv(x) / x.numel(),
    "the smaller size": lambda m, x: m.conv(x)[..., : torch.sym_min(x.shape[-1], 8)],
}
TORCHS_WAY = {
    "view before a change": _view_before,
    "a changed view": _view_changed,
    "reshape that gives a view": _reshaped,
    "a transposed view": _transposed,
    "another type": _double,
    "integers": _integers,
    "a comparison": _compared,
    "a constant": _mixed,
    "parts": _parts,
    "a mask": _masked,
}
EVERY = {**OP_BY_OP, **TORCHS_WAY}


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    free = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    with torch.no_grad():
        return torch.export.export(module, (torch.randn(4, 3, 12, 10),), dynamic_shapes=(free,))


def written(program: torch.export.ExportedProgram) -> bytes:
    file = io.BytesIO()
    torch.onnx.export(program, dynamo=True, opset_version=18, verbose=False).save(file)
    return file.getvalue()


@pytest.mark.parametrize("what", EVERY)
def test_the_graph_is_that_of_torchs_own_way(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    module = Of(EVERY[what]).eval()
    own = written(exported(module))
    again = []
    run = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda *args: again.append(1) or run(*args),
    )
    with op_by_op():
        found = written(exported(module))
    assert bool(again) == (what in TORCHS_WAY)
    assert ops_of(found) == ops_of(own)
    right = []
    for sizes in SIZES:
        x = torch.randn(sizes[0], 3, *sizes[1:])
        with torch.no_grad():
            want = module(x)
        got = run_on(found, x)
        for a, b in zip(got, run_on(own, x), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        every = zip(got, want if isinstance(want, tuple) else (want,), strict=True)
        right += [np.allclose(a, b.numpy(), 1e-4, 1e-5) for a, b in every]
    # torch.export loses that dropout gives its input in eval mode; a conversion refuses the result
    assert all(right) == (what != "dropout that gives its input")


def _changed_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    v = x[:, :1]
    v.relu_()
    return m.conv(x)


@pytest.mark.parametrize("what", [_view_before, _view_changed, _changed_input, _residual])
def test_a_loaded_program_does_not_tell_who_shares_memory(what: Any) -> None:
    module = Of(what).eval()
    file = io.BytesIO()
    torch.export.save(exported(module), file)
    file.seek(0)
    with op_by_op():
        found = written(torch.export.load(file))
    for n, h, w in SIZES:
        x = torch.randn(n, 3, h, w)
        want = module(x.clone()).detach().numpy()
        np.testing.assert_allclose(run_on(found, x)[-1], want, rtol=1e-4, atol=1e-5)


def run_on(file: bytes, x: torch.Tensor) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(file)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


HALF = {
    "a sum": lambda x: x.half().sum(0),
    "a maximum and a running sum": lambda x: (x.half().amax(1), x.half().cumsum(0)),
    "a sum that is read, too": lambda x: (x.half().sum(0), x.half().sum(0) * 2),
    "the same twice": lambda x: [x.half().sum(0)] * 2,
}


@pytest.mark.parametrize("what", HALF)
def test_an_output_that_torch_sums_in_float32_stays_float16(tmp_path: Path, what: str) -> None:
    export_op(HALF[what], [torch.randn(3, 4)], tmp_path / "m.onnx")
    compare_op(HALF[what], tmp_path / "m.onnx", [torch.randn(5, 7)], near=5e-3)


def test_torchs_functions_are_put_back() -> None:
    before = (_fx_passes.decompose_with_registry, _TypePromotionInterpreter.run_node)
    with op_by_op():
        inside = (_fx_passes.decompose_with_registry, _TypePromotionInterpreter.run_node)
    assert all(a is not b for a, b in zip(inside, before, strict=True))
    assert (_fx_passes.decompose_with_registry, _TypePromotionInterpreter.run_node) == before


def ops_of(file: bytes) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load_from_string(file).graph.node)


def test_names_and_lines_stay() -> None:
    module = Of(_residual).eval()
    own = {line for node in onnx.load_from_string(written(exported(module))).graph.node
           for line in places(node)}  # fmt: skip
    with op_by_op():
        found = onnx.load_from_string(written(exported(module)))
    assert {line for node in found.graph.node for line in places(node)} == own
    assert any("batchnorm.py" in line for line in own)


def places(node: onnx.NodeProto) -> list[str]:
    """The modules and the line of a node, without the name of the op."""
    found = {entry.key: entry.value for entry in node.metadata_props}
    names = found.get("pkg.torch.onnx.name_scopes", "").rpartition(",")[0]
    return [names, found.get("pkg.torch.onnx.stack_trace", "")]


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all((x < 100).any(-1))
    return x * 2


class _CheckedAndSelected(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # a name of Python
        return _checked(input)[input > 0]  # of an unknown size, so torch's own way has to do it


@pytest.mark.parametrize("function", [_checked, _CheckedAndSelected()])
def test_checks_of_values_are_left_out(tmp_path: Path, function: Any) -> None:
    """As transformers' `torch_compilable_check` writes them; they have no translation."""
    model = export_op(function, [torch.randn(3, 5)], tmp_path / "m.onnx")
    assert not {"Less", "ReduceMax", "And"} & {node.op_type for node in model.graph.node}
    compare_op(function, tmp_path / "m.onnx", [torch.randn(4, 6)])
