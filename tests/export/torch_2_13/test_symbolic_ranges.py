"""logspace, windows and the indices of triangles of a symbolic size."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from op_exports import spec_of

from pipeline.errors import ConstraintError, ExportError
from pipeline.export.export import export
from pipeline.export.torch_2_13 import symbolic_steps
from pipeline.export.torch_2_13.symbolic_ranges import triangle
from pipeline.spec.dims import Dim

CASES = {
    "linspace, integers": lambda x, n: x * torch.linspace(0, 10.7, n, dtype=torch.int64),
    "linspace, int32": lambda x, n: (
        torch.linspace(4, 0, steps=n + 1, dtype=torch.int32).float()[:-1] * x
    ),
    "logspace": lambda x, n: x * torch.logspace(-1, 1, n),
    "logspace of 2": lambda x, n: x * torch.logspace(start=0.5, end=-3, steps=n, base=2.0),
    "hann": lambda x, n: x * torch.hann_window(n),
    "hann, symmetric": lambda x, n: x * torch.hann_window(n, periodic=False),
    "hamming": lambda x, n: x * torch.hamming_window(n),
    "hamming, other weights": lambda x, n: x * torch.hamming_window(n, False, 0.6, beta=0.3),
    "blackman": lambda x, n: x * torch.blackman_window(n),
    "blackman, symmetric": lambda x, n: x * torch.blackman_window(n, False),
    "bartlett": lambda x, n: x * torch.bartlett_window(window_length=n),
    "bartlett, symmetric": lambda x, n: x * torch.bartlett_window(n, False, dtype=torch.float32),
    "tril_indices": lambda x, n: pairs(x, torch.tril_indices(n, n)),
    "tril_indices, below": lambda x, n: pairs(x, torch.tril_indices(n, col=n, offset=-1)),
    "tril_indices, wide": lambda x, n: pairs(x, torch.tril_indices(n - 2, n, -3)),
    "triu_indices": lambda x, n: pairs(x, torch.triu_indices(n, n)),
    "triu_indices, above": lambda x, n: pairs(x, torch.triu_indices(row=n, col=n, offset=2)),
    "triu_indices, tall": lambda x, n: pairs(x, torch.triu_indices(n, n - 2)),
    "vander": lambda x, n: torch.vander(x[0], n),
    "vander, increasing": lambda x, n: torch.vander(x[0], N=n // 2 + 1, increasing=True),
    "vander of its length": lambda x, _: torch.vander(x[0]),
}


def pairs(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    i, j = indices
    return 2 * x[:, i] + x[:, j]


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_at_every_size(tmp_path, monkeypatch, name) -> None:
    def function(x):
        return CASES[name](x, x.shape[1])

    least = 3 if name.split(", ")[-1] in ("wide", "tall") else 1
    spec = spec_of(function, (2, Dim("n", least, 9, 40)))
    done = export(spec, None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in range(least, 41):
        x = spec.sample({"n": size}, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        got = session.run(None, {"x": x})[0]
        assert got.shape == want.shape and got.dtype == want.dtype, size
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=str(size))

    monkeypatch.setattr(symbolic_steps, "_OTHERS", {})
    with pytest.raises((ConstraintError, ExportError)):
        export(spec, None, tmp_path / "n.onnx")


def test_the_rows_of_a_large_triangle_are_exact() -> None:
    """The float root may be one row off."""
    n = 3000
    torch.testing.assert_close(triangle(n), torch.tril_indices(n, n), rtol=0, atol=0)


INSTEAD = (
    lambda x: x * torch.div(100 * torch.arange(x.shape[1]), x.shape[1] - 1, rounding_mode="trunc"),
    lambda x: x * torch.linspace(0, 100, x.shape[1], dtype=torch.int64),
)


def test_linspace_of_integers_at_which_float64_rounds(tmp_path) -> None:
    """At 23 steps of 100/22, torch gives 49 for the 11th, which is 50."""
    instead, ours = INSTEAD
    with pytest.raises(ExportError, match=r"1 off at 23 steps: for n steps, write torch.div\("):
        export(spec_of(ours, (2, Dim("n", 2, 9, 40))), None, tmp_path / "m.onnx")
    export(spec_of(ours, (2, Dim("n", 2, 9, 22))), None, tmp_path / "m.onnx")
    export(spec_of(instead, (2, Dim("n", 2, 9, 40))), None, tmp_path / "n.onnx")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_linspace_of_a_dtype_is_torchs(tmp_path, dtype) -> None:
    """torch rounds the step to the dtype: 2/3 is 0.6665 in float16."""

    def function(x):
        return torch.linspace(-1, 1.1, x.shape[1], dtype=dtype).float()

    done = export(spec_of(function, (2, Dim("n", 1, 9, 40))), None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    for size in range(1, 41):
        x = np.zeros((2, size), np.float32)
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-6, atol=1e-7)


REFUSED = {
    "needs numbers for start and end": lambda x: torch.linspace(
        0, x.shape[1], x.shape[1], dtype=torch.int64
    ),
    "pass the window to the model as an input": lambda x: x * torch.kaiser_window(x.shape[1]),
    "write torch.ones(n, n).tril(offset) as a mask": lambda x: pairs(
        x, torch.tril_indices(x.shape[1], x.shape[1], 2)
    ),
    "compute the whole axis at once": lambda x: sum(x[:, i] * i for i in range(len(x.mT))),
    "at n=1 the ONNX file gives size 2, and torch's formula n gives 1.": lambda x: x.mT.squeeze(),
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_advice_fits_the_line(tmp_path, words) -> None:
    with pytest.raises((ConstraintError, ExportError)) as caught:
        export(spec_of(REFUSED[words], (2, Dim("n", 1, 9, 40))), None, tmp_path / "m.onnx")
    assert words in str(caught.value)


def test_what_the_advice_says_converts(tmp_path) -> None:
    def masked(x):
        return x @ torch.ones(x.shape[1], x.shape[1]).tril(2)

    export(spec_of(masked, (2, Dim("n", 1, 9, 40))), None, tmp_path / "m.onnx")
    squeezed = spec_of(lambda x: x.mT.squeeze(), (2, Dim("n", 2, 19, 40)))
    export(squeezed, None, tmp_path / "n.onnx")
