"""Polygraphy imports no torch for a source that needs none, and still knows its tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import torch
from helpers import command
from polygraphy.json import from_json, to_json
from polygraphy.util import array

from pipeline.machine.polygraphy import without_torch

NET = """<ir_version: 8, opset_import: ["" : 17]> net (float[b, 3] x) => (float[b, 3] y)
    <float[1] two = {2.0}, int64[2] kept = {0, -1}> {
    a = Reshape (x, kept)
    y = Mul (a, two) }"""


def test_an_onnx_file_is_converted_and_verified_without_torch(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(NET), tmp_path / "net.onnx")
    for words in (
        ("convert", tmp_path / "net.onnx", "--dim", "b=1:2:4", "--out", tmp_path / "a"),
        ("verify", tmp_path / "a"),
        ("verify", tmp_path / "a", "--against", tmp_path / "a"),
    ):
        child = command(*words)
        _, errors = child.communicate(timeout=100)
        assert child.returncode == 0, errors
        assert "torch was imported" not in errors


def test_a_tensor_of_torch_is_one() -> None:
    without_torch()
    tensor = torch.arange(3)
    assert array.is_torch(tensor) and not array.is_torch(np.zeros(1))
    assert torch.equal(from_json(to_json(tensor)), tensor)
