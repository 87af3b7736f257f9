"""A branch on data is refused even if the model catches torch's error; other errors are its own."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec

T = Dim("t", 2, 7, 20)


class Of(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, m):
        return self.function(x, m)


def exported(function, folder):
    inputs = (Input("x", (T, 8)), Input("m", (T,), dtype="bool"))
    spec = ModelSpec("branch", lambda _: Of(function).eval(), inputs)
    return export(spec, None, folder / "m.onnx")


def scaled(x, m):
    try:
        if x.abs().max() > 1:
            x = x / x.abs().max()
    except Exception:
        pass
    return x * 2 + m[:, None]


def skipped(x, m):
    try:
        skip = bool(m.all())
    except Exception:
        skip = True
    return x if skip else x * m[:, None]


def suppressed(x, m):
    with contextlib.suppress(Exception):
        x = x[: int(m.sum())].sum(0)[None] + x
    with contextlib.suppress(Exception):
        x = x * (2 if m.any() else 1)
    return x


def helped(x, m):
    def largest():
        return 2 if x.max() > 1 else 3

    try:
        return x * largest() + m[:, None]
    except RuntimeError:
        return x + m[:, None]


@pytest.mark.parametrize("function", [scaled, skipped, suppressed, helped])
def test_a_caught_branch_is_refused(function, tmp_path) -> None:
    with pytest.raises(ExportError, match="data-dependent expression") as found:
        exported(function, tmp_path)
    assert "test_swallowed.py" in found.value.line
    assert found.value.do.startswith("do not choose a branch by a tensor's values")


def other_errors(x, m):
    """Errors that have nothing to do with values."""
    with contextlib.suppress(RuntimeError):
        x = x @ x.new_zeros(5, 5)
    try:
        x = x.no_such_method()
    except AttributeError:
        x = x + 1
    return x * m[:, None]


def of_torch(x, m):
    """torch itself asks about values, and goes on."""
    return torch.where(m[:, None], x, 0).sum(0), torch.cond(m.any(), torch.sin, torch.cos, (x,))


def chosen(x, m):
    return x[m].sum(0)


@pytest.mark.parametrize("function", [other_errors, of_torch, chosen])
def test_other_models_are_not_refused(function, tmp_path) -> None:
    assert exported(function, tmp_path).path.exists()
