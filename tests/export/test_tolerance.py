"""Measured tolerances: wide enough for a right conversion, too narrow for a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.errors import InputError
from pipeline.export.export import export
from pipeline.export.exported import Exported
from pipeline.export.module import built
from pipeline.export.tolerance import with_tolerance
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.noise import Noise

H = Dim("h", 8, 16, 40)


class Net(torch.nn.Module):
    """Convolutions and norms with two outputs; one has integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.GELU(),
            torch.nn.Conv2d(16, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.SiLU(),
            torch.nn.Conv2d(16, 5, 1),
        )

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layers(x)
        return {"y": y, "class": y.argmax(1)}


class Half(Net):
    """Keeps a tensor that is not a parameter, so it can't run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.full((1, 5, 1, 1), 0.25)

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": torch.addcmul(self.offset, self.layers(x), self.offset)}


class Chaos(torch.nn.Module):
    """The logistic map: a rounding error doubles in each of forty steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 0.25 + 0.5
        for _ in range(40):
            x = 3.99 * x * (1 - x)
        return x


def seeded(make: Callable[[], torch.nn.Module]) -> Callable[[Path | None], torch.nn.Module]:
    def build(_: Path | None) -> torch.nn.Module:
        torch.manual_seed(3)
        return make()

    return build


def spec_of(make: Callable[[], torch.nn.Module], **more: Any) -> ModelSpec:
    return ModelSpec("m", seeded(make), (Input("x", (1, 3, H, H)),), **more)


@pytest.fixture(scope="module", params=[Net, Half])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    return export(spec_of(request.param), None, folder / "m.onnx")


def passes(done: Exported, model: Path, sizes: dict[str, int]) -> bool:
    feed = done.spec.sample(sizes, 7)
    with torch.no_grad():
        want = done.module(torch.from_numpy(feed["x"]))[0].numpy()
    (got, *_) = onnxruntime.InferenceSession(model).run(None, feed)
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None
    (result,) = judge(TORCH, "model", {"y": want}, {"y": got}, tolerance)
    return result.passed


def test_a_right_conversion_is_within_it(done: Exported) -> None:
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None and tolerance == done.spec.tolerance
    assert tolerance.why.startswith("measured: ")
    assert 1e-7 < tolerance.atol < 2e-4
    for h in (8, 13, 16, 39, 40):
        assert passes(done, done.path, {"h": h})


def test_the_model_is_as_it_was(done: Exported) -> None:
    assert {p.dtype for p in done.module.parameters()} == {torch.float32}
    fresh = spec_of(Net).build(None).state_dict()
    assert all(
        torch.equal(v, fresh[k.removeprefix("model.")]) for k, v in done.module.state_dict().items()
    )


def epsilon(model: onnx.ModelProto) -> None:
    """A fault: ten times every norm's epsilon."""
    found = 0
    for node in [*model.graph.node, *(n for f in model.functions for n in f.node)]:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f *= 10
                found += 1
    assert found


def weight(model: onnx.ModelProto) -> None:
    """A fault: the largest weight of the last layer changes by 1 %."""
    tensor = next(t for t in model.graph.initializer if t.name.endswith("layers.6.weight"))
    values = numpy_helper.to_array(tensor).copy()
    values.flat[np.abs(values).argmax()] *= 1.01
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def activation(model: onnx.ModelProto) -> None:
    """A fault: GELU in its tanh form."""
    erf = next(n for n in model.graph.node if n.op_type == "Erf")
    erf.op_type = "Tanh"


@pytest.mark.parametrize("fault", [epsilon, weight, activation])
def test_a_planted_fault_is_outside_of_it(
    done: Exported, tmp_path: Path, fault: Callable[[onnx.ModelProto], None]
) -> None:
    model = onnx.load(done.path)
    fault(model)
    onnx.save(model, tmp_path / "wrong.onnx")
    assert not passes(done, tmp_path / "wrong.onnx", {"h": 16})


def test_what_is_stated_stays() -> None:
    own = Tolerance(1e-3, 1e-3, "mine")
    spec, module = built(spec_of(Net, tolerance=own), None)
    assert with_tolerance(spec, module, 0) is spec
    spec = spec_of(Net, outputs=(Output("y", tolerance=own), Output("class")))
    spec, module = built(spec, None)
    measured = with_tolerance(spec, module, 0)
    assert measured.outputs[0].tolerance is own
    exact = measured.outputs[1].tolerance
    assert exact is not None and exact.atol == 0 and "must be equal" in exact.why


def test_none_is_given_where_rounding_grows_without_end(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        export(spec_of(Chaos), None, tmp_path / "m.onnx")
    text = str(caught.value)
    assert "model m: output output: float32 rounding alone moves it by" in text
    assert "no tolerance can be measured. State one" in text
    stated = Tolerance(1e-1, 1.0, "chaos")
    assert (
        export(spec_of(Chaos, tolerance=stated), None, tmp_path / "m.onnx").spec.tolerance == stated
    )


def test_what_takes_nearly_equal_values_is_named(tmp_path: Path) -> None:
    """All scores are 1 in float32, as those of a detector with random weights nearly are."""

    class Ties(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(1)
            return flat.gather(1, (1 + flat * 1e-12).topk(3).indices)

    with pytest.raises(InputError, match="The model calls topk: where values are nearly equal"):
        export(spec_of(Ties), None, tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "forward",
    [lambda x: x / 0, lambda x: torch.log(x - 2), lambda x: torch.full_like(x, torch.inf) - x],
    ids=["inf", "nan", "infinity"],
)
def test_none_is_given_for_what_is_no_number(forward: Callable[[Any], Any], tmp_path: Path) -> None:
    class Bad(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    with pytest.raises(InputError, match=r"output output is NaN or infinite at h=9.*: give ranges"):
        export(spec_of(Bad), None, tmp_path / "m.onnx")


def test_the_ranges_at_which_it_is_no_number_are_named(tmp_path: Path) -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            seen = torch.arange(x.shape[1]) < lengths[:, None]
            return x.masked_fill(~seen, -torch.inf).softmax(1)

    inputs = Input("x", (2, Dim("t", 1, 5, 9))), Input("lengths", (2,), "int64", low=0, high=1)
    spec = ModelSpec("masked", lambda _: Masked(), inputs, (Output("output"),))
    with pytest.raises(InputError, match=r"the inputs were x -1\.\.1, lengths 0\.\.1: give"):
        export(spec, None, tmp_path / "m.onnx")


@pytest.mark.parametrize(("part", "value"), [("weight", torch.nan), ("bias", torch.inf)])
def test_a_weight_that_is_no_number_is_named(part: str, value: float, tmp_path: Path) -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 3, 1)
            self.register_buffer("mask", torch.full((1,), -torch.inf))  # of no concern
            getattr(self.conv, part).data.view(-1)[1] = value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    with pytest.raises(InputError) as caught:
        export(spec_of(Broken), None, tmp_path / "m.onnx")
    text = str(caught.value)
    assert text.endswith(f"the weight conv.{part} itself has NaN or infinity: correct the weights")
    assert "range" not in text


class Keeps(torch.nn.Module):
    """Makes a table at the first run of a size, and keeps it, in the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 3, 1)
        self.register_buffer("scale", torch.tensor(0.1), persistent=False)
        self.tables: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is None or self.last.shape[-1] != x.shape[-1]:
            self.last = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        self.tables.setdefault(x.shape[-1], self.last)
        return self.layer(x * self.scale) + self.tables[x.shape[-1]]


def test_what_a_module_keeps_is_not_changed() -> None:
    """The run in float64 leaves no float64 tensor behind."""
    spec, module = built(spec_of(Keeps), None)
    before = {k: v.clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    spec = with_tolerance(spec, module, 0)
    assert spec.tolerance is not None
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        assert value.dtype == torch.float32 and torch.equal(value, before[name])
    for h in (8, 9, 16, 24):
        with torch.no_grad():
            assert module(torch.rand(1, 3, h, h)).dtype == torch.float32


class Branches(torch.nn.Module):
    """Computes something else in float64."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = torch.nn.Conv2d(3, 3, 1), where

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        wide = x.dtype == torch.float64
        if self.where == "more":
            return {"y": y * 1.001 if wide else y}
        if self.where == "less":
            return {"y": y if wide else y * 1.001}
        return {"y": y.tanh() if wide else y.sigmoid()}


@pytest.mark.parametrize("where", ["more", "less", "other"])
def test_a_branch_on_the_dtype_is_not_rounding(where: str, tmp_path: Path) -> None:
    """float32 and float64 runs that call other functions are no measure of each other."""
    done = export(spec_of(lambda: Branches(where)), None, tmp_path / "m.onnx")
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None and tolerance.atol < 1e-4
    assert "rounding of the inputs" in tolerance.why
    assert passes(done, done.path, {"h": 13})


class _Filled(torch.nn.Module):
    """Half of the logits have the value of masked logits."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(16, 32)
        self.fill = fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).masked_fill(torch.arange(32) % 2 == 0, self.fill)


@pytest.mark.parametrize("fill", [-1e4, -1e9, -3.4028234663852886e38])
def test_a_masks_filling_says_nothing_of_what_is_beside_it(fill: float) -> None:
    module = _Filled(fill).eval()
    dim = Dim("n", 2, 8, 16)
    spec = ModelSpec("m", lambda _: module, (Input("x", (dim, 16)),), (Output("y"),))
    tolerance = with_tolerance(spec, module, 0).outputs[0].tolerance
    assert tolerance is not None
    y = module(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    y = y.detach().numpy()
    wrong = y.copy()
    wrong[:, 1::2] *= 1.01
    assert judge("a", "b", {"y": y}, {"y": y}, tolerance)[0].passed
    assert not judge("a", "b", {"y": y}, {"y": wrong}, tolerance)[0].passed


class Detector(torch.nn.Module):
    """Boxes in pixels beside scores, as YOLO exports them: (b, 4 + 6, places)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.SiLU())
        self.boxes, self.scores = torch.nn.Conv2d(16, 4, 1), torch.nn.Conv2d(16, 6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.stem(x)
        boxes = self.boxes(y) * 32 + 8 * torch.arange(x.shape[-1], dtype=x.dtype)
        scores = (self.scores(y) * 4 - 6).sigmoid()
        return {"y": torch.cat([boxes, scores], 1).flatten(2)}


def test_scores_beside_boxes_have_their_own_atol(tmp_path: Path) -> None:
    spec = ModelSpec("m", seeded(Detector), (Input("x", (1, 3, H, 12)),))
    done = export(spec, None, tmp_path / "m.onnx")
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None and tolerance.axis == 1
    assert max(tolerance.parts[4:]) < 0.1 * min(tolerance.parts[:4])
    for h in (8, 13, 16, 39, 40):
        assert passes(done, done.path, {"h": h})
    model = onnx.load(done.path)
    bias = next(t for t in model.graph.initializer if t.name.endswith("scores.bias"))
    values = numpy_helper.to_array(bias).copy()
    values[4] += 1e-3  # scores near 0.0025 change by 0.4 %
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    assert not passes(done, tmp_path / "wrong.onnx", {"h": 16})


class Warp(torch.nn.Module):
    """Samples an image of white noise: rounding of a coordinate moves a pixel by its contrast."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        theta = torch.tensor([[[0.9, 0.1, 0.05], [-0.1, 1.05, -0.02]]])
        theta[0, 0, 2] += shift * 2 / 512  # in pixels
        self.register_buffer("theta", theta)

    def forward(self, x: torch.Tensor) -> Any:
        grid = torch.nn.functional.affine_grid(self.theta, x.shape, align_corners=False)
        return {"y": torch.nn.functional.grid_sample(x, grid, align_corners=False)}


def test_a_warped_image_converts_at_large_sizes_and_a_shift_fails(tmp_path: Path) -> None:
    """float32 rounding of the grid is no fault; a shift by a hundredth of a pixel is one."""
    inputs = (Input("x", (1, 3, Dim("h", 8, 512, 1024), 512)),)
    done = export(ModelSpec("m", seeded(Warp), inputs), None, tmp_path / "m.onnx")
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None and tolerance.atol < 1e-2
    for h in (8, 77, 512, 1024):
        assert passes(done, done.path, {"h": h})
    shifted = ModelSpec("m", seeded(lambda: Warp(0.01)), inputs, tolerance=tolerance)
    export(shifted, None, tmp_path / "wrong.onnx")
    assert not passes(done, tmp_path / "wrong.onnx", {"h": 77})


class WarpedBatch(torch.nn.Module):
    """The same transform for each image of a batch."""

    def forward(self, x: torch.Tensor) -> Any:
        theta = torch.tensor([[[0.9, 0.1, 0.05], [-0.1, 1.0, 0.0]]]).expand(x.shape[0], 2, 3)
        grid = torch.nn.functional.affine_grid(theta, x.shape, align_corners=False)
        return {"y": torch.nn.functional.grid_sample(x, grid, align_corners=False)}


def test_a_warped_batch_keeps_every_size_where_max_is_far_above_opt(tmp_path: Path) -> None:
    """Rounding that was measured at small sizes is too small, and excluded a batch of 1."""
    dims = Dim("b", 1, 2, 4), 3, Dim("h", 16, 40, 90), Dim("w", 16, 33, 90)
    done = export(
        ModelSpec("m", seeded(WarpedBatch), (Input("x", dims),)), None, tmp_path / "m.onnx"
    )
    assert not done.refinements
    for sizes in (
        {"b": 1, "h": 90, "w": 90},
        {"b": 4, "h": 90, "w": 90},
        {"b": 1, "h": 16, "w": 16},
    ):
        assert passes(done, done.path, sizes)


@pytest.mark.parametrize(("off", "factor"), [(1e-4, 50), (4e-4, 25), (9e-4, 11.1), (1.1e-3, None)])
def test_the_margin_shrinks_before_no_tolerance_is_given(off: float, factor: float | None) -> None:
    noise = Noise(off, off, 0.5, 1.0, 1.2e-7, whole=False)
    if factor is None:
        with pytest.raises(InputError, match="no tolerance can be measured"):
            noise.tolerance("m", "rounding")
    else:
        tolerance = noise.tolerance("m", "rounding")
        assert tolerance.atol == pytest.approx(factor * off, rel=0.01) and tolerance.atol <= 1e-2


def test_few_large_values_among_tiny_ones() -> None:
    """Scores of a detector: rounding moves each by a share of it, and few are far from zero."""
    exact = np.full((1, 6, 400), 1e-5)
    exact[0, 0, :4] = 0.3
    moved = exact * (1 + 8e-5)
    tolerance = Noise.between(moved, exact, 1.2e-7).tolerance("m", "rounding")
    assert 4e-3 < tolerance.rtol < 5e-3 and tolerance.atol < 2e-4
    moved[0, 1, 0] += 2e-4  # of a tiny value: that is no share of it
    with pytest.raises(InputError, match="no tolerance can be measured"):
        Noise.between(moved, exact, 1.2e-7).tolerance("m", "rounding")


def test_a_second_run_shows_the_dynamic_axes_of_large_inputs(tmp_path: Path) -> None:
    height = Dim("h", 64, 128, 320, multiple_of=32)
    spec = ModelSpec("m", seeded(Detector), (Input("x", (4, 3, height, 96)),))
    done = export(spec, None, tmp_path / "m.onnx")
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None and tolerance.axis == 1


def test_whole_numbers_have_to_be_equal() -> None:
    class Best(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1).float() + 20_000

    module = Best()
    spec = ModelSpec("m", lambda _: module, (Input("x", (Dim("n", 2, 8, 16), 16)),), (Output("y"),))
    tolerance = with_tolerance(spec, module, 0).outputs[0].tolerance
    assert tolerance is not None
    y = np.array([20_003.0, 20_007.0], np.float32)
    assert not judge("a", "b", {"y": y}, {"y": y + 1}, tolerance)[0].passed
