"""ViT-B/16: any batch size, and images of other sizes than the model was made for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from converted_zoo import HOW
from planted_faults import Fault, edit_weight, set_attribute, set_op, swap_weights, transpose_weight

from pipeline.artifact.artifact import Artifact
from pipeline.build.shape_inference import output_sizes
from pipeline.build.try_graph import attempt
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.errors import InputError
from pipeline.graph.session import run_onnx
from pipeline.machine.child import Child
from pipeline.machine.target import TARGETS
from pipeline.models._vit_any_size import AnySize
from pipeline.models.vit import vit, vit_any_size
from pipeline.spec.dims import shape_texts

RTX = TARGETS["rtx-1.7"]
SHALLOW = HOW["vit"]["options"]


@pytest.fixture(scope="module")
def artifact(zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    return zoo_artifact("vit")


@pytest.fixture(scope="module")
def any_size(zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    return zoo_artifact("vit_any_size")


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return vit().build(None)


def wanted(module: torch.nn.Module, image: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return module(torch.from_numpy(image)).numpy()


def test_specs_are_as_the_issue_asks() -> None:
    ranges = {name: (d.min, d.max, d.multiple_of) for name, d in vit().dims.items()}
    assert ranges == {"batch": (1, 32, 1)}
    ranges = {name: (d.min, d.max, d.multiple_of) for name, d in vit_any_size().dims.items()}
    assert ranges == {"batch": (1, 8, 1), "h": (160, 512, 16), "w": (160, 512, 16)}
    for factory in (vit, vit_any_size):
        for bad in (0, 13, 1.5, True, "2"):
            with pytest.raises(InputError, match=r"layers=.* must be a whole number from 1 to 12"):
                factory(layers=bad)  # type: ignore[arg-type]


def test_two_images_get_different_logits() -> None:
    """torchvision's initial head is zero and gives only zeros."""
    logits = wanted(vit(layers=1).build(None), vit().sample({"batch": 2}, seed=0)["image"])
    assert logits.std() > 0.1
    assert np.abs(logits[0] - logits[1]).max() > 0.1


def test_any_size_is_vit_where_the_position_embedding_fits() -> None:
    image = vit().sample({"batch": 2}, seed=0)["image"]
    fixed, free = vit(layers=2).build(None), vit_any_size(layers=2).build(None)
    np.testing.assert_allclose(wanted(free, image), wanted(fixed, image), rtol=0, atol=1e-5)


def test_weights_of_vit_fit_any_size(tmp_path: Path) -> None:
    state = {key: value * 1.01 for key, value in vit(layers=1).build(None).state_dict().items()}
    torch.save(state, tmp_path / "vit.pth")
    loaded = vit_any_size(layers=1).build(tmp_path / "vit.pth").state_dict()
    assert all(torch.equal(loaded[f"vit.{key}"], value) for key, value in state.items())
    with pytest.raises(InputError, match="are for another model"):
        vit(layers=2).build(tmp_path / "vit.pth")


def test_torchvisions_own_is_fixed_to_its_image_size() -> None:
    """The reason for `vit_any_size`: torch.export reports a free height as a constant."""
    dims = {0: torch.export.Dim("batch", max=32), 2: torch.export.Dim("h", min=160, max=512)}
    image = torch.rand(2, 3, 224, 224)
    with pytest.raises(torch._dynamo.exc.UserError, match=r"specialized it to be a constant \(224"):
        torch.export.export(vit(layers=1).build(None), (image,), dynamic_shapes=(dims,))


@pytest.mark.slow
def test_naive_any_size_is_refused_by_tensorrt() -> None:
    pytest.importorskip("tensorrt_rtx")
    spec = vit_any_size(layers=1)
    sizes = ({"batch": 1, "h": 160, "w": 160}, {"batch": 2, "h": 176, "w": 208})
    feeds = [spec.sample(each, seed=0) for each in sizes]
    ranges = {name: (dim.min, dim.max) for name, dim in spec.dims.items()}
    batch, h, w = (torch.export.Dim(n, min=low, max=high) for n, (low, high) in ranges.items())
    program = torch.onnx.export(
        spec.build(None), (torch.from_numpy(feeds[1]["image"]),), opset_version=18, dynamo=True,
        dynamic_shapes=({0: batch, 2: h, 3: w},), verbose=False,
    )  # fmt: skip
    assert program is not None
    with Child() as child:
        outcome = attempt(child, program.model_proto, feeds, RTX)
    assert outcome.verdict == "parse"
    assert "Antialiasing is not supported" in outcome.detail


@pytest.mark.slow
def test_batch_out_is_batch_in(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert manifest.interface.profiles[0].ranges == {"batch": (1, 8, 32)}
    assert [list(shape_texts(o.shape)) for o in manifest.interface.outputs] == [["batch", 1000]]
    comparison = manifest.comparison
    assert comparison is not None and comparison.passed
    compared = [p.sizes["batch"] for p in comparison.points if p.compared]
    assert {1, 8, 32} <= set(compared)
    session = onnxruntime.InferenceSession(artifact.model, providers=["CPUExecutionProvider"])
    image = vit().sample({"batch": 32}, seed=0)["image"]
    (all_logits,) = session.run(["logits"], {"image": image})
    assert all_logits.shape == (32, 1000)
    for batch in (1, 2, 31):
        (logits,) = session.run(["logits"], {"image": image[:batch]})
        assert logits.shape == (batch, 1000)
        np.testing.assert_allclose(logits, all_logits[:batch], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_batch_out_is_batch_in_by_tensorrt(artifact: Artifact) -> None:
    pytest.importorskip("tensorrt_rtx")
    batches = (1, 2, 31, 32)
    shapes = [{"image": (batch, 3, 224, 224)} for batch in batches]
    found = output_sizes(artifact.model, shapes, RTX)
    assert found == [{"logits": (batch, 1000)} for batch in batches]


@pytest.mark.slow
def test_any_size_over_its_whole_range(any_size: Artifact) -> None:
    manifest = any_size.manifest
    ranges = {"batch": (1, 2, 8), "h": (160, 224, 512), "w": (160, 224, 512)}
    assert manifest.interface.profiles[0].ranges == ranges
    assert [list(shape_texts(o.shape)) for o in manifest.interface.outputs] == [["batch", 1000]]
    comparison = manifest.comparison
    assert comparison is not None and comparison.passed
    compared = {tuple(p.sizes.values()) for p in comparison.points if p.compared}
    assert {(1, 160, 160), (2, 224, 224), (1, 512, 512), (8, 160, 160)} <= compared
    assert not any(node.op_type == "Resize" for node in onnx.load(any_size.model).graph.node)


FAULTS: dict[str, Fault] = {
    "all norms' epsilon": set_attribute("LayerNormalization", "epsilon", 1e-4, slice(None)),
    "one softmax over the queries": set_attribute("Softmax", "axis", -2),
    "one GELU of tanh": set_op("Erf", "Tanh"),
    "position embedding one token off": edit_weight(
        "encoder.pos_embedding", lambda values: np.roll(values, 1, axis=1)
    ),
    "one projection transposed": transpose_weight(
        "encoder.layers.encoder_layer_0.self_attention.out_proj.weight", (1, 0)
    ),
    "two norms' scales swapped": swap_weights(
        "encoder.layers.encoder_layer_0.ln_1.weight", "encoder.layers.encoder_layer_0.ln_2.weight"
    ),
}


@pytest.fixture(scope="module")
def right() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two images, and torch's logits."""
    feed = vit().sample({"batch": 2}, seed=0)
    return feed, {"logits": wanted(vit(**SHALLOW).build(None), feed["image"])}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(
    artifact: Artifact,
    right: tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
    fault: str,
    tmp_path: Path,
) -> None:
    spec, (feed, want) = vit(), right
    model = onnx.load(artifact.path / "exported.onnx")
    FAULTS[fault](model)
    onnx.save(model, tmp_path / "wrong.onnx")
    got = next(run_onnx(tmp_path / "wrong.onnx", [feed]))
    (result,) = judge(TORCH, "wrong", want, got, spec.tolerance)
    assert not result.passed
    assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol


def epsilons(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.eps = 1e-4


def projection(module: torch.nn.Module) -> None:
    weight = module.encoder.layers[11].self_attention.out_proj.weight
    weight.data = weight.data.T.contiguous()


def scales(module: torch.nn.Module) -> None:
    one, other = (module.encoder.layers[layer].ln_1.weight for layer in (5, 6))
    one.data, other.data = other.data, one.data


def test_faults_in_twelve_layers_are_noticed(module: torch.nn.Module) -> None:
    """In torch. The tolerance's `why` states that the smallest fault is well outside of it."""
    spec = vit()
    feed = spec.sample({"batch": 1}, seed=0)
    want = {"logits": wanted(module, feed["image"])}
    for plant in (epsilons, projection, scales):
        wrong = copy.deepcopy(module)
        plant(wrong)
        got = {"logits": wanted(wrong, feed["image"])}
        (result,) = judge(TORCH, "wrong", want, got, spec.tolerance)
        assert not result.passed, plant
        assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol, plant


def resized(**how: object) -> Callable[[AnySize, torch.Size], torch.Tensor]:
    """`AnySize.position` with other arguments of interpolate."""

    def position(self: AnySize, size: torch.Size) -> torch.Tensor:
        embedding = self.vit.encoder.pos_embedding
        square = embedding[:, 1:].transpose(1, 2).reshape(1, -1, self.side, self.side)
        grid = torch.nn.functional.interpolate(square, size=size, **how)
        return torch.cat((embedding[:, :1], grid.flatten(2).transpose(1, 2)), dim=1)

    return position


@pytest.mark.slow
@pytest.mark.parametrize("size", [(160, 208), (512, 240)], ids=str)
def test_another_resize_of_the_position_embedding_is_noticed(
    module: torch.nn.Module, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, free = vit_any_size(), AnySize(module).eval()
    feed = spec.sample({"batch": 1, "h": size[0], "w": size[1]}, seed=0)
    want = {"logits": wanted(free, feed["image"])}
    right = resized(mode="bicubic", antialias=True)
    monkeypatch.setattr(AnySize, "position", right)
    np.testing.assert_array_equal(wanted(free, feed["image"]), want["logits"])
    for how in (
        {"mode": "bicubic"},
        {"mode": "bilinear", "antialias": True},
        {"mode": "bicubic", "antialias": True, "align_corners": True},
    ):
        monkeypatch.setattr(AnySize, "position", resized(**how))
        got = {"logits": wanted(free, feed["image"])}
        (result,) = judge(TORCH, "wrong", want, got, spec.tolerance)
        assert not result.passed, how
        assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol, how
