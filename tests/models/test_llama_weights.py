"""Llama's weights: a checkpoint folder of transformers, and a file of tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from llama_model import positions

from pipeline.convert.driver import run_export
from pipeline.errors import InputError
from pipeline.graph.session import run_onnx
from pipeline.machine.libraries import import_transformers
from pipeline.models.llama import llama
from pipeline.spec.config import Config
from pipeline.spec.dims import shape_texts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of other sizes in a folder of transformers, with tied embeddings, in bfloat16."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(8)
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_checkpoint_folder_is_what_runs(checkpoint: Path, tmp_path: Path) -> None:
    options = {"max_length": 32}
    config = Config("llama", out=tmp_path / "a", options=options, weights=checkpoint, quick=True)
    report = run_export(config)
    assert report.manifest.model.weights.file == checkpoint.name
    assert dict(report.manifest.model.options) == options
    shapes = report.manifest.interface.input_shapes
    assert shape_texts(shapes["past_2_key"]) == ("batch", 1, "past", 32)
    spec = llama(max_length=32, weights=checkpoint)
    feed = spec.sample({"batch": 2, "seq": 5, "past": 0}, seed=0)
    feed["attention_mask"] = np.ones_like(feed["attention_mask"])
    feed["position_ids"] = positions(feed["attention_mask"], 5)
    model = (
        import_transformers()
        .LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        .eval()
    )
    with torch.no_grad():
        want = model(torch.from_numpy(feed["input_ids"])).logits.numpy()
    got = next(run_onnx(report.path / "exported.onnx", [feed]))["logits"]
    assert got.dtype == np.float32
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-4)


def copied(checkpoint: Path, place: Path, **changes: object) -> Path:
    folder = Path(shutil.copytree(checkpoint, place / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_folder_that_holds_no_llama_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: No such file"):
        llama(weights=tmp_path)
    other = copied(checkpoint, tmp_path, model_type="gpt2")
    with pytest.raises(InputError, match="model_type is 'gpt2', not 'llama'"):
        llama(weights=other)
    (other / "config.json").write_text("{")
    with pytest.raises(InputError, match="damaged, or not JSON"):
        llama(weights=other)
    with pytest.raises(InputError, match=r"max_length=128, but .* allows 64"):
        llama(weights=checkpoint)
    with pytest.raises(InputError, match=r"layers=7: .* sets the sizes; leave layers out"):
        llama(layers=7, max_length=32, weights=checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "256"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": [3]},
        {"max_position_embeddings": None},
        {"vocab_size": -1},
        {"head_dim": 1.5},
    ],
)
def test_sizes_of_another_type_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = copied(checkpoint, tmp_path, **changes)
    with pytest.raises(InputError, match=r"weights .*config\.json: "):
        llama(max_length=32, weights=folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4}, "missing: model.layers.3"),
        ({"num_hidden_layers": 2}, "unexpected: model.layers.2"),
        ({"vocab_size": 301}, "embed_tokens"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    changes: dict[str, object],
    words: str,
) -> None:
    folder = copied(checkpoint, tmp_path, **changes)
    with pytest.raises(InputError, match=words):
        llama(max_length=32, weights=folder).build(folder)
    assert capfd.readouterr() == ("", "")  # a one-line error


def test_a_damaged_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(checkpoint, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match=rf"weights {folder}: "):
        llama(max_length=32, weights=folder).build(folder)


def test_a_weights_file_is_what_runs(tmp_path: Path) -> None:
    source = llama().build(None).state_dict()
    state = {key.removeprefix("llama."): value * 1.01 for key, value in source.items()}
    torch.save(state, tmp_path / "weights.pth")
    loaded = llama().build(tmp_path / "weights.pth").state_dict()
    assert all(torch.equal(loaded[f"llama.{key}"], value) for key, value in state.items())
