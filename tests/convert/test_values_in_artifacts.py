"""Conversions and checks with the user's values of inputs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import rehash

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.stored import stored_points
from pipeline.artifact.values import filled
from pipeline.convert.driver import run, run_export, verify
from pipeline.convert.options import Verify
from pipeline.convert.plan import plan_conversion
from pipeline.convert.report import Report
from pipeline.errors import ArtifactError, CompareError
from pipeline.spec.config import Config
from pipeline.spec.file_names import INPUTS, MANIFEST

# The first step, and the mean over the first `lengths` steps of each row. With `wrong`, the export
# differs for a row of more than one step. Random lengths without a range are 0 and 1.
MODEL = """
import torch

class Mean(torch.nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, x, lengths):
        steps = torch.arange(x.shape[1])[None]
        if self.wrong and torch.compiler.is_exporting():
            lengths = lengths.clamp(max=1)
        mask = (steps < lengths[:, None]).to(x.dtype)
        return x[:, 0] + (x * mask).sum(1) / lengths.clamp(min=1).to(x.dtype)

def mean(wrong=False):
    return Mean(wrong)
"""
X = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mean.py").write_text(MODEL)
    save(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(folder: Path, lengths: tuple[int, int] = (6, 3)) -> None:
    np.savez(folder / "sample.npz", x=X, lengths=np.array(lengths))


def config(lengths: str = "int64", **more: Any) -> Config:
    return Config(
        "mean.py:mean",
        out="a",
        inputs=("x:{b}x{t}", f"lengths:{{b}}:{lengths}"),
        dims=("b=1:2:4", "t=1:6:24"),
        **more,
    )


def kinds(report: Report) -> list[str]:
    assert report.manifest.comparison is not None
    return [note.kind for note in report.manifest.comparison.notes]


def test_a_fault_that_random_values_do_not_reach(folder: Path) -> None:
    del folder
    blind = run(config(options={"wrong": True}))
    assert blind.ok and "few-values" in kinds(blind)
    with pytest.raises(CompareError, match="differs"):
        run(config(options={"wrong": True}, values="sample.npz"))


def test_a_range_up_to_a_dim_reaches_the_fault_too(folder: Path) -> None:
    with pytest.raises(CompareError, match="differs"):
        run(config("int64:1..t", options={"wrong": True}))
    report = run(config("int64:1..t"))
    assert report.ok and not {"few-values", "values-given"} & set(kinds(report))
    feeds = [p.feed for p in stored_points(report.path, "torch")]
    assert all((f["lengths"] >= 1).all() and f["lengths"].max() <= f["x"].shape[1] for f in feeds)
    assert max(int(f["lengths"].max()) for f in feeds) > 2
    assert verify(report.path).ok  # reads the range from the manifest
    (folder / "mean.py").write_text(MODEL)
    assert run(config("int64:1..t")).unchanged


def test_what_an_artifact_keeps_and_what_verify_uses(folder: Path) -> None:
    report = run(config(values="sample.npz"))
    assert report.ok
    assert "values-given" in kinds(report) and not {"few-values", "equal-rows"} & set(kinds(report))
    artifact = Artifact.open(report.path)
    assert INPUTS in artifact.manifest.files and artifact.extra == ()
    values = {i.name: i.values for i in filled(artifact.manifest, artifact.path).interface.inputs}
    assert values["lengths"] is not None and values["lengths"].array.tolist() == [6, 3]
    # the comparison ran at the values' own sizes, with the values
    feeds = [p.feed for p in stored_points(report.path, "torch")]
    (own,) = (feed for feed in feeds if feed["x"].shape == X.shape)
    assert np.array_equal(own["x"], X) and own["lengths"].tolist() == [6, 3]
    assert all(set(feed["lengths"].tolist()) <= {6, 3} for feed in feeds)

    assert run(config(values="sample.npz")).unchanged
    (folder / "sample.npz").unlink()
    assert verify(report.path).ok
    done = verify(report.path, Verify(torch_model=True, trust=True, shapes=("t=24",)))
    assert done.ok and "values-given" in kinds(done)
    feeds = [p.feed for p in stored_points(report.path, "torch")]
    assert all(set(feed["lengths"].tolist()) <= {6, 3} for feed in feeds)


def test_other_values_convert_again(folder: Path) -> None:
    before = run(config(values="sample.npz")).manifest
    for other in ({"x": X, "lengths": np.array([5, 2])}, {"x": X}, None):
        assert "export" in plan_conversion(config(values=other), ExitStack()).todo
    save(folder, (5, 3))
    assert "export" in plan_conversion(config(values="sample.npz"), ExitStack()).todo
    save(folder)
    assert not plan_conversion(config(values="sample.npz"), ExitStack()).todo
    again = run_export(config(force=True)).manifest
    assert INPUTS in before.files and INPUTS not in again.files


def test_values_in_an_artifact_that_the_manifest_does_not_state(folder: Path) -> None:
    place = run_export(config(values="sample.npz")).path
    manifest = Artifact.open(place).manifest
    (place / INPUTS).write_bytes((place / INPUTS).read_bytes()[:50])
    with pytest.raises(ArtifactError, match="cut short"):
        Artifact.open(place)
    with pytest.raises(ArtifactError, match=r"inputs\.npz: can't be read"):
        filled(manifest, place)
    np.savez(place / INPUTS, x=X, lengths=np.array([1, 1]))
    with pytest.raises(ArtifactError, match="other values of lengths than the manifest states"):
        filled(manifest, place)
    np.savez(place / INPUTS, x=X)
    with pytest.raises(ArtifactError, match=r"inputs\.npz: can't be read"):
        filled(manifest, place)
    del folder


def test_a_manifest_whose_values_do_not_fit_its_inputs(folder: Path) -> None:
    place = run_export(config(values="sample.npz")).path

    def third_axis(content: dict[str, Any]) -> None:
        content["interface"]["inputs"][0]["values"]["shape"] = [2, 6, 1]

    rehash(place / MANIFEST, third_axis)
    with pytest.raises(ArtifactError, match="x has 2 axes, but its values have 3"):
        Artifact.open(place)
    del folder


def test_equal_rows_are_noted(folder: Path) -> None:
    # the rows of one sample are made different, but a user's rows stay as they are
    np.savez(folder / "sample.npz", x=np.ones((2, 1), "f"), lengths=np.array([1, 1]))
    assert "equal-rows" in kinds(run(config(values="sample.npz")))
