"""RAFT over its whole range, and proof that the comparison notices faults."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from pipeline.artifact.artifact import Artifact
from pipeline.compare.run_names import TORCH
from pipeline.compare.runners import TorchRunner
from pipeline.compare.verdict import judge
from pipeline.convert.driver import run_rewrite
from pipeline.export.export import reference
from pipeline.graph.memory import Estimator
from pipeline.graph.session import run_onnx
from pipeline.models.raft import raft, raft_small
from pipeline.spec.dims import shape_texts
from pipeline.spec.model import ModelSpec
from pipeline.spec.runner import run_once

pytestmark = pytest.mark.slow

FACTORIES: dict[str, Callable[..., ModelSpec]] = {"raft": raft, "raft_small": raft_small}
ODD = {"h": 137, "w": 251}
Feed = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=list(FACTORIES))
def artifact(request: pytest.FixtureRequest, zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    """`raft` from `make convert MODEL=raft`, and `raft_small` with a quick comparison.

    `raft_small` has two updates, and the same code as twelve updates.
    """
    return zoo_artifact(request.param)


@pytest.fixture(scope="module")
def spec(artifact: Artifact) -> ModelSpec:
    return FACTORIES[artifact.manifest.name](**artifact.manifest.model.options)


@pytest.fixture(scope="module")
def module(spec: ModelSpec) -> torch.nn.Module:
    return reference(spec, spec.build(None), {"flow": (1, 2, "h", "w")})


def run_reference(module: torch.nn.Module, feed: Feed) -> Feed:
    return run_once(TorchRunner(module, ["flow"]), feed)


@pytest.fixture(scope="module")
def feed(spec: ModelSpec) -> Feed:
    return spec.sample(ODD, seed=0)


@pytest.fixture(scope="module")
def wanted(module: torch.nn.Module, feed: Feed) -> Feed:
    """torch's flow for `feed`."""
    return run_reference(module, feed)


def test_manifest_says_what_was_done(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert {d.name: (d.min, d.max, d.multiple_of) for d in manifest.interface.dims.values()} == {
        "h": (135, 2160, 1),
        "w": (135, 3840, 1),
    }
    (profile,) = manifest.interface.profiles
    assert profile.ranges == {"h": (135, 440, 2160), "w": (135, 1024, 3840)}
    assert [list(shape_texts(o.shape)) for o in manifest.interface.outputs] == [[1, 2, "h", "w"]]
    assert manifest.export is not None and manifest.export.opset == 18
    assert manifest.versions["torch"] and manifest.target.version
    assert manifest.engine_compared or manifest.engine_compared_why
    comparison = manifest.comparison
    assert comparison is not None and comparison.passed
    compared = {(p.sizes["h"], p.sizes["w"]) for p in comparison.points if p.compared}
    assert {(135, 135), (440, 1024)} <= compared
    assert ({(135, 3840), (2160, 135)} <= compared) == (manifest.name == "raft")
    for point in comparison.points:
        if point.compared:
            assert point.results and all(r.max_abs is not None for r in point.results)
        else:
            assert point.estimate_bytes > comparison.memory_limit_bytes and point.left_out


def test_engine_is_well_formed(artifact: Artifact) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    _, diagnostics = runtime.get_engine_validity(artifact.plan.read_bytes())
    assert not int(diagnostics) & malformed
    _, garbage = runtime.get_engine_validity(bytes(1000))
    assert int(garbage) & malformed


@pytest.mark.parametrize("size", [(135, 135), (137, 251)], ids=str)  # 440x1024: compared at opt
def test_onnx_runtime_agrees_with_torch(
    artifact: Artifact, spec: ModelSpec, module: torch.nn.Module, size: tuple[int, int]
) -> None:
    feed = spec.sample({"h": size[0], "w": size[1]}, seed=1)
    session = onnxruntime.InferenceSession(artifact.model, providers=["CPUExecutionProvider"])
    (flow,) = session.run(["flow"], feed)
    assert flow.shape == (1, 2, *size)
    (result,) = judge(TORCH, "model", run_reference(module, feed), {"flow": flow}, spec.tolerance)
    assert result.passed, result.text


def test_output_has_the_input_size_everywhere(artifact: Artifact) -> None:
    estimator = Estimator(artifact.model)
    rng = random.Random(0)
    sizes = [(135, 135), (135, 3840), (2160, 135), (2160, 3840), (2159, 3839)]
    sizes += [(rng.randint(135, 2160), rng.randint(135, 3840)) for _ in range(30)]
    for size in sizes:
        shape = (1, 3, *size)
        estimate = estimator.at({"image1": shape, "image2": shape})
        assert estimate.output_shapes == {"flow": (1, 2, *size)}


def set_attribute(op: str, name: str, value: object, count: int = 1) -> Callable[..., None]:
    """A fault: sets an attribute of the first `count` nodes of that op (-1: all nodes)."""

    def plant(model: onnx.ModelProto) -> None:
        nodes = [node for node in model.graph.node if node.op_type == op]
        assert nodes
        for node in nodes[: count if count > 0 else None]:
            kept = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return plant


def swap_padding_sides(model: onnx.ModelProto) -> None:
    pads = [n for n in model.graph.node if n.op_type == "Concat" and n.name.endswith("/pads")]
    (node,) = pads  # both images have the same size and so the same padding
    names = list(node.input)
    node.input[:] = names[4:] + names[:4]


EPSILON = "one InstanceNorm epsilon"
FAULTS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "padding with zeros": set_attribute("Pad", "mode", "constant", 2),
    "padding by reflection": set_attribute("Pad", "mode", "reflect", 2),
    "padding on the other side": swap_padding_sides,
    "one GridSample without align_corners": set_attribute("GridSample", "align_corners", 0),
    "one GridSample with border": set_attribute("GridSample", "padding_mode", "border"),
    "GridSample nearest": set_attribute("GridSample", "mode", "nearest", -1),
    EPSILON: set_attribute("InstanceNormalization", "epsilon", 1e-4),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(
    artifact: Artifact, spec: ModelSpec, feed: Feed, wanted: Feed, fault: str, tmp_path: Path
) -> None:
    if fault == EPSILON and spec.options["updates"] < 12:
        pytest.skip("grows with the updates: the next test has it with twelve")
    model = onnx.load(artifact.model)
    FAULTS[fault](model)
    onnx.save(model, tmp_path / "wrong.onnx")
    got = next(run_onnx(tmp_path / "wrong.onnx", [feed]))
    (result,) = judge(TORCH, "wrong", wanted, got, spec.tolerance)
    assert not result.passed
    # the tolerance's `why` states that the smallest fault is well outside of it
    assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol


def test_another_epsilon_in_one_norm_is_noticed() -> None:
    """`raft_small`'s smallest fault, with twelve updates, in torch."""
    spec = raft_small()
    feed = spec.sample(ODD, seed=0)
    built = spec.build(None)
    module = reference(spec, built, {"flow": (1, 2, "h", "w")})
    wanted = run_reference(module, feed)
    norm = next(part for part in built.modules() if isinstance(part, torch.nn.InstanceNorm2d))
    norm.eps = 1e-4
    (result,) = judge(TORCH, "wrong", wanted, run_reference(module, feed), spec.tolerance)
    assert not result.passed
    assert result.max_abs is not None and result.max_abs > 4 * spec.tolerance.atol


def test_one_update_less_is_noticed(spec: ModelSpec, feed: Feed, wanted: Feed) -> None:
    less = FACTORIES[spec.name](updates=spec.options["updates"] - 1)
    fewer = reference(less, less.build(None), {"flow": (1, 2, "h", "w")})
    got = run_reference(fewer, feed)
    (result,) = judge(TORCH, "one update less", wanted, got, spec.tolerance)
    assert not result.passed


def test_rewritten_for_8_6(
    artifact: Artifact, spec: ModelSpec, feed: Feed, wanted: Feed, tmp_path: Path
) -> None:
    """The passes for TensorRT 8.6, on the real model. The full proof needs a GPU machine."""
    place = tmp_path / "old"
    shutil.copytree(artifact.path, place)
    report = run_rewrite(place, "tensorrt-8.6")
    assert report.manifest.rewrite is not None
    done = {p.name: len(p.rewritten) for p in report.manifest.rewrite.passes if p.needed}
    assert done["decompose_instance_norm"] >= 15
    assert done["slice_shape"] >= 1
    model = onnx.load(place / "model.onnx")
    assert not any(node.op_type == "InstanceNormalization" for node in model.graph.node)
    shapes = [node for node in model.graph.node if node.op_type == "Shape"]
    assert shapes and not any(node.attribute for node in shapes)
    got = next(run_onnx(place / "model.onnx", [feed]))
    (result,) = judge(TORCH, "rewritten", wanted, got, spec.tolerance)
    assert result.passed, result.text


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_file_is_what_is_built(suffix: str, tmp_path: Path) -> None:
    """test_weights.py shows on a smaller model that it is also exported and compared."""
    own = raft_small(updates=1).build(None).raft.state_dict()
    state = {k: v * 1.01 if v.is_floating_point() else v for k, v in own.items()}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(state, path)
    else:
        from safetensors.torch import save_file

        save_file(state, path)
    built = raft_small(updates=1).build(path).raft.state_dict()
    assert built.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in built.items())
    assert any(not torch.equal(value, own[key]) for key, value in built.items())
