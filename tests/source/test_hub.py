"""Models of hubs, from folders in the layout of their hub; nothing is downloaded here."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import Run, refused_late

from pipeline import Config, run
from pipeline.artifact.manifest import Weights
from pipeline.convert.driver import verify
from pipeline.convert.keys import weights_info
from pipeline.convert.options import Verify
from pipeline.errors import InputError
from pipeline.machine.libraries import import_torchvision, import_transformers
from pipeline.source.find import find_source
from pipeline.spec.dims import shape_texts

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a token classifier, as `save_pretrained` writes it."""
    transformers = import_transformers()
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, num_labels=3))
    folder = tmp_path_factory.mktemp("hub") / "tiny-bert"
    model.save_pretrained(folder)
    return folder


def config_of(source: str, **options: object) -> Config:
    return Config(
        source, options=options, inputs=("input_ids:{b}x{t}:int64:0..49",), dims=("b=1:4", "t=1:32")
    )


def weights_of(folder: Path) -> Weights:
    """The part of the export's key that the folder's files decide."""
    config = config_of(f"hf:{folder}")
    return weights_info(config, find_source(config))


def test_the_model_is_the_one_that_the_folder_names(folder: Path) -> None:
    spec = find_source(config_of(f"hf:{folder}"))
    module = spec.build(None)
    assert type(module).__name__ == "BertForTokenClassification"
    assert spec.name == "tiny-bert"
    again = import_transformers().BertForTokenClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in module.state_dict().items())


def test_it_converts(folder: Path, tmp_path: Path) -> None:
    config = config_of(f"hf:{folder}", attn_implementation="eager")
    report = run(Config(**{**vars(config), "out": tmp_path / "a", "quick": True}))
    assert report.ok
    (output,) = report.manifest.interface.outputs
    weights = report.manifest.model.weights
    assert weights.file == "tiny-bert" and weights.sha256 and weights.seed is None
    assert list(shape_texts(output.shape)) == ["b", "t", 3]

    again = verify(tmp_path / "a", Verify(torch_model=True, trust=True))
    assert again.ok
    (folder / "README.md").write_text("another file")
    try:
        with pytest.raises(InputError, match="made with other weights"):
            verify(tmp_path / "a", Verify(torch_model=True, trust=True))
    finally:
        (folder / "README.md").unlink()


def test_another_file_in_the_folder_is_another_key(folder: Path) -> None:
    first = weights_of(folder)
    state = json.loads((folder / "config.json").read_text())
    try:
        (folder / "config.json").write_text(json.dumps({**state, "hidden_act": "relu"}))
        assert weights_of(folder) != first
    finally:
        (folder / "config.json").write_text(json.dumps(state))


REFUSED: dict[str, tuple[dict[str, object], list[str], list[str]]] = {
    "a head that the files lack": (
        {"architectures": ["BertForMaskedLM"]},
        [],
        ["lack weights of BertForMaskedLM: cls.", "Choose a checkpoint of this model"],
    ),
    "a head of another size": (
        {},
        ["ignore_mismatched_sizes=true", "num_labels=5"],
        ["lack weights of BertForTokenClassification: classifier."],
    ),
    "an unknown class": (
        {"architectures": ["BertForReward"]},
        [],
        ["transformers has no model BertForReward\n"],
    ),
    "no class of a model": ({"architectures": ["BertConfig"]}, [], ["has no model BertConfig"]),
    "the author's class": (
        {"architectures": ["Net"], "auto_map": {"AutoModel": "code.Net"}},
        [],
        ["no model Net. Its own code has it: pass --option trust_remote_code=true and --trust"],
    ),
    "the author's code": (
        {},
        ["trust_remote_code=true"],
        ["trust_remote_code runs code of its author. To allow it, pass --trust"],
    ),
    "a kernel": ({}, ["attn_implementation=a/b"], ["the kernel a/b runs code of its author"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(cli: Run, folder: Path, case: str) -> None:
    """No weight is random without a word, and no code of an author runs."""
    changes, options, said = REFUSED[case]
    state = json.loads((folder / "config.json").read_text())
    words = [word for option in options for word in ("--option", option)]
    dims = ["--input", "input_ids:{b}x{t}:int64:0..49", "--dim", "b=1:4", "--dim", "t=1:32"]
    try:
        (folder / "config.json").write_text(json.dumps({**state, **changes}))
        refused_late(cli("convert", f"hf:{folder}", *words, *dims), *said)
    finally:
        (folder / "config.json").write_text(json.dumps(state))


def test_a_renamed_file_is_another_key(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    first = weights_of(copy)
    assert first.sha256 == weights_of(folder).sha256
    (copy / "model.safetensors").rename(copy / "model-old.safetensors")
    assert weights_of(copy) != first


def test_timm_folder(tmp_path: Path) -> None:
    import_torchvision()
    timm = pytest.importorskip("timm", reason="timm is not a dependency of the project")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet.r160_in1k", pretrained=False)
    timm.models.save_for_hf(model, tmp_path / "net", model_config={"num_classes": 1000})
    spec = find_source(
        Config(f"timm/{tmp_path / 'net'}", inputs=("x:{b}x3x64x64",), dims=("b=1:4",))
    )
    own = model.state_dict()
    assert spec.seed is None
    with pytest.raises(InputError, match="num_classes=7 makes a last layer with random weights"):
        find_source(
            Config(
                f"timm/{tmp_path / 'net'}",
                options={"num_classes": 7},
                inputs=("x:{b}x3x64x64",),
                dims=("b=1:4",),
            )
        ).build(None)
    assert all(torch.equal(v, own[k]) for k, v in spec.build(None).state_dict().items())


def test_a_missing_library_is_named(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "timm" else find(n))
    words = ["timm/resnet18", "--input", "x:{b}x3x64x64", "--dim", "b=1:4"]
    refused_late(cli("convert", *words), "timm/resnet18: timm is not installed: pip install")


def test_a_folder_that_is_not_there_is_named(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    words = ("convert", "hf:ckpt/mini", "--input", "input_ids:{b}x{t}:int64", "--dim", "b=1:2")
    code, _, errors = cli(*words, "--dim", "t=1:8")
    assert code == 2
    assert "source hf:ckpt/mini: there is no folder ckpt/mini here, and the hub gives no" in errors
