"""Ops whose axis has 1 element, or none, at some declared sizes."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from op_exports import spec_of

from pipeline.export.export import export
from pipeline.spec.dims import Dim

CASES = {
    "any of a slice": lambda x: (x[:, 5:] > 0).any(1),
    "any of a slice, kept": lambda x: (x[:, 5:] > 0).any(1, keepdim=True),
    "any of two axes": lambda x: (x[:, 5:] > 0).any((0, 1)),
    "any of all": lambda x: (x[:, 5:] > 0).any(),
    "any of floats": lambda x: x[:, 5:].any(1),
    "any of no slice": lambda x: (x > 3).any(1),
    "all of a slice": lambda x: (x[:, 5:] > 0).all(1),
    "squeeze": lambda x: x[:, None].squeeze(1) * 2,
    "squeeze of an axis that stays": lambda x: x.squeeze(1) * 2,
    "squeeze of two axes": lambda x: x[:, None].squeeze((1, 2)) * 2,
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_at_every_size(tmp_path, name) -> None:
    function, least = CASES[name], 2 if "squeeze" in name else 1
    spec = spec_of(function, (3, Dim("n", least, 9, 20)))
    session = onnxruntime.InferenceSession(str(export(spec, None, tmp_path / "m.onnx").path))
    for size in range(least, 21):
        x = spec.sample({"n": size}, 3)["x"]
        want = function(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], want, str(size))
