"""Notes on inputs whose random values are few."""

from __future__ import annotations

import pytest

from pipeline.compare.input_notes import input_notes
from pipeline.spec.dims import Dim
from pipeline.spec.interface import Interface
from pipeline.spec.text import parse_inputs

DIMS = {"b": Dim("b", 1, 2, 4), "t": Dim("t", 1, 8, 20)}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("m:{b}x{t}:bool:1..2", ["one-value"]),
        ("m:{b}x{t}:bool:0..0", ["one-value"]),
        ("m:{b}x{t}:bool:all", ["one-value"]),
        ("m:{b}x{t}:int64:1..2", ["one-value"]),
        ("m:{b}x{t}:bool", []),
        ("m:{b}x{t}:bool:0..1", []),
        ("m:{b}x{t}:bool:padding", []),
        ("m:{b}x{t}:int64", ["few-values"]),
        ("m:{b}x{t}:int64:1..3", []),
        ("m:{b}x{t}:int64:1..t", []),
        ("m:{b}x{t}:float32:0..1", []),
    ],
)
def test_values_that_are_few(text: str, kinds: list[str]) -> None:
    inputs = parse_inputs([text], DIMS)
    notes = input_notes(Interface(tuple(inputs.values()), ()))
    assert [note.kind for note in notes] == kinds
    assert all("m" in note.text.split() or "m:" in note.text for note in notes)
