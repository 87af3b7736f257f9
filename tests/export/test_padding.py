"""Padding in the ONNX graph, compared with torch and numpy at every size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from pipeline.errors import ExportError
from pipeline.export.export import export, reference
from pipeline.export.exported import Exported
from pipeline.export.padding import PaddedModule, add_padding, crop_factor, factors, outer_size
from pipeline.spec.dims import Dim, evaluate
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance, inner_inputs
from pipeline.spec.padding import Padding, amounts

NUMPY_MODES = {"replicate": "edge", "reflect": "reflect", "constant": "constant"}
CASES = [
    ("replicate", "center", {"h": 8, "w": 16}),
    ("replicate", "end", {"h": 16, "w": 8}),
    ("reflect", "center", {"h": 8, "w": 8}),
    ("reflect", "end", {"h": 16, "w": 16}),
    ("constant", "center", {"h": 16, "w": 8}),
    ("constant", "end", {"h": 8, "w": 8}),
]


class Model(torch.nn.Module):
    """Outputs of size h, 4*h (pixel shuffle) and h/8 (features). Fails if 8 does not divide h."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 2, 3, padding=1)
        self.up = torch.nn.Conv2d(2, 16, 3, padding=1)
        self.down = torch.nn.Conv2d(2, 3, 8, stride=8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 8, 8, w // 8, 8).reshape(b, c, h, w) + 0.5 * y
        same = self.conv(x) + x
        return same, torch.nn.functional.pixel_shuffle(self.up(x), 4), self.down(same)


def make_spec(mode, align, multiples) -> ModelSpec:
    low = {name: 1 if mode != "reflect" else m for name, m in multiples.items()}
    h, w = Dim("h", low["h"], 40, 64), Dim("w", low["w"], 40, 64)
    return ModelSpec(
        "padded",
        lambda _: Model(),
        (Input("x", (1, 2, h, w)), Input("y", (1, 2, h, w))),
        (Output("same", (1, 2, h, w)), Output("up", (1, 1, 4 * h, 4 * w)), Output("down")),
        Tolerance(1e-4, 1e-4, "a test"),
        padding=Padding(multiples, mode=mode, align=align),
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]['h']}")
def exported(request, tmp_path_factory) -> Exported:
    return export(make_spec(*request.param), None, tmp_path_factory.mktemp("p") / "m.onnx")


def run(path: Path, feeds):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options), feeds


def by_numpy(module, spec, feeds, h, w):
    """np.pad, the inner model, and slices. Of pipeline.export.padding it uses only `amounts`."""
    padding = spec.padding
    (t, b), (le, r) = (
        amounts(n, padding.multiples[k], padding.align) for k, n in (("h", h), ("w", w))
    )
    assert t + b + h == -(-h // padding.multiples["h"]) * padding.multiples["h"]
    assert (t, le) == (0, 0) if padding.align == "end" else (b - t in (0, 1) and r - le in (0, 1))
    wide = [
        np.pad(f, ((0, 0), (0, 0), (t, b), (le, r)), mode=NUMPY_MODES[padding.mode])
        for f in feeds.values()
    ]
    with torch.no_grad():
        same, up, down = (o.numpy() for o in module(*map(torch.from_numpy, wide)))
    return (
        same[:, :, t : t + h, le : le + w],
        up[:, :, 4 * t : 4 * (t + h), 4 * le : 4 * (le + w)],
        down,
    )


def test_every_size_equals_torch_and_numpy(exported) -> None:
    spec, low = exported.spec, {n: d.min for n, d in exported.spec.dims.items()}
    torch_reference = reference(spec, exported.module, exported.output_shapes)
    session, _ = run(exported.path, None)
    sizes = [(h, w) for h in range(low["h"], 65) for w in (17 + h % 8,)]
    sizes += [(max(low["h"], 23), w) for w in range(low["w"], 65)]
    for h, w in sizes:
        feeds = spec.sample({"h": h, "w": w}, h)
        got = session.run(None, feeds)
        with torch.no_grad():
            want = torch_reference(*(torch.from_numpy(f) for f in feeds.values()))
        for name, a, b, c in zip(
            ("same", "up", "down"),
            got,
            want,
            by_numpy(exported.module, spec, feeds, h, w),
            strict=True,
        ):
            declared = exported.output_shapes[name]
            assert a.shape == tuple(evaluate(s, {"h": h, "w": w}) for s in declared), (h, w)
            assert a.shape == c.shape == tuple(b.shape), (h, w, name)
            np.testing.assert_allclose(a, b.numpy(), atol=2e-5, err_msg=f"{name} {h}x{w} torch")
            np.testing.assert_allclose(a, c, atol=2e-5, err_msg=f"{name} {h}x{w} numpy")


def test_names_and_shapes_in_the_file(exported) -> None:
    graph = onnx.load(exported.path).graph
    dims = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in [*graph.input, *graph.output]
    }
    assert dims["x"] == dims["y"] == dims["same"] == [1, 2, "h", "w"]
    assert dims["up"] == [1, 1, "4*h", "4*w"]
    m = exported.spec.padding.multiples["h"]
    for h in range(1, 130):
        assert evaluate(dims["down"][2], {"h": h}) == -(-h // m) * m // 8
    assert not any(n.op_type == "Mod" for n in graph.node)  # wrong in TensorRT for negatives


def test_padding_alone_equals_torch_functional_pad(exported) -> None:
    """torch.nn.functional.pad is an independent reference for the padded tensor."""
    padding, spec = exported.spec.padding, exported.spec

    class Bare(torch.nn.Module):
        def forward(self, x, y):
            self.seen = x
            return x, y.repeat(1, 1, 4, 4), x

    bare = Bare()
    module = PaddedModule(bare, spec, [exported.output_shapes[n] for n in ("same", "up", "down")])
    for h, w in ((16, 17), (19, 16), (23, 31), (33, 64)):
        x = torch.randn(1, 2, h, w)
        module(x, x)
        (t, b), (le, r) = (
            amounts(n, padding.multiples[k], padding.align) for k, n in (("h", h), ("w", w))
        )
        assert torch.equal(bare.seen, torch.nn.functional.pad(x, (le, r, t, b), mode=padding.mode))


def differs(path: Path, exported: Exported) -> bool:
    session, _ = run(path, None)
    feeds = exported.spec.sample({"h": 21, "w": 27}, 0)
    want = by_numpy(exported.module, exported.spec, feeds, 21, 27)
    got = session.run(None, feeds)
    return any(
        a.shape != b.shape or abs(a - b).max() > 1e-3 for a, b in zip(got, want, strict=True)
    )


def test_a_wrong_mode_side_or_crop_is_caught(exported, tmp_path) -> None:
    def mutated(change) -> Path:
        model = onnx.load(exported.path)
        change(model.graph)
        onnx.save(model, tmp_path / "bad.onnx")
        return tmp_path / "bad.onnx"

    def other_mode(graph):
        for node in graph.node:
            if node.op_type == "Pad":
                old = node.attribute[0].s
                node.attribute[0].s = b"reflect" if old != b"reflect" else b"edge"

    def other_side(graph):
        pads = {node.input[1] for node in graph.node if node.op_type == "Pad"}
        for concat in graph.node:
            if concat.output[0] in pads:
                half = len(concat.input) // 2
                both = [*concat.input[half:], *concat.input[:half]]
                concat.input[:] = both

    def crop_from_zero(graph):
        for node in graph.node:
            if node.name.endswith("/crop"):
                node.input[1] = "padding/zeros"
                node.input[2] = node.input[2]
        zeros = onnx.helper.make_tensor("padding/zeros", onnx.TensorProto.INT64, [2], [0, 0])
        graph.initializer.append(zeros)

    assert not differs(exported.path, exported)
    assert differs(mutated(other_mode), exported)
    assert differs(mutated(other_side), exported)
    if exported.spec.padding.align == "center":
        assert differs(mutated(crop_from_zero), exported)


def test_torch_refuses_the_wrapper_itself_though_every_size_works() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x):
            h, w = x.shape[-2:]
            ph, pw = (-h) % 8, (-w) % 8
            x = torch.nn.functional.pad(x, (0, pw, 0, ph), mode="replicate")
            return self.inner(x, x)[0][..., :h, :w]

    wrapped = Wrapped()
    for n in range(1, 40):
        assert wrapped(torch.zeros(1, 2, n, n + 1)).shape == (1, 2, n, n + 1)
    h, w = torch.export.Dim("h", min=2, max=64), torch.export.Dim("w", min=2, max=64)
    with pytest.raises(
        Exception, match=r"Constraints violated|Cannot create Dim with inconsistent"
    ):
        torch.export.export(
            wrapped, (torch.zeros(1, 2, 17, 18),), dynamic_shapes=({2: h, 3: w},), strict=False
        )


def test_a_range_within_one_multiple_stays_dynamic(tmp_path) -> None:
    h, w = Dim("h", 3, 5, 8), Dim("w", 9, 10, 64)
    base = make_spec("constant", "center", {"h": 8, "w": 8})
    shape = (1, 2, h, w)
    spec = ModelSpec(
        "narrow", base.build, (Input("x", shape), Input("y", shape)), base.outputs,
        base.tolerance, padding=base.padding,
    )  # fmt: skip
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.free == {"h": "x axis 2, y axis 2", "w": "x axis 3, y axis 3"}
    session, _ = run(done.path, None)
    for n in range(3, 9):
        feeds = spec.sample({"h": n, "w": 9 + n}, 0)
        for a, b in zip(
            session.run(None, feeds), by_numpy(done.module, spec, feeds, n, 9 + n), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(("dtype", "low", "high"), [("int64", -9, 9), ("bool", 0, 1)])
@pytest.mark.parametrize("mode", ["replicate", "constant", "reflect"])
def test_integers_and_bools_are_padded_too(tmp_path, dtype, low, high, mode) -> None:
    class Shift(torch.nn.Module):
        def forward(self, m):
            return torch.logical_not(m.unflatten(-1, (-1, 8)).flatten(-2))

    t = Dim("t", 5, 13, 64)
    spec = ModelSpec(
        "ints", lambda _: Shift(), (Input("m", (2, t), dtype, low, high),),
        (Output("n", (2, t)),), Tolerance(0, 0, "exact"), padding=Padding({"t": 8}, mode=mode),
    )  # fmt: skip
    done = export(spec, None, tmp_path / "m.onnx")
    wrapped = reference(spec, done.module, done.output_shapes)
    session, _ = run(done.path, None)
    for n in range(5, 33):
        feeds = spec.sample({"t": n}, n)
        (got,) = session.run(None, feeds)
        assert got.dtype == bool
        np.testing.assert_array_equal(got, wrapped(torch.from_numpy(feeds["m"]))[0].numpy())
        np.testing.assert_array_equal(got, feeds["m"] == 0)


def test_sizes_that_are_cropped() -> None:
    multiples = {"h": 8, "w": 16}
    for size, cropped, outer in (
        ("h_padded", ("h", 1), "h"),
        ("4*h_padded", ("h", 4), "4*h"),
        ("8*(h_padded//8)", ("h", 1), "h"),
        ("w_padded", ("w", 1), "w"),
        ("h_padded/8", None, None),
        ("h_padded//2", None, None),
        ("h_padded + 1", None, None),
        ("h_padded + w_padded", None, None),
        ("min(h_padded, 600)", None, None),
        ("max(h_padded, 5000)", None, None),
        ("h_padded//3*3", None, None),
        ("n", None, "n"),
        (7, None, "7"),
    ):
        assert crop_factor(size, multiples) == cropped, size
        text = outer_size(size, multiples)
        if outer is not None:
            assert text == outer
        for h in range(1, 70):
            sizes = {"h": h, "w": 3, "n": 5}
            inner = {"h_padded": -(-h // 8) * 8, "w_padded": 16, "n": 5}
            whole = evaluate(size, inner)
            name, factor = cropped or ("", 0)
            assert evaluate(text, sizes) == (factor * sizes[name] if cropped else whole)
        assert bool(factors(text, multiples)) == (cropped is not None), size


def test_errors() -> None:
    spec = make_spec("replicate", "center", {"h": 8, "w": 8})
    plain = ModelSpec("plain", spec.build, spec.inputs, spec.outputs, spec.tolerance)
    assert inner_inputs(plain) == plain.inputs
    with pytest.raises(ExportError, match="plain has no padding"):
        PaddedModule(Model(), plain, [])
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[1,2,h_padded,w] x, float[1] y) => '
        "(float[1,2,h_padded,w] same) { same = Relu(x) }"
    )
    with pytest.raises(ExportError, match="plain has no padding"):
        add_padding(model, plain)
    with pytest.raises(ExportError, match="input x axis 3 is not the dim w"):
        add_padding(model, spec)


def test_an_output_that_is_a_constant_stays_as_it_is(tmp_path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x):
            return x.unflatten(1, (-1, 4)).flip(-1).flatten(1), torch.arange(3.0) + 1

    h = Dim("h", 5, 18, 40)
    spec = ModelSpec(
        "constant", lambda _: Two(), (Input("x", (1, h)),), (Output("a", (1, h)), Output("b")),
        Tolerance(0, 0, "exact"), padding=Padding({"h": 4}),
    )  # fmt: skip
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.output_shapes["b"] == [3]
    session, _ = run(done.path, None)
    module = reference(done.spec, done.module, done.output_shapes)
    for n in range(5, 41):
        feeds = spec.sample({"h": n}, 0)
        want = module(torch.from_numpy(feeds["x"]))
        for a, b in zip(session.run(None, feeds), want, strict=True):
            np.testing.assert_array_equal(a, b.numpy())
