"""A mistake in the user's model is shown with its line, and nothing is said about sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import Run

import pipeline
from pipeline.errors import ExportError, InputError
from pipeline.spec.dims import Dim

FILE = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return {code}

def net():
    return Net().eval()

def script():
    return torch.jit.script(torch.nn.Linear(8, 8))

def load():
    torch.jit.script(torch.nn.Linear(8, 8)).save("scripted.pt")
    return torch.jit.load("scripted.pt")
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x * self.scale", "AttributeError: 'Net' object has no attribute 'scale'"),
        ("x * scale", "NameError: name 'scale' is not defined"),
        ("x.reshape(size=None)", "TypeError: "),
        ("x * __import__('no_such_package').scale", "ModuleNotFoundError: No module named"),
    ],
)
@pytest.mark.parametrize("command", ["export", "check"])
def test_a_mistake_in_code(cli: Run, tmp_path: Path, command: str, code: str, words: str) -> None:
    (tmp_path / "net.py").write_text(FILE.format(code=code))
    end, output, errors = cli(command, "net.py:net", "--input", "x:{b}x8", "--dim", "b=1:2:4")
    text = " ".join((output + errors.splitlines()[-1]).split())
    assert end == 1
    assert f"raises {words}" in text and "net.py:6 in forward" in text
    assert "correct that line of the model" in text
    assert "at none of" not in text and "ranges" not in text and "b=2" not in text


def test_another_error_may_come_from_the_sizes(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE.format(code="x @ torch.ones(9, 9)"))
    _, _, errors = cli("export", "net.py:net", "--input", "x:{b}x8", "--dim", "b=1:2:4")
    assert "runs at none of the" in errors


def test_a_mistake_in_a_module_whose_dims_stay(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale  # type: ignore[operator]

    with pytest.raises(ExportError) as caught:
        pipeline.convert(Net(), {"x": "{b}x8"}, {"b": Dim("b", 1, 2, 4)}, out=tmp_path / "a")
    text = str(caught.value)
    assert "raises AttributeError" in text and "test_model_faults.py" in text
    assert "example sizes" not in text


@pytest.mark.parametrize("name", ["script", "load"])
def test_a_factory_of_torchscript(cli: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "net.py").write_text(FILE.format(code="x"))
    end, _, errors = cli("export", f"net.py:{name}", "--input", "x:{b}x8", "--dim", "b=1:2:4")
    assert end == 2
    assert "TorchScript" in errors and "Return the torch module" in errors
    assert "Traceback" not in errors


def test_torchscript_in_hand(tmp_path: Path) -> None:
    module = torch.jit.script(torch.nn.Linear(8, 8))
    with pytest.raises(InputError, match="the module is TorchScript"):
        pipeline.convert(module, {"x": "{b}x8"}, {"b": (1, 4)}, out=tmp_path / "a")
