"""Slices that end within a dynamic axis at some sizes, and beyond its end at others."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import onnxruntime
import pytest
import torch
from op_exports import spec_of
from torch.nn import functional

from pipeline.errors import ConstraintError, ExportError
from pipeline.export import torch_2_13
from pipeline.export.export import export
from pipeline.export.ops import exporter
from pipeline.export.torch_2_13 import slices
from pipeline.spec.dims import Dim

W, H, B = Dim("w", 2, 16, 40), Dim("h", 5, 30, 50), Dim("b", 1, 4, 16)


def differing(function, shape, path) -> list[dict[str, int]]:
    """The sizes at which the exported function differs, or does not run.

    Raises:
        ExportError: the export is refused.
    """
    done = export(spec_of(function, shape), None, path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    dims, found = done.spec.dims, []
    steps = (range(d.min, d.max + 1, max(1, 3 * (len(dims) - 1))) for d in dims.values())
    for values in product(*steps):
        sizes = dict(zip(dims, values, strict=True))
        x = done.spec.sample(sizes, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        try:
            (got,) = session.run(None, {"x": x})
        except Exception:
            found.append(sizes)
            continue
        if got.shape != want.shape or not np.allclose(got, want, 1e-5, 1e-5):
            found.append(sizes)
    return found


CASES = {
    "the first": (lambda x: x[..., :8] * 2, (3, W)),
    "the last": (lambda x: x[..., -8:] * 2, (3, W)),
    "all but the last": (lambda x: x[..., :-8] * 2, (3, H)),
    "from the third to the eighth": (lambda x: x[..., 3:8] * 2, (3, H)),
    "all but the ends": (lambda x: x[..., 3:-3] * 2, (3, W)),
    "every second but the ends": (lambda x: x[..., 3:-3:2] * 2, (3, W)),
    "up to a place before the end": (lambda x: x[..., -20:7] * 2, (3, W)),
    "every second": (lambda x: x[..., :9:2] * 2, (3, W)),
    "of all elements": (lambda x: x.reshape(-1)[:8] * 2, (3, W)),
    "of the batch": (lambda x: x[:8].flatten() * 2, (B, 3)),
    "of two axes": (lambda x: x[:, :8, :6].flatten(1) * 2, (3, W, H)),
    "of a table": (lambda x: torch.arange(30.0)[: x.shape[-1]] * x.mean(), (3, W)),
    "behind a convolution": (
        lambda x: functional.conv1d(x, torch.ones(4, 3, 2))[..., :12].transpose(1, 2).flatten(1),
        (1, 3, H),
    ),
    "divided by its size": (lambda x: x[..., :8] / x[..., :8].shape[-1], (3, W)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_slice_has_its_size_at_every_size_of_the_axis(tmp_path, monkeypatch, name) -> None:
    function, shape = CASES[name]
    assert differing(function, shape, tmp_path) == []
    pieces = tuple(p for p in torch_2_13.PIECES if p.name != "slices")
    monkeypatch.setattr(torch_2_13, "PIECES", pieces)
    monkeypatch.setattr(exporter, "_unguarded", nullcontext)
    try:
        wrong = differing(function, shape, tmp_path)
    except ExportError:
        return
    assert wrong


ENDS = {
    "sym_min": lambda x: x.reshape(-1)[: torch.sym_min(8, x.numel())] * 2,
    "sym_min of a half": lambda x: x.reshape(-1)[: torch.sym_min(x.numel() // 2, 8)] * 2,
    "min": lambda x: x.reshape(-1)[: min(8, x.numel())] * 2,
    "another size": lambda x: x[:, :, : x.shape[1]] * 2,
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_is_a_size(tmp_path, name) -> None:
    assert differing(ENDS[name], (3, W, H), tmp_path) == []


def test_a_size_that_the_rest_of_the_model_needs_is_a_rule(tmp_path) -> None:
    with pytest.raises(ConstraintError, match=r"w must be in 8\.\.40"):
        export(spec_of(lambda x: x[..., :8] + torch.arange(8.0), (3, W)), None, tmp_path / "m.onnx")


def test_where_a_condition_holds() -> None:
    where = slices._where
    assert where("s0 <= 8", (("s0", 2, 40),)) == "some"
    assert where("s0 <= 40", (("s0", 2, 40),)) == "all"
    assert where("s0 <= 1", (("s0", 2, 40),)) == "none"
    assert where("s0 <= 8*((s0 + 7)//8)", (("s0", 2, 65536),)) == "all"
    assert where("s0 <= s1", (("s0", 2, 40), ("s1", 5, 50))) == "some"
    assert where("s0 <= s0 + s1", (("s0", 2, 2000), ("s1", 2, 2000))) == "all"
    assert where("s0 <= s0 + s1", (("s0", 2, 65536), ("s1", 2, 65536))) == ""  # too many to try
    assert where("s0 <= s1", (("s0", 2, 65536), ("s1", 5, 50000))) == "some"
    assert where("s0 % 20011 >= 1", (("s0", 50000, 400000),)) == "some"
    assert where("(s0 - 3)**2 >= 1", (("s0", 2, 60000),)) == "some"  # all but 3
    many = tuple((f"s{n}", 2, 5) for n in range(20))
    assert where("s0 <= 2", many) == ""  # too many sizes


LONG = Dim("t", 50000, 60000, 400000)


def test_an_end_that_is_negative_at_a_few_of_many_sizes(tmp_path) -> None:
    def function(x):
        return x[:1] * 0 + x[: (x.shape[0] % 20011) - 1].shape[0] % 1000

    done = export(spec_of(function, (LONG,)), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in (50000, 60033, 60034, 80044, 400000):
        x = np.zeros(size, np.float32)
        assert session.run(None, {"x": x})[0] == function(torch.from_numpy(x)).numpy()


def test_of_too_many_sizes_a_slice_is_cut_at_both_ends(tmp_path) -> None:
    """The end is negative at 1 of 3000 values of h, and there are 9000000 sets of sizes."""

    def function(x):
        flat = x.flatten()
        return flat[:1] * 0 + flat[: (x.shape[0] % 2999) * x.shape[1] - 1].shape[0] % 1000

    shape = (Dim("h", 2, 4, 3001), Dim("w", 2, 4, 3001))
    done = export(spec_of(function, shape), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in ((2, 2), (2998, 2), (2999, 2), (2999, 7), (3000, 9)):
        x = np.zeros(size, np.float32)
        assert session.run(None, {"x": x})[0] == function(torch.from_numpy(x)).numpy()
