"""clamp, fmax, fmin and sign of NaN and infinity, and bounds of another type than the tensor."""

from __future__ import annotations

import math

import pytest
import torch
from op_exports import Of, compare_op, spec_of

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.export.ops import extremes
from pipeline.export.torch_2_13 import decompose
from pipeline.spec.dims import Dim

FLOATS = {
    "both": lambda x: x.clamp(-0.3, 0.4),
    "least": lambda x: x.clamp(min=0.1),
    "most": lambda x: torch.clamp(x, max=0.1),
    "least, by its own function": lambda x: torch.clamp_min(x, 0.1),
    "most, by its own function": lambda x: torch.clamp_max(x, 0.1),
    "least above most": lambda x: x.clamp(0.5, -0.5),
    "infinite": lambda x: x.clamp(-math.inf, math.inf),
    "at least infinite": lambda x: x.clamp(min=math.inf),
    "NaN": lambda x: x.clamp(math.nan, 0.5),
    "at most NaN": lambda x: x.clamp(max=math.nan),
    "of float64": lambda x: x.double().clamp(-1e300, 0.1),
    "by tensors": lambda x: torch.clamp(x, x.flip(1) - 0.2, x.flip(0) + 0.2),
    "by one number of a tensor": lambda x: torch.clamp_min(x, x[0, 0]),
    "at most a tensor": lambda x: torch.clamp_max(x, x.flip(1)),
    "by a float of sizes": lambda x: x.clamp(max=x.shape[1] / 20),
    "fmax": lambda x: torch.fmax(x, x.flip(1)),
    "fmin": lambda x: torch.fmin(x, x.flip(1)),
    "sign": lambda x: x.sign(),
    "sign of half precision": lambda x: x.half().sign(),
}
MIXED = {
    "an integer and a float": lambda x: x.clamp(0, 0.2),
    "a float and an integer": lambda x: x.clamp(-0.2, 1),
    "a float and a size": lambda x: x.clamp(0.5, x.shape[1] - 1),
    "an integer and a float of sizes": lambda x: x.clamp(0, x.shape[1] / 20),
    "of integers": lambda x: (4 * x).long().clamp(0, 2.5),
}
INTEGERS = {
    "integers": lambda x: whole(x).clamp(-2, 5),
    "large integers": lambda x: whole(x).clamp(max=2**62 + 1),
    "least above most": lambda x: whole(x).clamp(5, 2),
    "by floats": lambda x: whole(x).clamp(-1.5, 3.7),
    "by infinity": lambda x: whole(x).int().clamp(max=math.inf),
    "by sizes": lambda x: whole(x).int().clamp(0, x.shape[1] - 1),
    "by a float tensor": lambda x: torch.clamp(whole(x), max=x),
    "fmax": lambda x: torch.fmax(whole(x), 1 - whole(x)),
    "sign": lambda x: whole(x).sign(),
    "booleans": lambda x: (x > 0).clamp(0, 1) + 1,
}


def whole(x: torch.Tensor) -> torch.Tensor:
    """Integers up to 2**62."""
    return (x.nan_to_num(0.25, 1, -1).clamp(-1, 1) * 2**31).long() * (2**31 - 1)


def compare(function, path) -> None:
    """Exports a function of a matrix, and compares it with torch at some sizes.

    Raises:
        ExportError: the export is refused.
    """
    spec = spec_of(function, (2, Dim("n", 1, 5, 12)))
    done = export(spec, None, path / "m.onnx")
    for n in range(1, 13):
        x = torch.from_numpy(spec.sample({"n": n}, 3)["x"])
        x[0, n // 2], x[1, n // 3], x[0, n // 4] = math.nan, math.inf, -math.inf
        compare_op(Of(function), done.path, [x], near=1e-7)


@pytest.mark.parametrize("name", FLOATS)
def test_floats(tmp_path, name) -> None:
    compare(FLOATS[name], tmp_path)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(tmp_path, name) -> None:
    compare(INTEGERS[name], tmp_path)


@pytest.mark.parametrize("name", MIXED)
def test_bounds_of_two_types(tmp_path, monkeypatch, name) -> None:
    compare(MIXED[name], tmp_path)
    monkeypatch.setattr(decompose, "WITH_BOUNDS", ())
    with pytest.raises(ExportError):
        compare(MIXED[name], tmp_path)


@pytest.mark.parametrize("name", ["least", "most", "NaN", "of float64", "sign"])
def test_without_it_a_value_is_wrong(tmp_path, monkeypatch, name) -> None:
    for target in extremes.TRANSLATIONS.copy():
        monkeypatch.delitem(extremes.TRANSLATIONS, target)
    with pytest.raises(AssertionError, match="Not equal"):
        compare(FLOATS[name], tmp_path)


def test_without_it_fmax_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(extremes.TRANSLATIONS, torch.ops.aten.fmax.default)
    with pytest.raises(ExportError, match=r"aten\.fmax .*no translation"):
        compare(FLOATS["fmax"], tmp_path)
