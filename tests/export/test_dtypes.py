"""Modules in half precision: what is converted, to which dtype, and how close it must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from pipeline.compare.run_names import TORCH
from pipeline.compare.verdict import judge
from pipeline.convert.driver import run_export, verify
from pipeline.convert.options import Verify
from pipeline.errors import InputError
from pipeline.export.dtypes import fit_dtypes, run_widened
from pipeline.export.export import export
from pipeline.export.exported import Exported
from pipeline.export.module import built, made
from pipeline.export.tolerance import with_tolerance
from pipeline.graph.session import run_onnx
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec

B, H = Dim("b", 1, 2, 4), Dim("h", 8, 16, 24)


class Net(torch.nn.Module):
    """A convolution, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)
            self.norm = torch.nn.LayerNorm(16)
            self.fc = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x)).permute(0, 2, 3, 1)
        return self.fc(self.norm(y)).flatten(1, 2)


class FloatNorm(Net):
    """A half module whose norm is float32, as in many published models."""

    def __init__(self) -> None:
        super().__init__()
        self.half().norm.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x)).permute(0, 2, 3, 1)
        return self.fc(self.norm(y.float()).to(y.dtype)).flatten(1, 2)


class Casts(Net):
    """Takes and returns float32, and computes in the dtype of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.conv.weight.dtype)).float()


def spec_of(module: torch.nn.Module, declared: str = "float32", **more: Any) -> ModelSpec:
    return ModelSpec("m", lambda _: module, (Input("x", (B, 3, H, 12), declared),), **more)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], str, str]] = {
    # the module, the declared dtype, and the dtype of the engine's input
    "bfloat16": (lambda: Net().bfloat16(), "float32", "float32"),
    "bfloat16, half declared": (lambda: Net().bfloat16(), "float16", "float32"),
    "bfloat16 inside": (lambda: Casts().bfloat16(), "float32", "float32"),
    "float16": (lambda: Net().half(), "float16", "float16"),
    "float16, float declared": (lambda: Net().half(), "float32", "float16"),
    "float16 inside": (lambda: Casts().half(), "float32", "float32"),
    "mixed": (FloatNorm, "float16", "float16"),
    "mixed, float declared": (FloatNorm, "float32", "float16"),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Exported]:
    make, declared, _ = CASES[request.param]
    path = tmp_path_factory.mktemp("case") / "m.onnx"
    return request.param, export(spec_of(make(), declared), None, path)


def passes(done: Exported, model: Path, sizes: dict[str, int]) -> bool:
    feed = done.spec.sample(sizes, 7)
    with torch.no_grad():
        want = done.module(torch.from_numpy(feed["x"])).numpy()
    (got,) = run_onnx(model, [feed])
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None
    (result,) = judge(TORCH, "model", {"output": want}, got, tolerance)
    return result.passed


def test_the_first_try_is_right(case: tuple[str, Exported]) -> None:
    name, done = case
    want = CASES[name][2]
    assert done.interface.inputs[0].dtype == want
    (value,) = onnx.load(done.path).graph.input
    kind = TensorProto.FLOAT16 if want == "float16" else TensorProto.FLOAT
    assert value.type.tensor_type.elem_type == kind
    for sizes in ({"b": 1, "h": 8}, {"b": 3, "h": 13}, {"b": 4, "h": 24}):
        assert passes(done, done.path, sizes)
    said = any(f"x is {want} in the engine" in note for note in done.notes)
    assert said == (CASES[name][1] != want)


def weight(model: onnx.ModelProto) -> None:
    """A fault: the weights of the last layer grow by 3 %."""
    change(model, [16, 10], lambda values: values * 1.03)


def bias(model: onnx.ModelProto) -> None:
    """A fault: one bias of the convolution is lost."""

    def lost(values: np.ndarray) -> np.ndarray:
        values[np.abs(values).argmax()] = 0
        return values

    change(model, [16], lost, "conv.bias")


def epsilon(model: onnx.ModelProto) -> None:
    """A fault: the norm divides by sqrt(variance + 1e-2)."""
    (node,) = (n for n in model.graph.node if n.op_type == "LayerNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 1e-2


def change(
    model: onnx.ModelProto,
    shape: list[int],
    function: Callable[[np.ndarray], np.ndarray],
    end: str = "",
) -> None:
    every = (t for t in model.graph.initializer if t.name.endswith(end))
    tensor = next(t for t in every if list(t.dims) == shape)
    values = numpy_helper.to_array(tensor)
    made = np.asarray(function(values.copy()), values.dtype)
    tensor.CopyFrom(numpy_helper.from_array(made, tensor.name))


@pytest.mark.parametrize("fault", [weight, bias, epsilon])
def test_a_planted_fault_fails(
    case: tuple[str, Exported], tmp_path: Path, fault: Callable[[onnx.ModelProto], None]
) -> None:
    _, done = case
    model = onnx.load(done.path)
    fault(model)
    onnx.save(model, tmp_path / "wrong.onnx")
    assert not passes(done, tmp_path / "wrong.onnx", {"b": 3, "h": 13})


def test_the_tolerance_is_that_of_the_precision_that_computes(
    case: tuple[str, Exported],
) -> None:
    name, done = case
    tolerance = done.spec.outputs[0].tolerance
    assert tolerance is not None
    if name.startswith("bfloat16"):
        assert tolerance.rtol == 1e-4 and tolerance.atol < 1e-4
        assert "float32 rounding" in tolerance.why
        (note, *_) = done.notes
        assert "bfloat16 weights were converted to float32" in note
        assert "% at b=2,h=9, and the engine computes the float32 ones" in note
    else:
        assert 1e-3 < tolerance.rtol < 5e-3 and 1e-3 < tolerance.atol < 2e-2
        assert "float16 rounding" in tolerance.why
        assert "the model has float16 weights: the engine computes in float16" in done.notes[0]


@pytest.mark.parametrize("make", [lambda: Net().bfloat16(), lambda: Net().half(), FloatNorm])
def test_the_users_module_is_left_as_given(
    make: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    module = make().train()
    before = {k: (v.dtype, v.data_ptr(), v.clone()) for k, v in module.state_dict().items()}
    done = run_export(Config(spec_of(module), out=tmp_path / "a"))
    assert done.manifest.export is not None and done.manifest.export.notes
    after = module.state_dict()
    for name, (dtype, place, values) in before.items():
        assert after[name].dtype == dtype and after[name].data_ptr() == place
        assert torch.equal(after[name], values)
    assert module.training and all(p.requires_grad for p in module.parameters())


class Branch(Net):
    """Has other results in bfloat16 than in float32, beyond rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 1.5 if y.dtype == torch.bfloat16 else y


def test_other_results_in_float32_are_refused_unless_asked_for() -> None:
    module = Branch().bfloat16()
    with pytest.raises(InputError) as caught:
        built(spec_of(module), None)
    assert "its results in float32 differ from its own by 50% at b=2,h=9" in str(caught.value)
    assert "pass --dtype float32" in str(caught.value)
    spec, module = made(spec_of(Branch().bfloat16(), dtype="float32"), None)
    _, notes = fit_dtypes(spec, module, 0)
    assert "converted to float32, as --dtype asks. Its results change by 50" in notes[0]


class HardCast(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x)).permute(0, 2, 3, 1)
        return self.fc(y.to(torch.bfloat16))


def test_a_cast_to_bfloat16_is_named_with_its_line() -> None:
    with pytest.raises(InputError) as caught:
        built(spec_of(HardCast().bfloat16()), None)
    text = str(caught.value)
    assert "its weights are bfloat16. Converted to float32, it fails at" in text
    assert "return self.fc(y.to(torch.bfloat16))" in text


class Inverts(Net):
    """torch has no inverse in half precision on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)[:, 0, :8, :8]
        square = y + 9 * torch.eye(8, dtype=y.dtype)
        return torch.linalg.inv(square) * self.fc.bias.sum()


def test_a_float16_module_that_no_cpu_runs_becomes_float32() -> None:
    spec, module = built(spec_of(Inverts().half(), "float16"), None)
    assert spec.inputs[0].dtype == "float32"
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    spec, module = made(spec_of(Inverts().half()), None)
    _, notes = fit_dtypes(spec, module, 0)
    assert "because it fails in float16 on a CPU (" in notes[0] and "Got Half)" in notes[0]
    assert "could not be run in float16, so the two were not compared" in notes[0]


class Parts(torch.nn.Module):
    """A half image, a time that stays float32, and integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 1).half()
        self.time = torch.nn.Linear(5, 4)
        self.register_buffer("table", torch.rand(7, 4, dtype=torch.float64))

    def forward(
        self, image: torch.Tensor, time: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        bias = self.time(time) + self.table[ids].to(time.dtype) * mask[:, None]
        return self.conv(image) + bias[:, :, None, None].to(image.dtype)


def parts(module: torch.nn.Module, dtype: Any = None) -> ModelSpec:
    inputs = (
        Input("image", (B, 3, 8, 8)),
        Input("time", (B, 5)),
        Input("ids", (B,), "int64", 0, 7),
        Input("mask", (B,), "bool"),
    )
    return ModelSpec("m", lambda _: module, inputs, dtype=dtype)


def test_only_the_inputs_that_need_it_change() -> None:
    spec, module = built(parts(Parts()), None)
    assert [i.dtype for i in spec.inputs] == ["float16", "float32", "int64", "bool"]
    assert module.table.dtype == torch.float64
    spec, module = built(parts(Parts(), "float32"), None)
    assert [i.dtype for i in spec.inputs] == ["float32", "float32", "int64", "bool"]
    assert {t.dtype for t in module.state_dict().values()} == {torch.float32}


def test_float64_beside_bfloat16_stays() -> None:
    module = Parts()
    module.conv.bfloat16()
    _, module = built(parts(module), None)
    assert module.table.dtype == torch.float64 and module.conv.weight.dtype == torch.float32


class Autocast(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.fc(torch.relu(self.conv(x)).permute(0, 2, 3, 1)).float()


class HalfMask(Net):
    """One half op that rounds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (x[:, 0, 0, 0] > 0).half().float()[:, None, None]


@pytest.mark.parametrize(("make", "half"), [(Autocast, True), (HalfMask, False)])
def test_what_the_code_computes_counts_and_not_what_the_weights_are(
    make: Callable[[], torch.nn.Module], half: bool
) -> None:
    spec, module = built(spec_of(make()), None)
    tolerance = with_tolerance(spec, module, 0).outputs[0].tolerance
    assert tolerance is not None
    assert ("float16 rounding" in tolerance.why) == half
    assert (tolerance.rtol > 1e-3) == half and (tolerance.atol > 1e-4) == half


def test_a_saved_program_runs_in_float32_although_it_names_float16() -> None:
    x = torch.rand(2, 3, 8, 12)
    program = torch.export.export(Casts().half().eval(), (x,)).module()
    with torch.no_grad():
        wide, exact, own = run_widened(program, [x]), Net().half().float()(x), program(x)
    assert torch.allclose(wide, exact, atol=1e-5)
    assert not torch.allclose(wide, own, atol=1e-5)


def test_a_half_table_that_a_call_writes_is_not_widened() -> None:
    """A copy would be written in its place, and the result would be wrong."""
    table = [torch.zeros(4, dtype=torch.float16)]

    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table[0].copy_(x)
            return table[0] + x

    with pytest.raises(TypeError, match=r"writes to a torch\.float16 tensor"):
        run_widened(Writes(), [torch.ones(4, dtype=torch.float16)])


def test_the_option_is_in_the_manifest_and_counts_for_a_later_comparison(tmp_path: Path) -> None:
    spec = spec_of(Net().half())
    report = run_export(Config(spec, dtype="float32", out=tmp_path / "a"))
    stored = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert stored["model"]["dtype"] == "float32"
    assert stored["interface"]["inputs"][0]["dtype"] == "float32"
    assert report.manifest.model.dtype == "float32"
    again = verify(tmp_path / "a", Verify(torch_model=True, spec=spec))
    assert again.ok and again.manifest.comparison is not None
    assert max(v.max_abs or 0 for p in again.manifest.comparison.points for v in p.results) < 1e-4


def test_the_option_is_for_torch_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dtype='float16': pass None or 'float32'"):
        spec_of(Net(), dtype="float16")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (float[n,4] y) '
        "{ y = Relu(x) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="--dtype works only for torch models"):
        find_source(Config(str(tmp_path / "m.onnx"), dims=("n=1:2:4",), dtype="float32"))
