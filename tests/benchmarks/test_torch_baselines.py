"""The torch baselines of engines, on the CPU. Their times need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.artifact.artifact import Artifact
from pipeline.commands.bench.measure import input_sets
from pipeline.export.module import made
from pipeline.export.padding import PaddedModule
from pipeline.source.zoo import find_spec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "engines"
sys.path.append(str(BENCHMARKS))

import children  # noqa: E402
import raft_in_pieces  # noqa: E402
import torch_module  # noqa: E402


def baseline(*words: object) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "torch_baselines.py"), *map(str, words)]
    command += ["--device", "cpu", "--repeat", "2", "--seconds", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=children.other_python([])
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_torch_runs_every_size_and_is_its_own_reference(tmp_path: Path) -> None:
    found = baseline(
        "unet_sr", "--option", "channels=4", "--shape", "batch=1,h=200,w=201", "--shape",
        "batch=2,h=200,w=200", "--variant", "eager-fp32", "--variant", "eager-fp16",
        "--reference", tmp_path,
    )  # fmt: skip
    assert [(r["runner"], r["sizes"]["batch"]) for r in found] == [
        ("torch eager-fp32", 1), ("torch eager-fp32", 2),
        ("torch eager-fp16", 1), ("torch eager-fp16", 2),
    ]  # fmt: skip
    assert [r["error"] for r in found[:2]] == [0, 0]
    assert all(1e-4 < r["error"] < 0.1 for r in found[2:])
    assert all(r["median_ms"] > 0 and r["options"] == ["channels=4"] for r in found)


def test_a_model_of_ones_own_has_the_inputs_of_its_artifact(artifact: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n\nclass Twice(torch.nn.Module):\n    def forward(self, x):\n"
        "        return 2 * x\n\ndef net():\n    return Twice()\n"
    )
    (found,) = baseline(
        "own", "--module", f"{own}:net", "--artifact", artifact, "--shape", "h=21,w=30",
        "--variant", "eager-fp32", "--reference", tmp_path,
    )  # fmt: skip
    assert (found["model"], found["sizes"]) == ("own", {"h": 21, "w": 30})
    (stored,) = tmp_path.glob("*.npz")
    (result,) = np.load(stored).values()
    inputs = Artifact.open(artifact).manifest.interface.inputs
    (given,) = input_sets(inputs, {"h": 21, "w": 30})[0].values()
    np.testing.assert_array_equal(result, 2 * given)


def test_pure_half_has_no_autocast(tmp_path: Path) -> None:
    words = ("linear", "--shape", "batch=2", "--reference", tmp_path)
    variants = ("eager-fp32", "eager-fp16", "half-eager-fp16")
    found = baseline(*words, *(word for name in variants for word in ("--variant", name)))
    assert [r["runner"] for r in found] == [f"torch {name}" for name in variants]
    assert [r["precision"] for r in found] == ["fp32", "fp16", "fp16"]
    assert all(1e-4 < r["error"] < 0.1 for r in found[1:])


def test_a_variant_that_is_not_done_in_time_says_so() -> None:
    words = ("linear", "--shape", "batch=1", "--shape", "batch=2", "--time-limit", "0.2")
    found = baseline(*words, "--variant", "eager-fp32")
    assert [r["why"] for r in found] == ["not done in 0.2 s", "not reached: not done in 0.2 s"]


def test_the_padded_model_is_what_is_exported() -> None:
    spec = find_spec("raft_small", {"updates": 1})
    spec, inner = made(spec, None)
    reference = PaddedModule(inner, spec, [o.shape or () for o in spec.outputs])
    module = torch_module.module_of(spec, None)
    for sizes in ({"h": 136, "w": 137}, {"h": 141, "w": 136}):
        inputs = [torch.from_numpy(i.sample(sizes, 0)) for i in spec.inputs]
        with torch.no_grad():
            (want,), (got,) = reference(*inputs), module(*inputs)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_weights_stored_in_half_are_those_that_autocast_makes() -> None:
    spec = find_spec("unet_sr", {"channels": 4})
    module = torch_module.module_of(spec, None)
    (one,) = [torch.from_numpy(i.sample({"batch": 1, "h": 136, "w": 144}, 0)) for i in spec.inputs]

    def run() -> tuple[torch.Tensor, int]:
        profiled = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), profiled as seen:
            (result,) = torch_module.flat(module(one))
        return result, sum(e.count for e in seen.key_averages() if e.key == "aten::_to_copy")

    want, before = run()
    torch_module.store_half(module, torch.bfloat16)
    got, after = run()
    weights = [p for p in module.parameters() if p.dtype == torch.bfloat16]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert 0 < len(weights) <= before - after


def test_a_weight_that_an_embedding_reads_too_stays_as_it_is() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
            self.head.weight = self.table.weight

    tied = Tied()
    torch_module.store_half(tied, torch.bfloat16)
    assert tied.table.weight.dtype == tied.head.weight.dtype == torch.float32
    assert tied.head.bias.dtype == torch.bfloat16


def test_a_correlation_in_pieces_gives_the_numbers_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen rows of feature maps: three at a time, and one in the last part."""
    monkeypatch.setattr(raft_in_pieces, "PART_BYTES", 3 * 4 * 20 * 16 * 20)
    whole = find_spec("raft", {"update": "torchvision"}, None).build(None)
    images = torch.rand(2, 1, 3, 128, 160, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        wanted, found = whole(*images), raft_in_pieces.raft()(*images)
    assert found.shape == (1, 2, 128, 160)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
