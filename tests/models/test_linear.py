"""The round trip: saved by torch.export, loaded, converted from the file, and compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import HERE, Run, refused
from onnx import numpy_helper

from pipeline.artifact.artifact import Artifact
from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.errors import InputError
from pipeline.models.linear import linear, save_linear
from pipeline.spec.dims import shape_texts
from pipeline.spec.model import Tolerance

BATCHES = (1, 2, 33, 64)


def outputs_of(model: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    return y


def x_of(batch: int, seed: int = 1) -> np.ndarray:
    return linear().sample({"batch": batch}, seed)["x"]


@pytest.fixture(scope="module")
def artifact(zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    return zoo_artifact("linear")


def test_naive_export_of_one_example_is_fixed_without_a_word(cli: Run, tmp_path: Path) -> None:
    """An example batch of 1 fixes the batch to 1. The file shows it before the build."""
    program = torch.export.export(
        torch.nn.Linear(64, 32),
        (torch.zeros(1, 64),),
        dynamic_shapes=({0: torch.export.Dim.AUTO},),
    )
    torch.export.save(program, tmp_path / "one.pt2")
    naive = torch.onnx.export(program, (), dynamo=True, opset_version=18, verbose=False)
    naive.save(tmp_path / "one.onnx")
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
        outputs_of(tmp_path / "one.onnx", x_of(2))
    refused(
        cli("convert", "one.pt2", "--dim", "input_0=1:8:64"),
        "one.pt2: no dim input_0: the program was exported for fixed sizes only (input:1x64)",
    )


def test_naive_onnx_of_a_saved_program_has_lost_its_range(tmp_path: Path) -> None:
    save_linear(tmp_path / "linear.pt2", 64, 32)
    program = torch.export.load(tmp_path / "linear.pt2")
    with pytest.raises(NotImplementedError):
        program.module().eval()
    naive = torch.onnx.export(program, (), dynamo=True, opset_version=18, verbose=False)
    (value,) = naive.model_proto.graph.input
    assert value.type.tensor_type.shape.dim[0].dim_param.startswith("s")  # a symbol of torch
    naive.save(tmp_path / "naive.onnx")
    assert outputs_of(tmp_path / "naive.onnx", x_of(65)).shape == (65, 32)  # outside of the range


def whole_range(artifact: Artifact, layer: torch.nn.Module) -> None:
    """The manifest has every batch, and the artifact's model equals the layer."""
    manifest = artifact.manifest
    (dim,) = manifest.interface.dims.values()
    assert (dim.min, dim.max, dim.multiple_of) == (1, 64, 1)
    assert [list(shape_texts(i.shape)) for i in manifest.interface.inputs] == [[dim.name, 64]]
    assert [list(shape_texts(o.shape)) for o in manifest.interface.outputs] == [[dim.name, 32]]
    (profile,) = manifest.interface.profiles
    assert profile.ranges == {dim.name: (1, 8, 64)}
    comparison = manifest.comparison
    assert comparison is not None and comparison.passed
    compared = {p.sizes[dim.name] for p in comparison.points if p.compared}
    assert {1, 8, 64} <= compared and any(n % 2 and n > 1 for n in compared)
    for batch in BATCHES:
        x = x_of(batch)
        with torch.no_grad():
            want = layer(torch.from_numpy(x)).numpy()
        got = outputs_of(artifact.model, x)
        (result,) = judge(TORCH, "model", {"y": want}, {"y": got}, linear().tolerance)
        assert result.passed, result.text
        assert got.shape == (batch, 32)


def test_zoo_model_over_its_whole_range(artifact: Artifact, tmp_path: Path) -> None:
    save_linear(tmp_path / "linear.pt2", 64, 32)
    whole_range(artifact, torch.export.load(tmp_path / "linear.pt2").module())


def test_save_load_convert_load(tmp_path: Path) -> None:
    save_linear(tmp_path / "linear.pt2", 64, 32)
    line = [sys.executable, "-m", "pipeline", "convert", "linear.pt2", "--out", "a"]
    path = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path, env=path)
    assert done.returncode == 0, done.stderr
    layer = torch.export.load(tmp_path / "linear.pt2").module()
    whole_range(Artifact.open(tmp_path / "a"), layer)


def test_plan_is_whole_and_a_header_in_front_breaks_it(artifact: Artifact, tmp_path: Path) -> None:
    """Metadata is beside the plan, because a runtime needs the unchanged bytes."""
    trt = pytest.importorskip("tensorrt_rtx")
    plan = artifact.plan.read_bytes()
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    (tmp_path / "again.plan").write_bytes(plan)
    _, diagnostics = runtime.get_engine_validity((tmp_path / "again.plan").read_bytes())
    assert not int(diagnostics) & malformed
    header = b'{"name": "linear"}'
    _, diagnostics = runtime.get_engine_validity(len(header).to_bytes(4, "little") + header + plan)
    assert int(diagnostics) & malformed


def test_another_file_of_the_same_name_is_converted_anew(cli: Run, tmp_path: Path) -> None:
    save_linear(tmp_path / "linear.pt2", 64, 32)
    assert cli("convert", "linear.pt2", "--out", "a")[0] == 0
    before = outputs_of(tmp_path / "a" / "model.onnx", x_of(3))
    assert "Nothing changed" in cli("convert", "linear.pt2", "--out", "a")[1]
    layer = torch.nn.Linear(64, 32)
    torch.save(layer.state_dict(), tmp_path / "other.pth")
    save_linear(tmp_path / "linear.pt2", 64, 32, tmp_path / "other.pth")
    code, output, errors = cli("convert", "linear.pt2", "--out", "a")
    assert code == 0, errors
    assert "Nothing changed" not in output
    after = outputs_of(tmp_path / "a" / "model.onnx", x_of(3))
    assert not np.allclose(before, after, atol=1e-3)
    np.testing.assert_allclose(
        after, layer(torch.from_numpy(x_of(3))).detach().numpy(), rtol=0, atol=2e-6
    )


def test_weights_and_options(tmp_path: Path) -> None:
    layer = torch.nn.Linear(7, 3)
    torch.save(layer.state_dict(), tmp_path / "w.pth")
    module = linear(inputs=7, outputs=3).build(tmp_path / "w.pth")
    x = torch.rand(5, 7)
    with torch.no_grad():
        assert torch.equal(module(x), layer(x))
        assert not torch.equal(linear(inputs=7, outputs=3).build(None)(x), layer(x))
    with pytest.raises(InputError, match="are for another model"):
        linear().build(tmp_path / "w.pth")
    for bad in (0, -1, 2.0, True, "8"):
        with pytest.raises(InputError, match="must be a whole number, at least 1"):
            linear(inputs=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["a weight by 1 %", "transposed half", "bias left out"])
def test_a_planted_fault_is_noticed(artifact: Artifact, tmp_path: Path, fault: str) -> None:
    model = onnx.load(artifact.model)
    weight, bias = (next(t for t in model.graph.initializer if len(t.dims) == n) for n in (2, 1))
    values, offset = numpy_helper.to_array(weight).copy(), numpy_helper.to_array(bias).copy()
    if fault == "a weight by 1 %":
        values[3, 5] *= 1.01
    elif fault == "bias left out":
        offset[:] = 0
    else:
        values[:, :32] = values[:, :32].T
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    bias.CopyFrom(numpy_helper.from_array(offset, bias.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    spec, x = linear(), x_of(8)
    with torch.no_grad():
        want = {"y": spec.build(None)(torch.from_numpy(x)).numpy()}
    assert isinstance(spec.tolerance, Tolerance)
    (right,) = judge(TORCH, "right", want, {"y": outputs_of(artifact.model, x)}, spec.tolerance)
    (wrong,) = judge(
        TORCH, "wrong", want, {"y": outputs_of(tmp_path / "wrong.onnx", x)}, spec.tolerance
    )
    assert right.passed, right.text
    assert not wrong.passed
    assert wrong.max_abs is not None and wrong.max_abs > 10 * spec.tolerance.atol
