"""Saved programs as sources: their inputs, dims and rules, and files that are not programs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from helpers import Run, refused
from torch.export import Dim

from pipeline.artifact.artifact import Artifact
from pipeline.errors import InputError
from pipeline.export.export import export
from pipeline.source.program.spec import program_spec
from pipeline.spec.model import ModelSpec
from pipeline.spec.text import parse_dims

AUTO = Dim.AUTO


class Of(torch.nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = torch.nn.Parameter(torch.tensor([1.5, -0.5, 2.0, 0.25]))


class One(Of):
    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Two(Of):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(x, y)


class Cached(Of):
    def forward(
        self,
        x: torch.Tensor,
        cache: Mapping[str, Any],
        keep: bool = True,
        *,
        mask: torch.Tensor | None = None,
    ) -> Any:
        past, more = cache["past"]
        joined = torch.cat([past, x], 1) * self.scale
        assert mask is not None and keep
        return {"y": joined * mask[..., None], "cache": (joined, more + 1)}


def save(
    path: Path, module: torch.nn.Module, args: tuple[Any, ...], dims: Any, **kwargs: Any
) -> torch.nn.Module:
    """Exports and saves a program. Returns the loaded program, with its guards."""
    program = torch.export.export(
        module.eval(), args, kwargs or None, dynamic_shapes=dims, strict=False
    )
    torch.export.save(program, path)
    return torch.export.load(path).module()


def spec_of(path: Path, *dims: str) -> ModelSpec:
    return program_spec(path, parse_dims(dims))


def shapes(spec: ModelSpec) -> dict[str, str]:
    return {i.name: "x".join(getattr(s, "name", str(s)) for s in i.shape) for i in spec.inputs}


def ranges(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {n: (d.min, d.max, d.multiple_of, d.offset) for n, d in spec.dims.items()}


def equal(spec: ModelSpec, path: Path, want: Callable[..., Any], *sizes: dict[str, int]) -> None:
    """Exports a spec, and compares ONNX Runtime's outputs with the loaded program's."""
    done = export(spec, None, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for each in sizes:
        feed = spec.sample(each, 1)
        assert done.spec.sizes_of({n: x.shape for n, x in feed.items()}) == each
        with torch.no_grad():
            leaves = torch.utils._pytree.tree_leaves(want(*map(torch.from_numpy, feed.values())))
        got = session.run(None, feed)
        assert len(got) == len(leaves)
        for a, b in zip(got, leaves, strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)


def test_nested_arguments_shared_dims_and_constants(tmp_path: Path) -> None:
    batch, past = Dim("batch", min=1, max=16), Dim("past", min=1, max=32)
    x, state = torch.rand(3, 5, 4), torch.rand(3, 7, 4)
    dims = {
        "x": {0: batch},
        "cache": {"past": [{0: batch, 1: past}, None]},
        "keep": None,
        "mask": {0: batch, 1: past + 5},
    }
    cache = {"past": [state, torch.tensor([1, 4])]}
    loaded = save(tmp_path / "a.pt2", Cached(None), (x, cache, True), dims, mask=torch.ones(3, 12))
    spec = spec_of(tmp_path / "a.pt2")
    assert shapes(spec) == {
        "x": "x_0x5x4",
        "cache_past_0": "x_0xcache_past_0_1x4",
        "cache_past_1": "2",
        "mask": "x_0xcache_past_0_1 + 5",
    }
    assert ranges(spec) == {"x_0": (1, 16, 1, 0), "cache_past_0_1": (1, 32, 1, 0)}
    kinds = {i.name: (i.dtype, i.low, i.high) for i in spec.inputs}
    assert kinds["cache_past_1"] == ("int64", 1, 5)  # the example's
    assert kinds["mask"] == ("float32", 0.0, 1.0)

    def want(x: Any, a: Any, b: Any, mask: Any) -> Any:
        return loaded(x, {"past": [a, b]}, True, mask=mask)

    sizes = [{"x_0": b, "cache_past_0_1": p} for b, p in ((1, 1), (2, 7), (16, 32))]
    equal(spec, tmp_path / "a.onnx", want, *sizes)
    done = export(spec, None, tmp_path / "a.onnx")
    assert [o.name for o in done.spec.outputs] == ["y", "cache_0", "cache_1"]
    for bad, words in (
        ({"mask": (1, 7)}, "size 7, expected cache_past_0_1 + 5 = 6"),
        ({"mask": (2, 6)}, "x_0=2, but x axis 0 has x_0=1"),
        ({"x": (17, 5, 4)}, "x_0=17 is outside 1..16"),
    ):
        good = {"x": (1, 5, 4), "cache_past_0": (1, 1, 4), "cache_past_1": (2,), "mask": (1, 6)}
        with pytest.raises(InputError) as caught:
            spec.sizes_of({**good, **bad})
        assert words in str(caught.value)


def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 1) + y


def test_multiples_and_offsets(tmp_path: Path) -> None:
    k = Dim("k", min=1, max=16)
    args = (torch.rand(2, 12), torch.rand(2, 24))
    loaded = save(tmp_path / "a.pt2", Two(halves), args, ({1: 4 * k}, {1: 8 * k}))
    spec = spec_of(tmp_path / "a.pt2")
    assert shapes(spec) == {"x": "2xx_1", "y": "2x2*x_1"}
    assert ranges(spec) == {"x_1": (4, 64, 4, 0)}
    equal(spec, tmp_path / "a.onnx", loaded, {"x_1": 4}, {"x_1": 12}, {"x_1": 64})
    assert ranges(spec_of(tmp_path / "a.pt2", "x_1=:32")) == {"x_1": (4, 32, 4, 0)}
    odd = save(
        tmp_path / "b.pt2",
        One(lambda x: (x[:, 1::2] + x[:, :-1:2], x[:, ::2])),
        (torch.rand(2, 9),),
        ({1: 2 * k + 1},),
    )
    with pytest.raises(AssertionError, match="Guard failed"):
        odd(torch.rand(2, 3))  # torch allows the declaration, but refuses the size
    with pytest.raises(InputError) as caught:
        spec_of(tmp_path / "b.pt2")
    assert "b.pt2: accepts less than 3..33 of x_1" in str(caught.value)
    assert str(caught.value).endswith("--dim x_1=5:9:33/2+1")
    spec = spec_of(tmp_path / "b.pt2", "x_1=5:9:33/2+1")
    assert ranges(spec) == {"x_1": (5, 33, 2, 1)}
    equal(spec, tmp_path / "b.onnx", odd, {"x_1": 5}, {"x_1": 17}, {"x_1": 33})


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[1] + y.shape[1] <= 20)
    return torch.cat([x, y], 1) * 2


def test_what_torch_keeps_of_sizes_together_is_a_rule(tmp_path: Path) -> None:
    """Without the rule, the graph accepts sizes that the program refuses."""
    args = (torch.rand(2, 3), torch.rand(2, 4))
    loaded = save(tmp_path / "a.pt2", Two(joined), args, ({1: AUTO}, {1: AUTO}))
    wrong = torch.rand(2, 15), torch.rand(2, 6)
    with pytest.raises(AssertionError, match="<= 20"):
        loaded(*wrong)
    spec = spec_of(tmp_path / "a.pt2")  # torch finds the ends
    assert spec.rules in (("x_1 + y_1 <= 20",), ("y_1 + x_1 <= 20",))
    equal(spec, tmp_path / "a.onnx", loaded, {"x_1": 2, "y_1": 18}, {"x_1": 9, "y_1": 11})
    with pytest.raises(InputError, match="<= 20 does not hold at x_1=15,y_1=6"):
        spec.sizes_of({"x": wrong[0].shape, "y": wrong[1].shape})


def test_a_rule_is_kept_at_every_size_that_is_compared(cli: Run, tmp_path: Path) -> None:
    args = (torch.rand(2, 3), torch.rand(2, 4))
    save(tmp_path / "a.pt2", Two(joined), args, ({1: AUTO}, {1: AUTO}))
    code, _, errors = cli("convert", "a.pt2", "--out", "a")
    assert code == 0, errors
    manifest = Artifact.open(tmp_path / "a").manifest
    assert manifest.interface.rules in (("x_1 + y_1 <= 20",), ("y_1 + x_1 <= 20",))
    assert manifest.comparison is not None and manifest.comparison.passed
    compared = [tuple(p.sizes.values()) for p in manifest.comparison.points if p.compared]
    assert len(compared) > 4
    assert all(sum(sizes) <= 20 for sizes in compared)
    assert any(sum(sizes) == 20 for sizes in compared)


def branch(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], -1, 4).sum(2) + (1 if x.shape[0] > 5 else 0)


def test_what_torch_keeps_of_one_size_narrows_its_dim(cli: Run, tmp_path: Path) -> None:
    loaded = save(tmp_path / "a.pt2", One(branch), (torch.rand(7, 12),), ({0: AUTO, 1: AUTO},))
    with pytest.raises((AssertionError, RuntimeError)):
        loaded(torch.rand(5, 12))
    refused(
        cli("convert", "a.pt2"),
        "a.pt2: dims without a largest size (x_0 is x axis 0; x_1 is x axis 1). "
        "Pass --dim x_0=6:8:MAX --dim x_1=2:8:MAX",
    )
    refused(
        cli("convert", "a.pt2", "--dim", "x_0=1:8:9", "--dim", "x_1=:64"),
        "--dim x_0: 1..9 is more than the program was exported for: 6 and more",
    )
    refused(cli("convert", "a.pt2", "--dim", "x_0=6:8:9", "--dim", "x_1=3:8:64"), "--dim x_1=")
    spec = spec_of(tmp_path / "a.pt2", "x_0=6:8:9", "x_1=8:16:64/4")
    equal(spec, tmp_path / "a.onnx", loaded, {"x_0": 6, "x_1": 8}, {"x_0": 9, "x_1": 64})


def test_ranges_given_stay_inside_of_the_programs(cli: Run, tmp_path: Path) -> None:
    save(tmp_path / "a.pt2", One(torch.relu), (torch.rand(3, 4),), ({0: Dim("n", min=3, max=9)},))
    assert ranges(spec_of(tmp_path / "a.pt2", "x_0=4:5:6")) == {"x_0": (4, 6, 1, 0)}
    for dim, words in (
        ("x_0=3:4:10", "--dim x_0: 3..10 is more than the program was exported for: 3..9"),
        ("x_0=2:4:9", "--dim x_0: 2..9 is more than the program was exported for: 3..9"),
        ("n=3:4:9", "a.pt2: no dim n; its dims: x_0 is x axis 0, 3..9"),
    ):
        refused(cli("convert", "a.pt2", "--dim", dim), words)
    refused(cli("convert", "a.pt2", "--input", "x:1x4"), "has its own inputs")
    refused(cli("convert", "a.pt2", "--weights", "w.pth"), "a.pt2: has its own weights")


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[:, :1].add_(1)
        return x + self.calls


class Times(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n


def test_programs_that_no_engine_can_stand_for(cli: Run, tmp_path: Path) -> None:
    x = torch.rand(4, 3)
    dropout = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    norm = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    wide = Dim.DYNAMIC
    for module, args, dims, words in (
        (dropout, (x,), None, "exported in training mode (dropout"),
        (norm, (x,), None, "exported in training mode (batch_norm"),
        (Counts(), (x,), None, "changes its buffer calls in every call"),
        (Times(), (x, 3), {"x": None, "n": wide}, "input n is an integer that varies"),
        (One(torch.relu), (x.bfloat16(),), None, "input x is bfloat16"),
        (One(torch.relu), (x.to(torch.complex64),), None, "input x is complex64"),
    ):
        program = torch.export.export(module, args, dynamic_shapes=dims, strict=False)
        torch.export.save(program, tmp_path / "a.pt2")
        refused(cli("convert", "a.pt2"), "a.pt2: ", words)


def test_constants_of_the_example_stay_what_they_were(tmp_path: Path) -> None:
    n = Dim("n", min=1, max=8)
    loaded = save(tmp_path / "a.pt2", Times(), (torch.rand(3, 4), 5), {"x": {0: n}, "n": None})
    spec = spec_of(tmp_path / "a.pt2")
    assert shapes(spec) == {"x": "x_0x4"}
    equal(spec, tmp_path / "a.onnx", lambda x: loaded(x, 5), {"x_0": 1}, {"x_0": 8})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "a.pt2"
    batch = Dim("batch", min=1, max=16)
    save(path, torch.nn.Linear(8, 4), (torch.rand(3, 8),), ({0: batch},))
    return path


def edited(whole: Path, path: Path, part: str, edit: Callable[[bytes], bytes | None]) -> None:
    """A copy of an archive with one file changed or removed. Its checksums are right."""
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content: bytes | None = old.read(name)
            if name.endswith(part):
                content = edit(old.read(name))
            if content is not None:
                new.writestr(name, content)


def newer(content: bytes) -> bytes:
    model = json.loads(content)
    model["schema_version"]["major"] += 1
    model["torch_version"] = "9.9.0"
    return json.dumps(model).encode()


EDITS: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "another torch's": ("model.json", newer, "schema version"),
    "an unknown op": (
        "model.json",
        lambda c: c.replace(b"torch.ops.aten.linear.default", b"torch.ops.mine.op.default"),
        "torch.ops.mine.op.default",
    ),
    "no weights": ("weight_0", lambda _: None, "can't load it"),
    "no program": ("model.json", lambda _: None, "a zip archive without a program"),
    "half a program": ("model.json", lambda c: c[: len(c) // 2], "damaged or truncated"),
    "an empty program": ("model.json", lambda _: b"{}", "can't load it"),
    "a list": ("model.json", lambda _: b"[]", "damaged or truncated"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_damaged_programs(cli: Run, tmp_path: Path, whole: Path, edit: str) -> None:
    part, change, words = EDITS[edit]
    edited(whole, tmp_path / "a.pt2", part, change)
    refused(cli("convert", "a.pt2"), "a.pt2: ", words)
    if edit == "another torch's":
        refused(cli("convert", "a.pt2"), "it was saved by torch 9.9.0")


def test_truncated_and_flipped_files(cli: Run, tmp_path: Path, whole: Path) -> None:
    content = whole.read_bytes()
    path = tmp_path / "a.pt2"
    for cut in (0, 1, 2, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        refused(cli("convert", "a.pt2"), "a.pt2: ")
    with zipfile.ZipFile(whole) as archive:
        weight = next(n for n in archive.namelist() if n.endswith("weight_0"))
        place = content.index(archive.read(weight))
    flipped = bytearray(content)
    flipped[place + 5] ^= 0x40
    path.write_bytes(flipped)
    assert torch.export.load(path) is not None  # torch does not check this
    refused(cli("convert", "a.pt2"), "a.pt2: damaged: ", "weight_0 has a wrong checksum")


def test_files_of_other_kinds(cli: Run, tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    path = tmp_path / "a.pt2"
    torch.save(layer.state_dict(), path)
    refused(cli("convert", "a.pt2"), "a.pt2: written by torch.save", "--weights")
    torch.save(layer, path)
    refused(cli("convert", "a.pt2"), "a.pt2: written by torch.save")
    torch.jit.save(torch.jit.script(layer), path)
    refused(cli("convert", "a.pt2"), "a.pt2: a TorchScript file")
    path.write_bytes(b"no zip archive at all")
    refused(cli("convert", "a.pt2"), "a.pt2: not a .pt2 file")
    refused(cli("convert", "none.pt2"), "none.pt2: no such file")
    (tmp_path / "dir.pt2").mkdir()
    refused(cli("convert", "dir.pt2"), "dir.pt2: a folder")
