"""torch to ONNX: names, opset, shapes, types and numbers, compared in ONNX Runtime."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from quick_exports import keep_table
from torch.nn import functional

from pipeline.errors import ExportError, InputError
from pipeline.export.export import OPSET, _check_inferred, export, reference
from pipeline.machine.libraries import import_torchvision
from pipeline.probe.eager import EagerModule, output_sizes
from pipeline.spec.dims import Dim, evaluate
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.profiles import Profile, points

B, H, W = Dim("b", 1, 4, 32), Dim("h", 16, 64, 512), Dim("w", 16, 440, 512)
IMAGE = Input("x", (1, 3, H, W))


class Wrap(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class One(Wrap):
    def forward(self, x):
        return self.function(x)


class Two(Wrap):
    def forward(self, x, y):
        return self.function(x, y)


def make(function, inputs=(IMAGE,), outputs=("y",), **options) -> ModelSpec:
    kind = {1: One, 2: Two}[len(inputs)]
    return ModelSpec(
        "m", lambda _: kind(function), tuple(inputs),
        tuple(o if isinstance(o, Output) else Output(o) for o in outputs),
        Tolerance(1e-4, 1e-4, "a test"), **options,
    )  # fmt: skip


def check(done, points, *, exact: bool = False) -> None:
    """Compares ONNX Runtime with torch at these sizes, and the shapes with the declared ones."""
    session = onnxruntime.InferenceSession(str(done.path))
    module = reference(done.spec, done.module, done.output_shapes)
    for sizes in points:
        feeds = done.spec.sample(sizes, 3)
        want = module(*map(torch.from_numpy, feeds.values()))
        want = want if isinstance(want, (tuple, list)) else [want]
        for output, a, b in zip(done.spec.outputs, session.run(None, feeds), want, strict=True):
            declared = done.output_shapes[output.name]
            assert a.shape == tuple(b.shape), sizes
            assert a.shape == tuple(evaluate(s, sizes) for s in declared), (sizes, declared)
            assert str(a.dtype) == str(b.dtype).removeprefix("torch.")
            tolerance = 0 if exact else 1e-5
            np.testing.assert_allclose(a, b.numpy(), rtol=tolerance, atol=tolerance)


SIZES = [{"h": h, "w": w} for h, w in ((16, 16), (17, 18), (18, 17), (64, 99), (135, 512))]


def test_output_sizes_in_terms_of_the_dims(tmp_path) -> None:
    def several(x):
        return (
            functional.interpolate(x, scale_factor=4),
            x[:, :, : x.shape[2] // 2],
            x[:, :, ::2],
            functional.pad(x, (0, 0, 0, 1)),
            functional.avg_pool2d(x, 2),
            x.flatten(2),
            x.mean((2, 3)),
            x[:, 0, 0].repeat(1, x.shape[3]),
            x[:, 0, :2, 0].repeat(1, (x.shape[2] + 1) ** 2 // (x.shape[2] ** 2)),
        )

    names = ("x4", "half", "even", "more", "pool", "flat", "mean", "square", "by a square")
    done = export(make(several, outputs=names), None, tmp_path / "m.onnx")
    check(done, SIZES)
    graph = onnx.load(done.path).graph
    for value in graph.output:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert dims == list(done.output_shapes[value.name])
    assert done.output_shapes["x4"] == [1, 3, "4*h", "4*w"]
    (x,) = graph.input
    assert [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] == [1, 3, "h", "w"]
    assert done.free == {"h": "x axis 2", "w": "x axis 3"}


def test_opset_and_silence(tmp_path, capfd) -> None:
    def loud(x):
        print("the model prints")
        return x * 2

    done = export(make(loud), None, tmp_path / "m.onnx")
    imports = {i.domain: i.version for i in onnx.load(done.path).opset_import}
    assert imports[""] == done.opset == OPSET == 18
    with pytest.raises(ExportError):
        export(make(lambda x: x if x.sum() > 0 else -x), None, tmp_path / "n.onnx")
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""
    own = {"model", "trying sizes"}
    assert set(done.library_seconds) == {*own, "torch.export", "torch.onnx.export"}


def test_the_table_that_the_tests_keep_is_torchs_own() -> None:
    """The next export does not get what one export registers."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    keep_table()
    ONNXRegistry.from_torchlib(opset_version=18)
    import_torchvision()  # its ops are in the table from here on
    for opset in (18, 20):
        kept, fresh = (
            ONNXRegistry.from_torchlib(opset_version=opset),
            ONNXRegistry.made_anew(opset_version=opset),
        )
        assert kept.opset_version == fresh.opset_version == opset
        assert list(kept.functions) == list(fresh.functions)
        for target, known in fresh.functions.items():
            for one, other in zip(kept.functions[target], known, strict=True):
                assert one.onnx_function is other.onnx_function
                assert one.fx_target is other.fx_target and one.is_complex == other.is_complex
        relu = torch.ops.aten.relu.default
        kept.register_op(relu, lambda x: x)
        count = len(fresh.get_decomps(relu))
        assert len(kept.get_decomps(relu)) == count + 1
        assert len(ONNXRegistry.from_torchlib(opset_version=opset).get_decomps(relu)) == count


def test_a_batch_from_1_is_not_specialised(tmp_path) -> None:
    def batched(x):
        return functional.conv2d(x, torch.ones(4, 3, 3, 3)) + x.mean((1, 2, 3), keepdim=True)

    spec = make(batched, [Input("x", (B, 3, H, W))])
    done = export(spec, None, tmp_path / "m.onnx")
    check(done, [{"b": b, **sizes} for b in (1, 2, 3, 32) for sizes in SIZES[:3]])


@pytest.mark.parametrize(
    "dims",
    [
        (Dim("b", 1, 1, 2), Dim("c", 1, 1, 2)),
        (Dim("b", 1, 1, 3), Dim("c", 1, 1, 3)),
        (Dim("b", 8, 8, 16, 8), Dim("c", 8, 8, 16, 8)),
    ],
)
def test_two_dims_of_few_sizes(tmp_path, dims) -> None:
    b, c = dims
    done = export(make(lambda x: x * 2, [Input("x", (b, c, 4))]), None, tmp_path / "m.onnx")
    steps = [range(d.min, d.max + 1, d.multiple_of) for d in dims]
    check(done, [{"b": i, "c": j} for i in steps[0] for j in steps[1]])
    assert done.output_shapes["y"] == ["b", "c", 4]


def test_int64_bool_and_two_inputs(tmp_path) -> None:
    t, s = Dim("t", 2, 10, 64), Dim("s", 1, 3, 64)
    table = torch.arange(20.0).reshape(10, 2)

    def gather(i, mask):
        return table[i] * mask[:, None, None], i[:, :1] > 3, i.sum()

    spec = make(
        gather, [Input("i", (s, t), "int64", 0, 10), Input("mask", (s,), "bool")],
        ("a", "b", "c"),
    )  # fmt: skip
    done = export(spec, None, tmp_path / "m.onnx")
    check(done, [{"t": n, "s": k} for n in (2, 3, 64) for k in (1, 2, 64)], exact=True)
    assert done.free == {"s": "i axis 0, mask axis 0", "t": "i axis 1"}
    assert done.output_shapes["c"] == []


def test_static_dims_and_args(tmp_path) -> None:
    fixed = Dim("h", 32, 32, 32)
    spec = ModelSpec(
        "m", lambda _: Wrap(lambda x, y: x + y),
        (Input("x", (1, fixed, W)), Input("y", (1, fixed, W))), (Output("z", (1, fixed, W)),),
        Tolerance(0, 0, "exact"),
    )  # fmt: skip
    done = export(spec, None, tmp_path / "m.onnx")
    check(done, [{"h": 32, "w": w} for w in (16, 17, 512)], exact=True)
    assert done.output_shapes["z"] == [1, 32, "w"]
    assert "h" not in done.free


@pytest.mark.parametrize(
    ("function", "outputs", "words"),
    [
        (lambda x: x * 2, [Output("y", (1, 3, H, 2 * W))], "the spec declares (1, 3, 16, 32)"),
        (lambda x: x * 2, [Output("y", (1, 3, H))], "the spec declares (1, 3, 16)"),
        (lambda x: x[:, :, ::2], [Output("y", (1, 3, H // 2, W))], "output y: torch gives"),
        (lambda x: (x * 2, x + 1), ["y"], "returns 2 tensors; the spec names 1 outputs"),
        (lambda x: x * 2, ["y", "z"], "returns 1 tensors; the spec names 2 outputs"),
        (lambda x: (x * 2, x.shape[2]), ["y", "z"], "not a tensor"),
        (torch.linalg.svdvals, ["y"], "it has no translation to ONNX; compute it before or"),
    ],
)
def test_outputs_that_are_not_as_declared(tmp_path, function, outputs, words) -> None:
    with pytest.raises(ExportError) as caught:
        export(make(function, outputs=outputs), None, tmp_path / "m.onnx")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_declared_outputs_are_accepted_whatever_their_form(tmp_path) -> None:
    outputs = [Output("y", (1, 3, (H + 1) // 2, W)), Output("z", ())]
    done = export(make(lambda x: (x[:, :, ::2], x.sum()), outputs=outputs), None, tmp_path / "m")
    assert done.output_shapes["z"] == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: functional.adaptive_avg_pool2d(x, 1),
        lambda x: x + torch.ones(x.shape[2], 1),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: functional.interpolate(functional.avg_pool2d(x, 2), size=x.shape[2:]) + x,
    ],
)
def test_right_at_every_size_or_refused(tmp_path, function) -> None:
    """No size may be baked in silently."""
    try:
        done = export(make(function), None, tmp_path / "m.onnx")
    except ExportError as error:
        assert "baked" in str(error) or "torch" in str(error)
        return
    check(done, SIZES)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.adaptive_avg_pool2d(x, (7, 5)),
        lambda x: functional.interpolate(x, size=(7, 5), mode="area"),
    ],
)
def test_numbers_that_torch_bakes_in_are_mended_at_export(tmp_path, function) -> None:
    """torch.onnx.export alone bakes in the example's kernel (tests/export/ops shows it)."""
    done = export(make(function), None, tmp_path / "m.onnx")
    dims = done.spec.dims
    session = onnxruntime.InferenceSession(str(done.path))
    errors = []
    for point in points(dims, [Profile("p").resolve(dims)]):
        feeds = done.spec.sample(point.sizes, 0)
        want = function(torch.from_numpy(feeds["x"])).numpy()
        errors.append(float(abs(session.run(None, feeds)[0] - want).max()))
    assert max(errors) < 1e-5, errors


def test_a_size_baked_into_a_node_is_found(tmp_path) -> None:
    """A Reshape to the example's sizes, as an exporter might write it."""
    done = export(make(lambda x: x * 2), None, tmp_path / "m.onnx")
    model = onnx.load(done.path)
    _check_inferred(model, done.spec, done.output_shapes)
    for node in model.graph.node:
        node.output[:] = ["inner" if o == "y" else o for o in node.output]
    shape = onnx.numpy_helper.from_array(np.array([1, 3, 17, 18]), "shape")
    model.graph.initializer.append(shape)
    model.graph.node.append(onnx.helper.make_node("Reshape", ["inner", "shape"], ["y"]))
    with pytest.raises(ExportError, match=r"y axis 2: .* gives size 17, .* A size is baked in"):
        _check_inferred(model, done.spec, done.output_shapes)


def test_recurrent_layers_keep_their_time_axis(tmp_path) -> None:
    """torch alone bakes in an LSTM's time axis after the first export of a process."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 5, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0].detach()

    t = Dim("t", 2, 10, 64)
    spec = ModelSpec(
        "lstm", lambda _: Net(), (Input("x", (1, t, 4)),), (Output("y"),),
        Tolerance(1e-4, 1e-4, "a test"),
    )  # fmt: skip
    for _ in range(2):
        done = export(spec, None, tmp_path / "m.onnx")
        check(done, [{"t": n} for n in (2, 3, 64)])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda x: (x > 0).nonzero(),
            "output y axis 0: its size is u0, and u0 depends on the data",
        ),
        (lambda x: torch.cat([x.flatten(), x[x > 0]]), "output y axis 0: its size is 3*"),
        (lambda x: x[:, :, : round(x.shape[2] * 0.7)], "output y axis 2: its size is Round"),
    ],
)
def test_sizes_that_no_expression_says_are_refused(tmp_path, function, words) -> None:
    with pytest.raises(ExportError) as caught:
        export(make(function), None, tmp_path / "m.onnx")
    assert words in str(caught.value)
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize(
    ("scale", "size"), [(1.5, "((3*h)//2)"), (0.5, "(h//2)"), (2.25, "((9*h)//4)")]
)
def test_scale_factors_that_are_no_integers(tmp_path, scale, size, mode) -> None:
    def resize(x):
        return functional.interpolate(x, scale_factor=scale, mode=mode)

    done = export(make(resize), None, tmp_path / "m.onnx")
    assert done.output_shapes["y"][2] == size
    check(done, [{"h": h, "w": w} for h, w in ((16, 16), (17, 18), (18, 17), (31, 33))])


@pytest.mark.parametrize("scale", [0.7, 0.35, 1.1 / 2])
def test_floating_point_sizes_are_right_at_every_size_or_refused(tmp_path, scale) -> None:
    """1.1 * 20 / 2 is more than 11 in floating point, so no quotient of integers equals it."""

    def cut(x):
        return x[:, :, : math.ceil(x.shape[2] * scale)]

    try:
        done = export(make(cut), None, tmp_path / "m.onnx")
    except ExportError as error:
        assert scale != 0.7
        assert "output y axis 2: its size is CeilToInt" in str(error)
        return
    check(done, [{"h": h, "w": 16} for h in range(16, 80)])


NARROW = Input("x", (1, 3, Dim("h", 9, 18, 30), 12))


@pytest.mark.parametrize("pool", [functional.max_pool2d, functional.avg_pool2d])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(3, 3, 1), (2, 3, 1), (3, 2, 0), (2, 5, 1)])
def test_pools_that_round_up(tmp_path, pool, kernel, stride, pad) -> None:
    """torch 2.13's formula gives 5 at h=11, but torch gives 4."""
    spec = make(lambda x: pool(x, kernel, stride, pad, ceil_mode=True), [NARROW])
    try:
        done = export(spec, None, tmp_path / "m.onnx")
    except ExportError as error:
        assert "output y axis 2" in str(error)
        assert "h" in str(error)
        return
    check(done, [{"h": h} for h in range(9, 31)])


def test_a_wrong_formula_of_two_dims_is_refused_with_its_sizes(tmp_path) -> None:
    def flat(x):
        return functional.max_pool2d(x, 3, 3, 1, ceil_mode=True).flatten(2)

    with pytest.raises(ExportError) as caught:
        export(make(flat), None, tmp_path / "m.onnx")
    for word in ("output y axis 2", "//3", "but the model gives", "at h=", ",w="):
        assert word in str(caught.value)
    assert "baked" not in str(caught.value)


def test_looking_at_shapes_leaves_no_tensor_without_values_in_the_model() -> None:
    class Cache(torch.nn.Module):
        ramp = None

        def forward(self, x):
            self.ramp = torch.arange(4.0)
            return x + self.ramp.sum()

    big = Input("x", (1, 3, Dim("h", 400, 500, 4000), Dim("w", 400, 500, 4000)))
    module = Cache()
    before = module(torch.zeros(1, 1)), module.ramp
    eager = EagerModule((big,), module, 0)
    assert output_sizes(eager, {"h": 4000, "w": 3000}) == [(1, 3, 4000, 3000)]
    assert module.ramp is before[1]


def test_random_numbers_at_rare_values_are_refused(tmp_path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() > 9, torch.rand_like(x), x)

    with pytest.raises(ExportError, match=r"RandomUniformLike .*test_export.py:\d+: .* random"):
        export(make(function), None, tmp_path / "m.onnx")


def test_bad_weights_are_input_errors(tmp_path) -> None:
    def build(weights):
        from pipeline.spec.weights import load_weights

        module = torch.nn.Conv2d(3, 4, 3)
        if weights is not None:
            load_weights(module, weights)
        return module

    spec = ModelSpec("conv", build, (IMAGE,), (Output("y"),), Tolerance(1e-4, 1e-4, "a test"))
    with pytest.raises(InputError, match="no such file"):
        export(spec, tmp_path / "none.pth", tmp_path / "m.onnx")
    torch.manual_seed(3)
    torch.save(torch.nn.Conv2d(3, 4, 3).state_dict(), tmp_path / "w.pth")
    done = export(spec, tmp_path / "w.pth", tmp_path / "m.onnx")
    kernel = torch.load(tmp_path / "w.pth", weights_only=True)["weight"].numpy()
    arrays = [onnx.numpy_helper.to_array(i) for i in onnx.load(done.path).graph.initializer]
    assert any(a.shape == kernel.shape and np.array_equal(a, kernel) for a in arrays)
