"""run() from end to end, and each stage alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tiny
from helpers import files_under, refinish

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.artifact.stored import stored_points
from pipeline.convert.driver import run
from pipeline.convert.report import Report
from pipeline.errors import (
    BuildError,
    CompareError,
    ExportError,
    InputError,
    RewriteError,
)
from pipeline.machine.gpu import why_not
from pipeline.machine.target import TARGETS, installed_version
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim, shape_texts
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.profiles import Profile

RTX = TARGETS["rtx-1.7"]


def compared(manifest: Manifest) -> ComparisonInfo:
    assert manifest.comparison is not None
    return manifest.comparison


def test_report_is_what_stands_on_the_disk(converted: Report) -> None:
    artifact = Artifact.open(converted.path)
    assert converted.ok
    assert not converted.unchanged
    assert artifact.manifest == converted.manifest
    assert artifact.extra == ()
    manifest = converted.manifest
    assert [stage.name for stage in manifest.stages] == ["export", "rewrite", "build", "compare"]
    assert {"engine.plan", "model.onnx", "exported.onnx", "reproduce.sh"} <= set(manifest.files)
    assert manifest.versions["tensorrt_rtx"] == manifest.target.version == installed_version(RTX)
    assert manifest.interface.profiles[0].ranges == {"h": (5, 18, 40), "w": (5, 22, 40)}
    assert [(t.name, shape_texts(t.shape)) for t in manifest.interface.outputs] == [
        ("y", (1, 4, "h", "w"))
    ]
    assert manifest.export is not None
    for name in ("h", "w"):
        assert "x axis" in manifest.export.dynamic[name].where
        assert manifest.export.dynamic[name].ran_at[0] == 5
        assert "; ran at 5, " in manifest.export.dynamic[name].text


def test_every_kind_of_size_was_compared(converted: Report) -> None:
    comparison = compared(converted.manifest)
    assert comparison.passed
    assert {p.label for p in comparison.points} == {
        "min", "odd, below opt", "opt", "h min, rest max", "h max, rest min", "odd, above opt",
        "max",
    }  # fmt: skip
    for point in comparison.points:
        assert point.compared
        assert [(r.pair, r.output, r.passed) for r in point.results] == [
            (("torch", "exported"), "y", True)
        ]
    odd = [p.sizes for p in comparison.points if p.label.startswith("odd")]
    assert all(size % 2 for sizes in odd for size in sizes.values())


def test_the_model_equals_torch(converted: Report) -> None:
    import torch

    session = onnxruntime.InferenceSession(str(converted.path / "model.onnx"))
    spec = tiny.conv()
    net = spec.build(None).eval()
    for h, w in ((5, 5), (7, 13), (40, 39)):
        x = spec.sample({"h": h, "w": w}, 3)["x"]
        top, left = -h % 4 // 2, -w % 4 // 2
        pads = (left, -w % 4 - left, top, -h % 4 - top)
        padded = torch.nn.functional.pad(torch.from_numpy(x), pads, mode="replicate")
        with torch.no_grad():
            want = net(padded)[..., top : top + h, left : left + w].numpy()
        (got,) = session.run(None, {"x": x})
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_engine_is_not_claimed_where_no_gpu_ran_it(converted: Report) -> None:
    reason = why_not(RTX)
    if not reason:
        pytest.skip("a GPU here runs the engine: tests/gpu/test_verify_gpu.py has that case")
    assert converted.manifest.engine_compared is False
    assert converted.manifest.engine_compared_why == reason


def test_several_profiles(tmp_path: Path) -> None:
    profiles = (Profile("small", {"h": (5, 8, 12), "w": (5, 8, 12)}), Profile("large"))
    report = run(Config(tiny.conv(profiles=profiles), out=tmp_path / "a"))
    manifest = report.manifest
    assert [p.name for p in manifest.interface.profiles] == ["small", "large"]
    labels = [p.label for p in compared(manifest).points]
    assert "small: max" in labels
    assert "large: max" in labels
    assert {f.split("/")[1] for f in manifest.files if "/" in f} == {"small", "large"}
    script = (tmp_path / "a" / "reproduce.sh").read_text()
    assert "--optimization-profile 1" in script


@pytest.mark.parametrize("name", ["../out", "a/b", "", "outside", "later", ".hidden"])
def test_profile_names_that_are_no_folder_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="profile name"):
        run(Config(tiny.conv(profiles=(Profile(name),)), out=tmp_path / "a"))
    assert not any(tmp_path.iterdir())


def test_fixed_sizes_only(tmp_path: Path) -> None:
    spec = tiny.of(lambda x: x * 2, shape=(1, 3, 8, 8))
    report = run(Config(spec, out=tmp_path / "a"))
    assert report.ok
    assert [p.sizes for p in compared(report.manifest).points] == [{}]


def doubled(x: Any) -> Any:
    import torch

    return x * 2 if torch.compiler.is_exporting() else x * 2 + 0.01


def cropped(x: Any) -> Any:
    import torch

    return x * 2 if torch.compiler.is_exporting() else x[..., 1:] * 2


def cropped_at_min(x: Any) -> Any:
    import torch

    return x[..., 1:] * 2 if not torch.compiler.is_exporting() and x.shape[2] == 5 else x * 2


def random(x: Any) -> Any:
    import torch

    return x * 2 if torch.compiler.is_exporting() else x * 2 + torch.rand(1) * 0.01


def failing(x: Any) -> Any:
    import torch

    if not torch.compiler.is_exporting() and x.shape[2] > 30:
        raise RuntimeError("too high")
    return x * 2


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (doubled, r"y of exported differs from torch at .*first at min .*by up to 0\.01"),
        (random, "the model draws random numbers"),
        (cropped, r"output y axis 3: torch.export computes the size w, but the model gives 21 at"),
        (cropped_at_min, r"at min .*its shape is \[1, 3, 5, 5\], not \[1, 3, 5, 4\]"),
        (lambda x: (x - 5).log(), "torch has NaN or infinity"),
        (lambda x: x / 0.0, "torch has NaN or infinity"),
        (lambda x: x * 1e-6, r"cannot be judged: every value of torch is below atol=1e-05"),
        (failing, r"torch fails at .*\(h=40,w=5\): too high"),
    ],
)
def test_disagreement_fails_and_leaves_the_old_artifact(
    forward: Any, why: str, artifact: Path
) -> None:
    before = {
        name: (artifact / name).read_bytes() for name in Artifact.open(artifact).manifest.files
    }
    with pytest.raises((CompareError, ExportError), match=why) as caught:
        run(Config(tiny.of(forward), out=artifact, force=True))
    assert caught.value.exit_code == 1
    assert "\n" not in caught.value.message
    after = {
        name: (artifact / name).read_bytes() for name in Artifact.open(artifact).manifest.files
    }
    assert after == before
    assert files_under(artifact.parent)[0] == "tiny"  # and nothing hidden beside it


def test_output_shape_that_the_spec_does_not_declare(tmp_path: Path) -> None:
    h, w = tiny.dims()
    spec = tiny.of(lambda x: x * 2, outputs=(Output("y", (1, 3, w, h)),))
    with pytest.raises(ExportError, match=r"output y: torch gives .*'h', 'w'.* the spec declares"):
        run(Config(spec, out=tmp_path / "a"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.failed"]


def test_integer_and_bool_outputs(tmp_path: Path) -> None:
    spec = tiny.of(
        lambda x: ((x * 100).to(__import__("torch").int64), x > 0),
        outputs=(Output("n"), Output("b")),
    )
    report = run(Config(spec, out=tmp_path / "a"))
    assert [t.dtype for t in report.manifest.interface.outputs] == ["int64", "bool"]
    assert report.ok


def test_memory_limit_leaves_points_out_by_name(tmp_path: Path) -> None:
    spec = tiny.of(lambda x: x * 2, high=2000)
    report = run(Config(spec, out=tmp_path / "a", memory_limit=8 * 2**20))
    points = {p.label: p for p in compared(report.manifest).points}
    assert report.ok
    assert points["min"].compared
    large = points["max"]
    assert not large.compared
    assert large.results == ()
    # 2 tensors of 48 MB, and a quarter on top
    assert large.estimate_bytes == pytest.approx(2 * 3 * 2000 * 2000 * 4 * 1.25, rel=0.05)
    assert large.left_out is not None and large.left_out.kind == "too-large"
    assert large.left_out.text == "needs about 0.1 GiB, the limit is 8.0 MiB"
    stored = stored_points(report.path, "torch")
    assert len(stored) == sum(p.compared for p in points.values())
    assert all(p.outputs["y"].nbytes < 2**20 for p in stored)


def test_everything_left_out_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="nothing was compared: every set of sizes is over"):
        run(Config(tiny.of(lambda x: x * 2), out=tmp_path / "a", memory_limit=100))
    assert [path.name for path in tmp_path.iterdir()] == ["a.failed"]


def test_build_failure_leaves_the_old_artifact(artifact: Path) -> None:
    before = (artifact / "manifest.json").read_bytes()
    spec = tiny.of(lambda x: x[:, :, :3, :3].nonzero().sum() + x)
    with pytest.raises(RewriteError, match=r"NonZero.* depends on the data"):
        run(Config(spec, out=artifact, force=True))
    with pytest.raises(
        BuildError, match=r"NonZero"
    ):  # nor where the pass that knows it is left out
        run(Config(spec, out=artifact, force=True, skip=("replace_nonzero",)))
    assert (artifact / "manifest.json").read_bytes() == before
    Artifact.open(artifact)


def test_two_profiles_of_one_name(tmp_path: Path) -> None:
    spec = tiny.conv(profiles=(Profile("a"), Profile("a", {"h": (5, 6, 7)})))
    with pytest.raises(InputError, match="two profiles have the same name: a, a"):
        run(Config(spec, out=tmp_path / "a"))


def test_narrowed_dims_reach_profiles_and_engine(tmp_path: Path) -> None:
    h = Dim("h", 8, 16, 40)

    def halves(x: Any) -> Any:
        return x.reshape(1, 3, x.shape[2] // 2, 2).sum(3)

    spec = dataclasses.replace(tiny.of(halves), inputs=(Input("x", (1, 3, h)),))
    with pytest.raises(ExportError, match="multiple of 2"):
        run(Config(spec, out=tmp_path / "a"))
    spec = dataclasses.replace(spec, refine_dims=True, key="halves")
    report = run(Config(spec, out=tmp_path / "a"))
    assert report.manifest.interface.dims["h"].multiple_of == 2
    assert report.manifest.export is not None
    assert report.manifest.export.refinements
    assert all(p.sizes["h"] % 2 == 0 for p in compared(report.manifest).points)
    assert run(Config(spec, out=tmp_path / "a")).unchanged


def test_spec_takes_no_options() -> None:
    with pytest.raises(InputError, match="is a spec, which has no options"):
        run(Config(tiny.conv(), options={"channels": 2}))


def test_config_refuses_nonsense() -> None:
    with pytest.raises(InputError, match="memory limit"):
        Config("tiny", memory_limit=0)
    with pytest.raises(InputError, match="seed"):
        Config("tiny", seed=-1)


def test_refinished_copy_is_an_artifact(artifact: Path) -> None:
    refinish(artifact, name="other")
    assert Artifact.open(artifact).manifest.name == "other"


def test_a_module_of_the_caller_is_left_as_it_was_given(tmp_path: Path) -> None:
    import torch

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.ranks = torch.nn.Conv2d(3, 3, 1), set[int]()

        def forward(self, x: Any) -> Any:
            self.ranks.add(x.dim())
            return self.inner(x)

    module = Cached().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    spec = dataclasses.replace(tiny.of(lambda x: x), build=lambda _: module)
    run(Config(spec, out=tmp_path / "a"))
    assert module.training and module.inner.training
    assert all(weight.requires_grad for weight in module.parameters())
    assert module.ranks == set()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_model_that_remembers_leaves_the_old_artifact(artifact: Path) -> None:
    def remembers(x: Any) -> Any:
        seen.append(x.shape[-1])
        return x * seen[0]

    seen: list[int] = []
    before = (artifact / "manifest.json").read_bytes()
    with pytest.raises(ExportError, match=r"remembers earlier calls.*changes seen \(.*seen.append"):
        run(Config(tiny.of(remembers), out=artifact, force=True))
    assert (artifact / "manifest.json").read_bytes() == before


def test_names_and_tolerances_of_outputs_reach_the_artifact(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = ModelSpec("m", lambda _: torch.nn.LSTM(4, 3), (Input("x", (Dim("t", 1, 4, 9), 2, 4)),))
    tolerance = {"state": Tolerance(1e-4, 1e-4, "a test")}
    report = run(
        Config(
            spec, out=tmp_path / "a", output_names=("y", "state", "cell"),
            output_tolerances=tolerance, quick=True,
        )
    )  # fmt: skip
    assert report.ok
    outputs = report.manifest.interface.outputs
    assert [o.name for o in outputs] == ["y", "state", "cell"]
    assert outputs[1].tolerance == tolerance["state"]
