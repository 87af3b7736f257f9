"""Faults of torch.onnx.export: each test shows the fault, then pipeline's fix, at many sizes."""

from __future__ import annotations

import math
import operator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.ops import (
    convolutions,
    deformable,
    exporter,
    extremes,
    groups,
    recurrent,
    scans,
    scatters,
    search,
    selections,
    small_matrices,
    special,
    translation_table,
)
from pipeline.spec.dims import Dim

aten = torch.ops.aten
SIZES = [(9, 30), (14, 27), (19, 24), (24, 21), (29, 18), (34, 15), (39, 9), (90, 77), (180, 167)]
EXAMPLE = (19, 23)


class Wrap(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def image(h: int, w: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(1, 3, h, w, generator=torch.Generator().manual_seed(h + w)).to(dtype)


def dynamic():
    size = torch.export.Dim.DYNAMIC(min=8, max=200)
    return ({2: size, 3: size},)


def ours(function, path: Path, dtype=torch.float32) -> Path:
    with torch.no_grad():
        program = torch.export.export(
            Wrap(function).eval(), (image(*EXAMPLE, dtype),), dynamic_shapes=dynamic()
        )
        shape = (1, 3, Dim("h", 8, 40, 200), Dim("w", 8, 40, 200))
        exporter.to_onnx(
            program, path, opset=18, input_names=["x"], output_names=["y"], shapes=[shape]
        )
    onnx.checker.check_model(onnx.load(path), full_check=True)
    return path


def naive(function, path: Path, dtype=torch.float32) -> Path:
    with torch.no_grad():
        done = torch.onnx.export(
            Wrap(function).eval(), (image(*EXAMPLE, dtype),), dynamic_shapes=dynamic(),
            opset_version=18, dynamo=True, verbose=False,
        )  # fmt: skip
    done.save(path)
    return path


def faults(path: Path, function, near: float = 1e-4, dtype=torch.float32) -> list[str]:
    """The differences from torch, size by size."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the graphs are small
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options)
    (name,) = (i.name for i in session.get_inputs())
    found = []
    for h, w in SIZES:
        x = image(h, w, dtype)
        want = function(x).numpy()
        try:
            got = session.run(None, {name: x.numpy()})[0]
        except Exception:
            found.append(f"{h}x{w} does not run")
            continue
        if got.shape != want.shape:
            found.append(f"{h}x{w} has the shape {got.shape}, not {want.shape}")
        elif got.dtype != want.dtype:
            found.append(f"{h}x{w} is {got.dtype}")
        elif want.size and not float(np.abs(got - want.astype(got.dtype)).max()) <= near:
            found.append(f"{h}x{w} is off by {np.abs(got - want).max()}")
    return found


def resize(**options):
    return lambda x: functional.interpolate(x, **options)


def masked_attention(x):
    """Some rows have no key."""
    column = x[:, :1, :, :1]
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=column > column.mT)


def shifted(x):
    change = x.shape[3] - 14
    return functional.pad(x, (change // 2, change - change // 2))


def scattered(reduce, include_self):
    """Some places get several values, and some get none."""

    def function(x):
        index = (x.abs() * 3).long().clamp(max=11)
        start = 3 + x[:, :, :1].expand(-1, -1, 15, -1)
        return start.scatter_reduce(2, index, x, reduce, include_self=include_self)

    return function


CASES = {
    "scattered mean": (scattered("mean", True), {aten.scatter_reduce.two}),
    "scattered mean of the new": (scattered("mean", False), {aten.scatter_reduce.two}),
    "adaptive average to 3x4": (
        lambda x: functional.adaptive_avg_pool2d(x, (3, 4)),
        {aten.adaptive_avg_pool2d.default},
    ),
    "adaptive average of a sequence": (
        lambda x: functional.adaptive_avg_pool1d(x.flatten(1, 2), 4),
        {aten.adaptive_avg_pool1d.default},
    ),
    "average with a divisor": (
        lambda x: functional.avg_pool2d(x, 2, 1, 1, False, False, divisor_override=3),
        {aten.avg_pool2d.default},
    ),
    "average of a volume with a divisor": (
        lambda x: functional.avg_pool3d(x[None], (1, 2, 2), 1, 0, divisor_override=7),
        {aten.avg_pool3d.default},
    ),
    "area": (resize(size=(5, 7), mode="area"), {aten.adaptive_avg_pool2d.default}),
    "nearest to 25x33": (resize(size=(25, 33)), {aten.upsample_nearest2d.vec}),
    "nearest by 0.3": (resize(scale_factor=0.3), {aten.upsample_nearest2d.vec}),
    "nearest by 0.7": (resize(scale_factor=0.7), {aten.upsample_nearest2d.vec}),
    "nearest by 0.7, recomputed": (
        resize(scale_factor=0.7, recompute_scale_factor=True),
        {aten.upsample_nearest2d.vec, math.trunc},
    ),
    "nearest-exact by 0.7": (
        resize(scale_factor=0.7, mode="nearest-exact"),
        {aten._upsample_nearest_exact2d.vec},
    ),
    "nearest-exact by 1.3": (
        resize(scale_factor=1.3, mode="nearest-exact"),
        {aten._upsample_nearest_exact2d.vec},
    ),
    "floor of a product": (lambda x: x + math.floor(x.shape[3] * 2.1), {math.floor}),
    "ceil of a product": (lambda x: x + math.ceil(x.shape[3] * 8.1), {math.ceil}),
    "floor of a float of one size": (
        lambda x: x + math.floor(x.shape[3] * (5 / x.shape[3])),
        {math.floor},
    ),
    "// by a negative number": (
        lambda x: x.new_zeros(1, 100 + x.shape[3] // -8),
        {operator.floordiv},
    ),
    "bilinear by 0.7": (
        resize(scale_factor=0.7, mode="bilinear"),
        {aten.upsample_bilinear2d.vec},
    ),
    "linear, corners, one value at some sizes": (
        lambda x: functional.interpolate(
            x[0], size=x.shape[3] // 30 + 1, mode="linear", align_corners=True
        ),
        {aten.upsample_linear1d.vec},
    ),
    "bilinear by 1.4, corners": (
        resize(scale_factor=1.4, mode="bilinear", align_corners=True),
        {aten.upsample_bilinear2d.vec},
    ),
    "bicubic by 0.7": (
        resize(scale_factor=0.7, mode="bicubic"),
        {aten.upsample_bicubic2d.vec},
    ),
    "trilinear by 0.7": (
        lambda x: (
            functional.interpolate(x[None], scale_factor=0.7, mode="trilinear")
            if x.shape[1] > 3
            else functional.interpolate(x[None], scale_factor=(1, 0.7, 0.7), mode="trilinear")
        ),
        {aten.upsample_trilinear3d.vec},
    ),
    "antialias, bicubic, by 0.5": (
        resize(scale_factor=0.5, mode="bicubic", antialias=True),
        {aten._upsample_bicubic2d_aa.vec},
    ),
    "antialias, bilinear, by 0.3": (
        resize(scale_factor=0.3, mode="bilinear", antialias=True),
        {aten._upsample_bilinear2d_aa.vec},
    ),
    "antialias, bicubic, corners": (
        resize(size=(7, 29), mode="bicubic", antialias=True, align_corners=True),
        {aten._upsample_bicubic2d_aa.vec},
    ),
    "ceil of a size by //": (
        lambda x: x.new_zeros(1, -(-x.shape[3] // 8) * 8),
        {operator.floordiv},
    ),
    "columns repeated by a size": (
        lambda x: x[:, 0, :9].repeat_interleave(x.shape[3] // 9, dim=-1),
        {aten.repeat_interleave.self_int},
    ),
    "rows repeated by a size or never": (
        lambda x: x.repeat_interleave(x.shape[3] - 9, dim=2),
        {aten.repeat_interleave.self_int},
    ),
    "all repeated by a size": (
        lambda x: x[0, 0, :8].repeat_interleave(x.shape[3] // 8),
        {aten.repeat_interleave.self_int},
    ),
    "half of a difference": (shifted, {operator.floordiv}),
    "rows that attend to nothing": (
        masked_attention,
        {aten.scaled_dot_product_attention.default},
    ),
}


def used(function, path: Path, monkeypatch) -> set:
    """The ops that pipeline's translations handled during the export."""
    seen: set = set()
    noting = exporter._noting

    def note(translation, target, called):
        return noting(noting(translation, target, called), target, seen)

    monkeypatch.setattr(exporter, "_noting", note)
    ours(function, path)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_wrong_without_right_with(tmp_path, monkeypatch, name) -> None:
    function, targets = CASES[name]
    assert faults(naive(function, tmp_path / "naive.onnx"), function), (
        f"torch {torch.__version__} exports {name!r} rightly: is its translation still needed?"
    )
    assert targets <= used(function, tmp_path / "m.onnx", monkeypatch)
    assert faults(tmp_path / "m.onnx", function) == []


UNEXPORTED = {
    "adaptive max to 3x4": lambda x: functional.adaptive_max_pool2d(x, (3, 4)),
    "adaptive max of a sequence": lambda x: functional.adaptive_max_pool1d(x.flatten(1, 2), 4),
    "adaptive average of a volume": lambda x: functional.adaptive_avg_pool3d(x[None], (2, 3, 4)),
    "median": lambda x: x.median(-1)[0],
    "median, rows kept": lambda x: x.median(2, keepdim=True)[0],
    "cumprod": lambda x: (1 + 0.1 * x).cumprod(-1),
    "cumprod of integers as floats": lambda x: (
        (2 * x).int()[..., -5:].cumprod(-1, dtype=torch.float32)
    ),
    "cumprod of rows": lambda x: (1 + 0.1 * x).cumprod(2),
    "roll by a size": lambda x: torch.roll(x, (-(x.shape[2] // 3), 1), (2, 3)),
    "roll of all by a size": lambda x: torch.roll(x, x.shape[3]),
    "attention without a batch": lambda x: functional.scaled_dot_product_attention(
        x[0], x[0], x[0]
    ),
}


@pytest.mark.parametrize("name", UNEXPORTED)
def test_refused_by_torch_right_with(tmp_path, name) -> None:
    function = UNEXPORTED[name]
    with pytest.raises(Exception, match="translating node"):
        naive(function, tmp_path / "naive.onnx")
    assert faults(ours(function, tmp_path / "m.onnx"), function) == []


RIGHT = {
    "scattered sum of the new": scattered("sum", False),
    "scattered maximum": scattered("amax", True),
    "one value": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "one row": lambda x: functional.adaptive_avg_pool2d(x, (1, 3)),
    "the same rows": lambda x: functional.adaptive_avg_pool2d(x, (None, 3)),
    "largest value": lambda x: functional.adaptive_max_pool2d(x, 1),
    "a number of channels": lambda x: functional.adaptive_avg_pool1d(x.mean(2).mT, 2),
    "nearest to sizes": lambda x: functional.interpolate(x, (x.shape[2] // 2, 2 * x.shape[3])),
    "nearest-exact": resize(size=(25, 33), mode="nearest-exact"),
    "nearest by 41": resize(scale_factor=(41.0, 1.0)),
    "antialias to a size": resize(size=(25, 7), mode="bilinear", antialias=True),
    "bilinear by 1.5": resize(scale_factor=1.5, mode="bilinear"),
    # float32(0.9) is below 0.9: ONNX's shape inference gave 35 rows of 40, and torch gives 36
    "bilinear by 0.9": resize(scale_factor=0.9, mode="bilinear"),
    "bilinear by 0.9, corners": resize(scale_factor=0.9, mode="bilinear", align_corners=True),
    "bicubic by 0.9": resize(scale_factor=0.9, mode="bicubic"),
    "% of a negative size": lambda x: functional.pad(x, (0, -x.shape[3] % 8)),
    "% of a size": lambda x: x[:, :, : 1 + x.shape[2] % 7],
    "% of a tensor": lambda x: (torch.arange(x.shape[3]) - 5) % 3,
    "// of a tensor": lambda x: (torch.arange(x.shape[3]) - 5) // 3,
    "ceil": lambda x: functional.pad(x, (0, math.ceil(x.shape[3] / 8) * 8 - x.shape[3])),
    "causal, lengths that differ": lambda x: functional.scaled_dot_product_attention(
        x, x[:, :, :7], x[:, :, :7], is_causal=True
    ),
    "grouped queries": lambda x: functional.scaled_dot_product_attention(
        torch.cat([x, x], 1), x, x, enable_gqa=True
    ),
    "attention with five axes": lambda x: functional.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], x.mean(1)[:, None, None, :, :1] > 0
    ),
    "mask with a row to attend to": lambda x: functional.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(tmp_path, name) -> None:
    # ONNX Runtime's Resize differs by 1e-4 at 180 rows, because its positions are float32
    assert faults(ours(RIGHT[name], tmp_path / "m.onnx"), RIGHT[name], near=3e-4) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.adaptive_avg_pool2d(x, (3, 4)),
        lambda x: functional.adaptive_max_pool2d(x, (3, 4)),
        resize(size=(25, 33)),
    ],
)
def test_half_precision(tmp_path, function) -> None:
    """Averages are computed in float32, so that 1/7 is not rounded to half precision."""
    path = ours(function, tmp_path / "m.onnx", torch.float16)
    assert faults(path, function, near=1e-3, dtype=torch.float16) == []


def test_every_translation_is_tried() -> None:
    """A case covers each key of the table, or covers a key with the same function."""
    tried = {function for f, targets in CASES.values() for function in targets}
    functions = {translation_table()[target] for target in tried}
    # these have files of their own
    modules = (
        convolutions,
        extremes,
        groups,
        recurrent,
        scans,
        scatters,
        search,
        selections,
        small_matrices,
        special,
    )
    functions |= {f for module in modules for f in module.TRANSLATIONS.values()}
    functions |= {*groups.of_libraries().values(), *deformable.translations().values()}
    rest = {t for t, f in translation_table().items() if f not in functions}
    assert {str(t) for t in rest} == {
        *("aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool2d.default"),
        "aten.adaptive_max_pool3d.default",
        *("aten.remainder.Scalar", "aten.median.dim", "aten.cumprod.default"),
        "aten.roll.default",
        *("aten.diagonal.default", "aten.diagonal_copy.default"),  # test_diagonals.py
        "aten.diagonal_scatter.default",  # test_diagonals.py
        *("aten.squeeze.dim", "aten.squeeze.dims"),  # test_axes_at_small_sizes.py
        *("aten.any.default", "aten.any.dim", "aten.any.dims"),  # test_axes_at_small_sizes.py
        "aten.div.Tensor_mode",  # test_missing.py, test_quotients.py
        *("aten.remainder.Tensor", "aten.remainder.Scalar_Tensor"),  # test_quotients.py
        "aten.einsum.default",  # test_einsum.py
        "aten.floor_divide.default",  # test_quotients.py
        "aten.atan2.default",  # test_angles.py
        "aten.sort.stable",  # test_missing.py
        str(operator.mod),
        str(operator.pow),  # tests/export/test_shapes_recorded.py
        "trt_pipeline.correlation_lookup.default",  # tests/plugins
        "trt_pipeline.sized_max_pool.default",  # test_symbolic_steps.py
    }, "these are in UNEXPORTED and RIGHT, or a plugin's"


def test_an_op_that_goes_another_way_is_noticed(tmp_path, monkeypatch) -> None:
    """torch 2.14 may use another overload. A silent fallback must then be noticed."""

    monkeypatch.setattr(exporter, "_noting", lambda function, *_: function)
    with pytest.raises(ExportError, match=r"aten.adaptive_avg_pool2d.default at .*did not reach"):
        ours(CASES["area"][0], tmp_path / "m.onnx")


def test_indices_of_a_max_pool_are_refused(tmp_path) -> None:
    def both(x):
        values, indices = functional.adaptive_max_pool2d(x, (3, 4), return_indices=True)
        return values + indices

    with pytest.raises(ExportError, match=r"test_ops.py.*the values only"):
        ours(both, tmp_path / "m.onnx")


def test_a_float_of_two_sizes_that_float32_rounds_wrongly_is_refused(tmp_path) -> None:
    def function(x):
        return x + math.floor(x.shape[2] * 0.3 * x.shape[3])

    assert faults(naive(function, tmp_path / "naive.onnx"), function)
    with pytest.raises(ExportError, match=r"test_ops.py.*float32 rounds that float differently"):
        ours(function, tmp_path / "m.onnx")


def test_a_float_of_two_sizes_that_float32_rounds_rightly(tmp_path) -> None:
    def function(x):
        return x + math.floor(x.shape[2] * 0.25 * x.shape[3])

    assert faults(ours(function, tmp_path / "m.onnx"), function) == []


@pytest.mark.parametrize("name", ["mean", "weight"])
def test_names_that_tensors_inside_have(tmp_path, name) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(-1, keepdim=True)), x.mean(-1)

    x, path, model = torch.randn(3, 4), tmp_path / "m.onnx", Scaled(4, 2).eval()
    program = torch.export.export(model, (x,))
    for inputs, outputs in (([name], ["y", "z"]), (["x"], [name, "z"]), (["x"], ["y", name])):
        exporter.to_onnx(
            program, path, opset=18, input_names=inputs, output_names=outputs, shapes=[(3, 4)]
        )
        onnx.checker.check_model(onnx.load(path), full_check=True)
        session = onnxruntime.InferenceSession(str(path))
        assert [i.name for i in session.get_inputs()] == inputs
        got = session.run(outputs, {inputs[0]: x.numpy()})
        for mine, its in zip(got, model(x), strict=True):
            np.testing.assert_allclose(mine, its.detach().numpy(), atol=1e-6)


def test_a_divisor_of_unknown_sign_is_refused(tmp_path) -> None:
    def divides(x):
        return x.new_zeros(1, 100 + x.shape[2] // (x.shape[3] - 20))

    with pytest.raises(ExportError, match="may be negative"):
        ours(divides, tmp_path / "m.onnx")


def test_a_divisor_that_may_be_zero_elsewhere(tmp_path) -> None:
    """torch knows that this remainder is 0 or more, and the model fails where it is 0."""

    def divides(x):
        n = x.shape[2] % 101 // 3  # at least 1 at these sizes
        return x.new_zeros(1, 100 + x.shape[3] // n, 7 + x.shape[3] % n)

    assert faults(ours(divides, tmp_path / "m.onnx"), divides) == []


def test_nodes_say_where_they_come_from(tmp_path) -> None:
    graph = onnx.load(ours(CASES["adaptive average to 3x4"][0], tmp_path / "m.onnx")).graph
    product = next(n for n in graph.node if n.op_type == "MatMul")
    traces = {p.key: p.value for p in product.metadata_props}
    assert "test_ops.py" in traces["pkg.torch.onnx.stack_trace"]


def test_a_whole_multiple_of_the_size_stays_a_resize(tmp_path) -> None:
    def twice(x):
        return functional.interpolate(x, (2 * x.shape[2], 3 * x.shape[3]))

    path = ours(twice, tmp_path / "m.onnx")
    assert faults(path, twice) == []
    assert [n.op_type for n in onnx.load(path).graph.node] == ["Resize"]


def test_a_scale_is_the_float32_above_if_the_nearest_loses_a_row(tmp_path) -> None:
    path = ours(resize(scale_factor=0.9, mode="bilinear"), tmp_path / "m.onnx")
    model = onnx.load(path)
    (node,) = [node for node in model.graph.node if node.op_type == "Resize"]
    (scales,) = [
        onnx.numpy_helper.to_array(i) for i in model.graph.initializer if i.name in node.input
    ]
    assert list(scales[2:]) == [np.nextafter(np.float32(0.9), np.float32(1))] * 2
