"""Weights files: what is read, what is refused, and that their code does not run."""

from __future__ import annotations

import contextlib
import os
import pickle

import pytest
import tiny
import torch
from safetensors.torch import save_file

from pipeline.compare.run_names import TORCH
from pipeline.compare.runners import TorchRunner
from pipeline.compare.verdict import judge
from pipeline.convert.driver import run_export
from pipeline.errors import InputError
from pipeline.export.export import reference
from pipeline.graph.session import run_onnx
from pipeline.spec.config import Config
from pipeline.spec.runner import run_once
from pipeline.spec.weights import load_weights, read_state_dict, whole_object


def net(seed: int, out: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, out, 3), torch.nn.BatchNorm2d(out))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


WRAPPERS = {
    "plain": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "model": lambda s: {"model": s, "optimizer": {"lr": 0.1}},
    "model_state_dict": lambda s: {"model_state_dict": s},
    "parallel": lambda s: {f"module.{k}": v for k, v in s.items()},
    "both": lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
    "no counters": lambda s: {k: v for k, v in s.items() if not k.endswith("batches_tracked")},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_torch_files(tmp_path, wrapper, suffix) -> None:
    source, target = net(1), net(2)
    path = tmp_path / f"w{suffix}"
    torch.save(WRAPPERS[wrapper](source.state_dict()), path)
    assert not same(source, target)
    load_weights(target, path)
    assert same(source, target)


def test_old_torch_format_and_safetensors(tmp_path) -> None:
    source = net(1)
    torch.save(source.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    for name in ("old.pth", "w.safetensors"):
        target = net(2)
        load_weights(target, tmp_path / name)
        assert same(source, target)


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_is_what_is_exported(tmp_path, suffix) -> None:
    spec, shapes = tiny.conv(), {"y": (1, 4, "h", "w")}
    other = spec.build(None)
    state = {key: value * 1.01 for key, value in other.state_dict().items()}
    other.load_state_dict(state)
    path = tmp_path / f"w{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    report = run_export(Config("tiny", out=tmp_path / "a", weights=path))
    assert report.manifest.model.weights.file == path.name
    feed = spec.sample({"h": 17, "w": 23}, seed=0)
    got = next(run_onnx(report.path / "exported.onnx", [feed]))
    results = [
        judge(TORCH, "onnx", run_once(TorchRunner(module, ["y"]), feed), got, spec.tolerance)
        for module in (reference(spec, net, shapes) for net in (other, spec.build(None)))
    ]
    ((same,), (different,)) = results
    assert same.passed and not different.passed


def test_another_models_weights_are_named_and_nothing_is_loaded(tmp_path) -> None:
    state = net(1).state_dict()
    del state["0.bias"]
    state["2.weight"] = torch.zeros(2)
    state["1.weight"] = torch.zeros(5)
    torch.save(state, tmp_path / "w.pth")
    target, before = net(2), net(2)
    with pytest.raises(InputError) as caught:
        load_weights(target, tmp_path / "w.pth")
    text = str(caught.value)
    assert "1 missing keys: 0.bias" in text
    assert "1 unexpected keys: 2.weight" in text
    assert "1 keys with another shape: 1.weight (5,) instead of (4,)" in text
    assert "\n" not in text
    assert same(target, before)
    torch.save({f"x{i}": torch.zeros(1) for i in range(50)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"50 unexpected keys: x0, x1, x2, x3, x4, \.\.\."):
        load_weights(target, tmp_path / "w.pth")


def test_damaged_files(tmp_path) -> None:
    torch.save(net(1).state_dict(), tmp_path / "good.pth")
    torch.save(net(1).state_dict(), tmp_path / "good_old.pth", _use_new_zipfile_serialization=False)
    save_file(net(1).state_dict(), tmp_path / "good.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in ("good.pth", "good_old.pth", "good.safetensors"):
        whole = (tmp_path / name).read_bytes()
        path = tmp_path / f"bad{(tmp_path / name).suffix}"
        cuts = {0, 1, 2, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}
        for cut in cuts:
            path.write_bytes(whole[:cut])
            with pytest.raises(InputError, match="bad"):
                load_weights(net(2), path)
        for size in (1, 10, 500):
            for _ in range(20):
                noise = torch.randint(0, 256, (size,), generator=generator).tolist()
                path.write_bytes(bytes(noise))
                with pytest.raises(InputError, match="bad"):
                    load_weights(net(2), path)
        for _ in range(60):  # some flipped bytes: the file is read as it is, or refused
            at = int(torch.randint(0, min(len(whole), 400), (1,), generator=generator))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
            with contextlib.suppress(InputError):
                load_weights(net(2), path)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_code_in_a_file_is_not_run(tmp_path, monkeypatch) -> None:
    trace = tmp_path / "executed"
    monkeypatch.setenv("EVIL", str(trace))
    (tmp_path / "a.pth").write_bytes(pickle.dumps(Evil()))
    torch.save({"0.weight": Evil()}, tmp_path / "b.pth")
    torch.save({"0.weight": Evil()}, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    torch.save(net(1), tmp_path / "d.pth")  # a whole module needs its class
    for name in "abcd":
        with pytest.raises(
            InputError, match=rf"{name}\.pth: (damaged, or not a torch file|holds a whole torch)"
        ):
            load_weights(net(2), tmp_path / f"{name}.pth")
        assert not trace.exists()
    pickle.loads((tmp_path / "a.pth").read_bytes())
    assert trace.exists()  # the file would have made it


def test_files_that_are_no_weights(tmp_path) -> None:
    with pytest.raises(InputError, match=r"none\.pth: no such file"):
        load_weights(net(1), tmp_path / "none.pth")
    (tmp_path / "dir.pth").mkdir()
    with pytest.raises(InputError, match=r"dir\.pth: a folder"):
        load_weights(net(1), tmp_path / "dir.pth")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(InputError, match=r"unknown kind; use \.pth, \.pt or \.safetensors"):
        load_weights(net(1), tmp_path / "w.onnx")
    for content in (
        [1, 2],
        torch.zeros(3),
        {"a": 1},
        {1: torch.zeros(1)},
        {"state_dict": {"a": 3}},
    ):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(InputError, match="not a state dict"):
            read_state_dict(tmp_path / "w.pth")
    torch.save({}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="missing keys"):
        load_weights(net(1), tmp_path / "w.pth")


def test_a_whole_module_is_named_with_what_to_do(tmp_path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(net(1), path)
    with pytest.raises(InputError) as caught:
        load_weights(net(1), path)
    text = str(caught.value)
    assert f"holds a whole torch.nn.modules.{type(net(1)).__module__.split('.')[-1]}" in text
    assert ".state_dict()" in text and "only if you trust" in text
    for plain in (net(1).state_dict(), dict(net(1).state_dict()), torch.ones(2), [1]):
        torch.save(plain, path)
        assert whole_object(path) == ""
    path.write_bytes(b"PK")
    assert whole_object(path) == ""


def test_one_flipped_byte_in_a_tensor_is_noticed(tmp_path) -> None:
    """torch.load accepts it, because it does not check the file's checksums."""
    path = tmp_path / "w.pth"
    torch.save({"weight": torch.zeros(4, 4)}, path)
    content = bytearray(path.read_bytes())
    place = content.index(bytes(64))  # the 64 zero bytes of the tensor
    content[place + 3] ^= 0x40
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["weight"].abs().max() > 0
    with pytest.raises(InputError, match="damaged"):
        read_state_dict(path)
