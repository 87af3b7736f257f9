"""Files and objects with the user's values, and how they are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import InputError
from pipeline.source.find import find_source
from pipeline.source.values import with_values
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec

B, T = Dim("b", 1, 2, 8), Dim("t", 1, 8, 64)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
N = np.array([3, 1])


def spec() -> ModelSpec:
    return ModelSpec("m", lambda _: torch.nn.Identity(), (Input("x", (B, T)), lengths()))


def lengths() -> Input:
    return Input("lengths", (B,), "int64", 1, 5)


def arrays(found: ModelSpec) -> dict[str, Any]:
    return {i.name: None if i.values is None else i.values.array.tolist() for i in found.inputs}


def test_each_form_of_values(tmp_path: Path) -> None:
    np.savez(tmp_path / "named.npz", lengths=N, x=X)
    np.savez(tmp_path / "plain.npz", X, N)
    tensors = torch.from_numpy(X).requires_grad_(), torch.from_numpy(N)
    torch.save({"lengths": tensors[1], "x": tensors[0]}, tmp_path / "named.pt")
    torch.save(tensors, tmp_path / "plain.pt")
    files = [tmp_path / name for name in ("named.npz", "plain.npz", "named.pt", "plain.pt")]
    for given in (*files, {"x": X, "lengths": N}, tensors):
        assert arrays(with_values(spec(), given)) == {"x": X.tolist(), "lengths": [3, 1]}


def test_inputs_that_are_left_out_stay_random() -> None:
    assert arrays(with_values(spec(), {"lengths": N})) == {"x": None, "lengths": [3, 1]}


def test_names_of_nested_values() -> None:
    nested = ModelSpec(
        "m", lambda _: torch.nn.Identity(), {"past": ((Input(shape=(B,)), Input(shape=(B,))),)}
    )
    a, b = np.zeros(2, "f"), np.ones(2, "f")
    for given in ({"past": [(a, b)]}, {"past[0][0]": a, "past[0][1]": b}, {"past_0_1": b}):
        found = arrays(with_values(nested, given))
        assert found["past_0_1"] == [1, 1]


def test_through_a_config_and_into_its_spec(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=X)
    assert arrays(find_source(Config(spec(), values=tmp_path / "s.npz")))["x"] == X.tolist()


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("it-ran"),)


def test_code_in_a_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Evil()}, "a.pt")
    np.savez("a.npz", x=np.array([Evil()], dtype=object), allow_pickle=True)
    for name in ("a.pt", "a.npz"):
        with pytest.raises(InputError, match=f"inputs {name}: damaged, or not a"):
            with_values(spec(), name)
    assert not Path("it-ran").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"y": X}, "the model has no input 'y'. Its inputs: x, lengths"),
        ({"x": X.astype("float64")}, "x is float32, but its values are float64"),
        ({"x": X[0]}, "x has 2 axes, but its values have 1"),
        ({"x": np.zeros((9, 2), "f")}, "x axis 0: b=9 is outside"),
        ({"x": X, "lengths": N[:1]}, "lengths axis 0: b=1, but x axis 0 has b=2"),
        ({"x": np.full((2, 2), np.nan, "f")}, "x contains NaN"),
        ({"x": 3}, "int is neither a tensor nor an array"),
        ((X,), "has 1 values without names, but the model has 2 inputs (x, lengths)"),
        ({"x": torch.zeros(2, 2, dtype=torch.bfloat16)}, "torch.bfloat16 can't become an array"),
    ],
)
def test_values_that_do_not_fit(given: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        with_values(spec(), given)
    assert words in str(caught.value) and str(caught.value).startswith("inputs: ")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 no archive")
    (tmp_path / "bad.pt").write_bytes(b"no archive")
    (tmp_path / "a.txt").write_text("1")
    for name, words in {
        "missing.npz": "no such file",
        "bad.npz": "damaged, or not a .npz file that holds only arrays",
        "bad.pt": "damaged, or not a torch file",
        "a.txt": "unknown kind. Use .npz or .pt",
    }.items():
        with pytest.raises(InputError, match=words):
            with_values(spec(), tmp_path / name)
    with pytest.raises(InputError, match=r"no such file\. For a shape .* use --input$"):
        with_values(spec(), "x:1x3x{h}x{w}")


def test_rules_on_sizes_hold_for_the_values() -> None:
    limited = dataclasses.replace(spec(), rules=("b*t <= 5",))
    with pytest.raises(InputError, match=r"b\*t <= 5 does not hold"):
        with_values(limited, {"x": X})


def test_a_seed_is_refused() -> None:
    with pytest.raises(InputError, match="seed 3: works only with random inputs"):
        Config("raft", values="a.npz", seed=3)


def test_a_source_needs_torch_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.source.find.importlib.util.find_spec", lambda _: None)
    for source in ("raft", "net.py:net", "hf:a/b", str(tmp_path / "d.pt2")):
        with pytest.raises(InputError, match=r"it needs torch, .* pip install '\.\[export\]'"):
            find_source(Config(source))
    with pytest.raises(InputError, match="no such file"):
        find_source(Config(str(tmp_path / "a.onnx")))
