"""A model that catches the error of its own step at some sizes."""

from __future__ import annotations

import pytest
import torch
from op_exports import spec_of

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.spec.dims import Dim


def test_the_refusal_names_what_the_step_needs(tmp_path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return (x @ x.mT).reshape(-1, 7) * 2
        except RuntimeError:
            return x * 3

    words = r"needs \(\(h\*h\) % 7\) != 0; declare only such sizes"
    with pytest.raises(ExportError, match=words):
        export(spec_of(function, (Dim("h", 1, 8, 40), 4)), None, tmp_path / "m.onnx")
