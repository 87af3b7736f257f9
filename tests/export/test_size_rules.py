"""A branch on several dims is said as a rule that the user can paste."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Run

import pipeline
from pipeline.errors import ConstraintError
from pipeline.export.guards import Broken
from pipeline.export.size_rules import by_size_rule, size_rule
from pipeline.spec.dims import Dim

FILE = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        if x.shape[3] * x.shape[2] != 35:
            x = x * 2
        return x

def net():
    return Net().eval()
"""
WORDS = ("net.py:net", "--input", "x:1x1x{h}x{w}", "--dim", "h=4:6:16", "--dim", "w=4:6:16")


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[3] * x.shape[2] != 35:
            x = x * 2
        return x


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("Ne(w*h, 1155)", "h*w != 1155"),
        ("Ne(FloorDiv(h, 2), Mod(w*2, 3))", "h // 2 != 2*w % 3"),
        ("w*h < 100", "h*w < 100"),
        ("Max(h, w) <= 9", "max(h, w) <= 9"),
        ("Ne(OpaqueUnaryFn_sqrt(h), w)", ""),
        ("Ne(h, w) & Ne(h, 2*w)", ""),
        ("h < w < 9", ""),
        ("not a guard", ""),
    ],
)
def test_torchs_words_as_a_rule(words: str, rule: str) -> None:
    assert size_rule(words) == rule


def test_only_a_rule_that_leaves_out_the_same_sizes() -> None:
    dims = Dim("h", 2, 4, 9), Dim("w", 2, 4, 9)
    grid = np.array([[h, w] for h in range(2, 10) for w in range(2, 10) if h * w == 10])
    found = by_size_rule(Broken("", "Ne(w*h, 10)", dims, grid), ())
    assert found is not None
    assert (found.kind, found.size_rule) == ("relation", "h*w != 10")
    assert by_size_rule(Broken("", "Ne(w*h, 12)", dims, grid), ()) is None
    at_opt = np.array([[2, 8], [4, 4], [8, 2]])
    found = by_size_rule(Broken("", "Ne(w*h, 16)", dims, at_opt), ())
    assert found is not None
    assert (found.kind, found.formula) == ("guard", "h*w != 16")
    assert "which excludes your opt" in str(found)
    assert 'rules=("h*w != 16",)' in str(found) and '--rule "h*w != 16"' in str(found)


def test_the_command_line_says_the_rule_and_takes_it(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    code, _, errors = cli("export", *WORDS, "--exact-dims", "--out", "a")
    assert code == 1
    assert "h*w != 35 must hold" in errors and "net.py:6" in errors
    assert 'rules=("h*w != 35",)' in errors and '--rule "h*w != 35"' in errors
    rule = ("--rule", "h*w != 35")
    code, _, errors = cli("export", *WORDS, "--exact-dims", *rule, "--out", "a")
    assert code == 0, errors
    code, _, errors = cli("convert", *WORDS, "--rule", "h*k != 35", "--out", "b")
    assert code == 2 and "no dim k" in errors
    code, _, errors = cli("convert", "--all", *rule)
    assert code == 2 and "--rule fits one model only" in errors


def test_python_adds_the_rule_to_tuples_and_takes_it_for_dims(tmp_path: Path) -> None:
    text, out = {"x": "1x1x{h}x{w}"}, tmp_path / "a"
    ranges = {"h": (4, 6, 16), "w": (4, 6, 16)}
    report = pipeline.convert(Net().eval(), text, ranges, out=out, quick=True)
    assert report.manifest.interface.rules == ("h*w != 35",)
    dims = {name: Dim(name, *sizes) for name, sizes in ranges.items()}
    with pytest.raises(ConstraintError, match=r'rules=\("h\*w != 35",\)'):
        pipeline.convert(Net().eval(), text, dims, out=tmp_path / "b", quick=True)
    report = pipeline.convert(
        Net().eval(), text, dims, out=tmp_path / "b", quick=True, rules=("h*w != 35",)
    )
    assert report.manifest.interface.rules == ("h*w != 35",)
