"""What torch.export fails at, and what the text says to write in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence as pack
from torch.nn.utils.rnn import pad_packed_sequence

import pipeline
from pipeline.errors import ExportError

DIMS = {"b": (1, 2, 4), "t": (4, 8, 16)}
INPUTS = {"x": "{b}x{t}x8", "lengths": "{b}:int64:1..t"}


class Recurrent(torch.nn.Module):
    """An RNN over a padded batch, in a packed form or as the advice says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.rnn, self.how = torch.nn.GRU(8, 8, batch_first=True), how

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("pack"):
            packed = pack(x, lengths, batch_first=True, enforce_sorted=False)
            y, last = self.rnn(packed)
            return last if self.how == "packed state" else pad_packed_sequence(y, True)[0]
        y, _ = self.rnn(x)
        if self.how == "last step":
            return y[torch.arange(y.shape[0]), lengths - 1]
        return y * (torch.arange(y.shape[1]) < lengths[:, None])[..., None]


class InNumpy(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.as_tensor([x.shape[0], x.shape[1]]).numpy()
        return x * int(rows) + int(columns)


@pytest.mark.parametrize("how", ["packed", "packed state"])
def test_a_packed_sequence_is_refused_with_what_to_use(how: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        pipeline.convert(Recurrent(how).eval(), INPUTS, DIMS, out=tmp_path / "a", quick=True)
    text = str(caught.value)
    assert "test_torch_advice.py" in text and "run the RNN over the padded batch" in text
    assert "y[torch.arange(y.shape[0]), lengths - 1]" in caught.value.do and "mask" in text


@pytest.mark.parametrize("how", ["last step", "mask"])
def test_what_is_advised_converts(how: str, tmp_path: Path) -> None:
    module = Recurrent(how).eval()
    assert pipeline.convert(module, INPUTS, DIMS, out=tmp_path / "a", quick=True).ok


def test_numpy_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        pipeline.convert(InNumpy(), {"x": "{b}x{t}"}, DIMS, out=tmp_path / "a", quick=True)
    assert "InNumpy" not in caught.value.do and "in forward: rows, columns" in str(caught.value)
    assert ".tolist() in place of .numpy()" in caught.value.do
