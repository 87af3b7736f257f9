"""The super-resolution UNet: its whole range, and the failures of the naive path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from converted_zoo import HOW
from planted_faults import Fault, set_attribute, set_mode, transpose_weight

from pipeline.artifact.artifact import Artifact
from pipeline.build.try_graph import attempt
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.errors import InputError
from pipeline.graph.session import run_onnx
from pipeline.machine.child import Child
from pipeline.machine.target import TARGETS
from pipeline.models.unet_sr import unet_sr
from pipeline.spec.dims import shape_texts

ODD = {"batch": 2, "h": 203, "w": 201}


SLIM = HOW["unet_sr"]["options"]  # the same graph


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return unet_sr().build(None)


@pytest.fixture(scope="module")
def slim() -> torch.nn.Module:
    return unet_sr(**SLIM).build(None)


@pytest.fixture(scope="module")
def artifact(zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    return zoo_artifact("unet_sr")


@pytest.fixture(scope="module")
def session(artifact: Artifact) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(artifact.model, providers=["CPUExecutionProvider"])


def wanted(module: torch.nn.Module, image: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return module(torch.from_numpy(image)).numpy()


def test_spec_is_as_the_issue_asks() -> None:
    spec = unet_sr()
    ranges = {name: (d.min, d.max, d.multiple_of) for name, d in spec.dims.items()}
    assert ranges == {"batch": (1, 21, 1), "h": (200, 400, 1), "w": (200, 400, 1)}
    assert spec.padding is None
    for bad in (0, 6, -4, 8.0, True, "16"):
        with pytest.raises(InputError, match=r"channels=.* must be a multiple of 4"):
            unet_sr(channels=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(200, 200), (201, 200), (200, 203), (211, 217)], ids=str)
def test_the_detail_is_added_to_the_bicubic_image(size: tuple[int, int]) -> None:
    module = unet_sr(channels=4).build(None)
    image = torch.rand(1, 3, *size)
    coarse = torch.nn.functional.interpolate(image, scale_factor=2, mode="bicubic")
    with torch.no_grad():
        detail = module(image) - coarse
        assert detail.shape == (1, 3, 2 * size[0], 2 * size[1])
        assert detail.std() > 0.05
        module.head.weight.zero_()
        module.head.bias.zero_()
        assert torch.equal(module(image), coarse)


def test_weights_file_is_what_runs(tmp_path: Path, module: torch.nn.Module) -> None:
    state = {key: value * 1.01 for key, value in module.state_dict().items()}
    torch.save(state, tmp_path / "unet.pth")
    loaded = unet_sr().build(tmp_path / "unet.pth").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    with pytest.raises(InputError, match="are for another model"):
        unet_sr(channels=8).build(tmp_path / "unet.pth")


def dims() -> dict[int, torch.export.Dim]:
    ranges = {name: (dim.min, dim.max) for name, dim in unet_sr().dims.items()}
    batch, h, w = (torch.export.Dim(n, min=low, max=high) for n, (low, high) in ranges.items())
    return {0: batch, 2: h, 3: w}


@pytest.mark.slow
def test_naive_export_dies_of_its_own_suggestion(module: torch.nn.Module) -> None:
    """torch.export reports odd sizes as violations, and crashes while it words its suggestion."""
    image = torch.from_numpy(unet_sr().sample(ODD, seed=0)["image"])
    with pytest.raises(
        AssertionError, match="Cannot create Dim with inconsistent min=-99, max=-200"
    ):
        torch.export.export(module, (image,), dynamic_shapes=(dims(),), strict=False)


@pytest.mark.slow
def test_naive_onnx_does_not_build(module: torch.nn.Module, tmp_path: Path) -> None:
    """TensorRT computes ``-h % 2`` like C, and finds a resize to a negative size."""
    pytest.importorskip("tensorrt_rtx")
    spec = unet_sr()
    image = torch.from_numpy(spec.sample(ODD, seed=0)["image"])
    program = torch.onnx.export(
        module, (image,), dynamic_shapes=(dims(),), dynamo=True, opset_version=18, verbose=False
    )
    assert program is not None
    program.save(tmp_path / "naive.onnx")
    feeds = [spec.sample({"batch": 1, "h": size, "w": size}, seed=0) for size in (200, 400)]
    with Child() as child:
        outcome = attempt(child, onnx.load(tmp_path / "naive.onnx"), feeds, TARGETS["rtx-1.7"])
    assert outcome.verdict == "build"
    assert "Resize shape dims should be n" in outcome.detail


@pytest.mark.slow
def test_whole_range_is_compared(artifact: Artifact) -> None:
    manifest = artifact.manifest
    (profile,) = manifest.interface.profiles
    assert profile.ranges == {"batch": (1, 4, 21), "h": (200, 256, 400), "w": (200, 256, 400)}
    (output,) = manifest.interface.outputs
    assert shape_texts(output.shape) == ("batch", 3, "2*h", "2*w")
    assert artifact.plan.is_file()
    assert manifest.engine_compared or manifest.engine_compared_why
    comparison = manifest.comparison
    assert comparison is not None and comparison.passed
    compared = {tuple(p.sizes.values()) for p in comparison.points if p.compared}
    assert {(1, 200, 200), (4, 256, 256), (1, 400, 400), (21, 200, 200)} <= compared
    assert any(h % 2 and w % 2 for _, h, w in compared)
    for point in comparison.points:
        if point.compared:
            assert point.results and all(r.max_abs is not None for r in point.results)
        else:
            assert point.estimate_bytes > comparison.memory_limit_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [(1, 200, 201), (2, 201, 200), (1, 399, 203), (3, 202, 399), (1, 205, 206)], ids=str
)
def test_onnx_runtime_agrees_with_torch(
    session: onnxruntime.InferenceSession, slim: torch.nn.Module, size: tuple[int, int, int]
) -> None:
    """At each of these sizes, some level has an odd size."""
    spec = unet_sr()
    feed = spec.sample(dict(zip(("batch", "h", "w"), size, strict=True)), seed=1)
    (large,) = session.run(["large"], feed)
    want = wanted(slim, feed["image"])
    (result,) = judge(TORCH, "model", {"large": want}, {"large": large}, spec.tolerance)
    assert result.passed, result.text


@pytest.mark.slow
def test_every_image_of_a_batch_is_as_if_alone(session: onnxruntime.InferenceSession) -> None:
    image = unet_sr().sample({"batch": 21, "h": 201, "w": 200}, seed=2)["image"]
    (together,) = session.run(["large"], {"image": image})
    assert together.shape == (21, 3, 402, 400)
    for n in (0, 1, 20):
        (alone,) = session.run(["large"], {"image": image[n : n + 1]})
        np.testing.assert_allclose(alone[0], together[n], rtol=0, atol=1e-6)


FAULTS: dict[str, Fault] = {
    "one bilinear resize as nearest": set_mode("linear", "nearest"),
    "bicubic as bilinear": set_mode("cubic", "linear"),
    "bicubic with the other coefficient": set_attribute(
        "Resize", "cubic_coeff_a", -0.5, slice(None)
    ),
    "nearest as bilinear": set_mode("nearest", "linear"),
    "resizes with aligned corners": set_attribute(
        "Resize", "coordinate_transformation_mode", "align_corners"
    ),
    "padding with zeros": set_attribute("Pad", "mode", "constant"),
    "padding by reflection": set_attribute("Pad", "mode", "reflect"),
    "pixel shuffle by columns first": set_attribute("DepthToSpace", "mode", "DCR"),
    "pixel unshuffle, rows and columns swapped": set_attribute(
        "Transpose", "perm", [0, 1, 5, 3, 2, 4]
    ),
    "one norm's epsilon": set_attribute("InstanceNormalization", "epsilon", 1e-4),
    "one convolution transposed": transpose_weight("encoder.2.3.weight", (1, 0, 2, 3)),
    "one convolution's kernel transposed": transpose_weight("encoder.0.0.weight", (0, 1, 3, 2)),
}


@pytest.fixture(scope="module")
def right(slim: torch.nn.Module) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """An image, and torch's output."""
    feed = unet_sr().sample({**ODD, "batch": 1}, seed=0)
    return feed, {"large": wanted(slim, feed["image"])}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(
    artifact: Artifact,
    right: tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
    fault: str,
    tmp_path: Path,
) -> None:
    spec, (feed, want) = unet_sr(), right
    model = onnx.load(artifact.path / "exported.onnx")
    FAULTS[fault](model)
    onnx.save(model, tmp_path / "wrong.onnx")
    got = next(run_onnx(tmp_path / "wrong.onnx", [feed]))
    (result,) = judge(TORCH, "wrong", want, got, spec.tolerance)
    assert not result.passed
    assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol


def test_the_smallest_fault_is_noticed_in_the_default_model(module: torch.nn.Module) -> None:
    """The tolerance's `why` states that it is well outside of the tolerance."""
    spec = unet_sr()
    feed = spec.sample({**ODD, "batch": 1}, seed=0)
    want = {"large": wanted(module, feed["image"])}
    norm = next(part for part in module.modules() if hasattr(part, "eps"))
    epsilon, norm.eps = norm.eps, 1e-4
    got = {"large": wanted(module, feed["image"])}
    norm.eps = epsilon
    (result,) = judge(TORCH, "wrong", want, got, spec.tolerance)
    assert not result.passed
    assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol
