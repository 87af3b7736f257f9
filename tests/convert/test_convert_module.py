"""``pipeline.convert`` and ``pipeline.check`` of a torch module in hand."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipeline
from pipeline.artifact.stored import stored_points
from pipeline.convert.driver import verify
from pipeline.convert.options import Verify
from pipeline.errors import InputError, PipelineError
from pipeline.source.module import module_spec


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.conv(x))) * scale[:, None, None, None]


INPUTS = {"x": "{b}x3x{h}x{w}", "scale": "{b}"}
DIMS = {"b": (1, 2, 3), "h": (8, 16, 24), "w": "8:16:32"}


def made() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.norm.eval()  # some users freeze the statistics
    net.conv.weight.requires_grad_(False)
    net.conv.bias.grad = torch.ones(4)  # type: ignore[union-attr]
    return net


def test_a_conversion_and_what_it_leaves(tmp_path: Path) -> None:
    net = made()
    x = torch.rand(1, 3, 8, 16)
    before = copy.deepcopy(net)
    report = pipeline.convert(
        net, {**INPUTS, "x": (INPUTS["x"], x)}, DIMS, name="mine", out=tmp_path / "a"
    )
    assert report.ok and report.manifest.name == "mine"
    assert {d.name: (d.min, d.opt, d.max) for d in report.manifest.interface.dims.values()} == {
        "b": (1, 2, 3), "h": (8, 16, 24), "w": (8, 16, 32),
    }  # fmt: skip
    assert any(np.array_equal(p.feed["x"], x.numpy()) for p in stored_points(report.path, "torch"))
    # the module is as it was
    assert [m.training for m in net.modules()] == [m.training for m in before.modules()]
    assert net.training and not net.norm.training
    after = net.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.state_dict().items())
    assert [p.requires_grad for p in net.parameters()] == [
        p.requires_grad for p in before.parameters()
    ]
    assert net.conv.bias is not None and torch.equal(net.conv.bias.grad, torch.ones(4))  # type: ignore[arg-type]
    again = module_spec(net, INPUTS, DIMS, name="mine")
    assert verify(report.path, Verify(torch_model=True, spec=again)).ok
    with pytest.raises(InputError, match=r"pipeline\.source\.module\.module_spec\("):
        verify(report.path, Verify(torch_model=True))


@pytest.mark.parametrize("terminal", [True, False])
def test_steps_are_printed_on_a_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    net, words = torch.nn.Linear(4, 2).eval(), {"inputs": {"input": "{b}x4"}, "dims": {"b": (1, 4)}}
    said: list[str] = []
    pipeline.convert(net, **words, out=tmp_path / "a", quick=True, announce=said.append)
    assert {"export", "build", "compare"} <= {text.split(" (")[0] for text in said}
    assert "pipeline: " not in capfd.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    pipeline.convert(net, **words, out=tmp_path / "a", quick=True, force=True)
    assert ("pipeline: export" in capfd.readouterr().err) == terminal


def test_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = made()
    report = pipeline.check(net, INPUTS, DIMS)
    assert report.ok and str(report).startswith("Net, for rtx-1.7\n")
    assert str(report).endswith("No findings block a conversion")
    assert net.training and list(tmp_path.iterdir()) == []

    class Bad(Net):
        def forward(self, x: Any, scale: Any) -> Any:
            return super().forward(x.reshape(-1, 3, 16, 16), scale)

    fixed = {"x": "1x3x{h}x16", "scale": "1"}
    blocked = pipeline.check(Bad(), fixed, {"h": (8, 16, 24)}, exact=True)
    assert not blocked.ok and "! h" in str(blocked)


def test_a_forgotten_input() -> None:
    with pytest.raises(InputError, match=r"model Net: its forward\(x.*Add --input scale:SHAPE \("):
        pipeline.convert(made(), {"x": INPUTS["x"]}, DIMS)


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import pipeline.convert.driver",
        "from pipeline.convert.driver import verify",
        "pipeline.convert; import pipeline.convert.options",
    ],
)
def test_the_function_is_also_the_package(first: str) -> None:
    text = f"""
import sys, pipeline
{first}
assert "torch" not in sys.modules and callable(pipeline.convert)
import pipeline.convert.driver as driver
assert pipeline.convert.driver is driver and callable(pipeline.convert)
try:
    pipeline.convert("raft")
except pipeline.InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "call pipeline.run(...)" in done.stdout


def test_build_is_a_package_and_a_function(artifact: Path) -> None:
    before = pipeline.Artifact.open(artifact).manifest
    dims = before.interface.dims.values()
    report = pipeline.build(str(artifact), profiles=(",".join(f"{d.name}={d.opt}" for d in dims),))
    assert len(report.manifest.interface.profiles) == 1
    assert report.manifest.files["engine.plan"] != before.files["engine.plan"]
    assert pipeline.verify(artifact).ok
    text = "import pipeline.build.build, pipeline; print(callable(pipeline.build))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    with pytest.raises(InputError, match=r"no option 'profile' \(did you mean profiles\?\)"):
        pipeline.build(artifact, profile="b=2")


def test_verify_takes_its_options_by_name(artifact: Path) -> None:
    report = pipeline.verify(artifact, against=artifact)
    assert report.ok and not report.regressions
    assert [note.kind for note in report.notes] == ["no-regression-without-engine"]
    with pytest.raises(InputError, match=r"no option 'againts' \(did you mean against\?\)"):
        pipeline.verify(artifact, againts=artifact)


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Parameter(torch.randn(1, 10, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions[:, : x.shape[1]]


def test_a_range_is_never_narrowed_without_a_word(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"does not accept every size: t .*exact=True") as caught:
        report = pipeline.convert(Table(), "1x{t}x4", {"t": (2, 40)}, out=tmp_path / "a")
    assert report.ok and report.manifest.interface.dims["t"].max == 10
    assert report.narrowed and caught[0].filename == __file__
    lines = str(report).splitlines()
    assert lines[0].startswith("converted: ") and lines[-2].startswith("narrowed: ")
    assert lines[-1].startswith("next: ")
    with pytest.raises(PipelineError, match="t must be in 2"):
        pipeline.convert(Table(), "1x{t}x4", {"t": (2, 40)}, out=tmp_path / "b", exact=True)


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pixel_unshuffle(x, 2)


class TwoOps(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.kthvalue(x, 2, -1).values
        return y + torch.special.i0(x).sum(-1)


def listed(module: torch.nn.Module, place: Path) -> PipelineError:
    ranges = {"h": (16, 40), "w": (16, 40)}
    with pytest.raises(PipelineError) as caught:
        pipeline.convert(module, "1x3x{h}x{w}", ranges, out=place, exact=True)
    return caught.value


def test_several_findings_are_listed_one_by_one(tmp_path: Path) -> None:
    """As the command line lists them. The message alone is one line."""
    error = listed(Halves(), tmp_path / "a")
    first, *lines = str(error).splitlines()
    assert first == "model Halves: 2 findings block the conversion:"
    heads = "! h mus", "    at:", "    do:", "! w mus", "    at:", "    do:"
    assert tuple(line[:7] for line in lines[:6]) == heads
    assert "in forward: return torch.nn.functional.pixel_unshuffle" in lines[1]
    assert lines[6].startswith("Or set refine_dims=True")
    assert lines[7].startswith("Or padding=Padding({'h': 2, 'w': 2})")
    assert "h must be a multiple of 2" in error.message and "\n" not in error.message
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_several_ops_without_a_translation_are_listed(tmp_path: Path) -> None:
    error = listed(TwoOps(), tmp_path / "a")
    lines = str(error).splitlines()
    assert lines[0] == "model TwoOps: 2 findings block the conversion:"
    assert [line[:7] for line in lines[1:]] == ["! aten.", "    at:", "    do:"] * 2


class Best(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.argmax(-1)


def test_a_check_of_integers_takes_the_measured_tolerances() -> None:
    assert pipeline.check(Best(), "1x{t}x4", {"t": (2, 8)}).ok


def test_the_version() -> None:
    assert pipeline.__version__ == importlib.metadata.version("trt-pipeline")
    assert "__version__" in dir(pipeline) and "verify" in dir(pipeline)
