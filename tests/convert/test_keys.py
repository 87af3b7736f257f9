"""Which change affects the key of which stage."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from pipeline.convert import keys as keys_module
from pipeline.convert.keys import EXEMPT, STAGES, content_of, weights_info
from pipeline.convert.options import stage_options
from pipeline.errors import InputError
from pipeline.machine.gpu import Gpu
from pipeline.machine.target import TARGETS, Target
from pipeline.source.zoo import find_spec
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.effort import Effort
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.padding import Padding
from pipeline.spec.profiles import Profile

RTX = TARGETS["rtx-1.7"]
PROFILES = (Profile("all"),)
SPEC = tiny.conv()


def stage_keys(
    config: Config, spec: ModelSpec, target: Target, profiles: tuple[Profile, ...]
) -> dict[str, str]:
    spec = dataclasses.replace(spec, profiles=profiles)
    weights = keys_module.weights_info(config, spec)
    return keys_module.stage_keys(config, spec, stage_options(config, target), weights)


def first_difference(after: dict[str, str], before: dict[str, str] | None = None) -> str | None:
    """The first stage with another key. All later stages must also have other keys."""
    before = before or stage_keys(Config("tiny"), SPEC, RTX, PROFILES)
    assert list(after) == list(before) == list(STAGES)
    differ = [stage for stage in STAGES if after[stage] != before[stage]]
    assert differ == list(STAGES[len(STAGES) - len(differ) :])
    return differ[0] if differ else None


def test_same_twice() -> None:
    again = stage_keys(Config("tiny"), tiny.conv(), RTX, PROFILES)
    assert first_difference(again) is None


@pytest.mark.parametrize("how", [{"force": True}, {"out": Path("elsewhere")}])
def test_what_does_not_change_the_artifact(how: dict[str, Any]) -> None:
    assert first_difference(stage_keys(Config("tiny", **how), SPEC, RTX, PROFILES)) is None


H, W = tiny.dims()


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"name": "other"}, "export"),
        ({"options": {"channels": 5}}, "export"),
        ({"inputs": (Input("z", (1, 3, H, W)),)}, "export"),
        ({"inputs": (Input("x", (1, 3, H, W), high=2.0),)}, "export"),
        ({"inputs": (Input("x", (1, 3, H, W), "float64"),)}, "export"),
        ({"inputs": (Input("x", (1, 3, Dim("h", 5, 18, 44), W)),)}, "export"),
        ({"inputs": (Input("x", (1, 3, Dim("h", 5, 17, 40), W)),)}, "export"),
        ({"padding": Padding({"h": 8, "w": 4})}, "export"),
        ({"padding": Padding({"h": 4, "w": 4}, align="end")}, "export"),
        ({"refine_dims": True}, "export"),
        ({"seed": 1}, "export"),
        ({"libraries": ("torch", "numpy")}, "export"),
        ({"tolerance": Tolerance(1e-4, 1e-6, "other")}, "compare"),
        ({"tolerance": Tolerance(1e-4, 1e-5, "other words")}, "compare"),
        ({"engine_tolerance": {"fp16": Tolerance(1e-2, 1e-3, "half")}}, "compare"),
    ],
)
def test_spec(change: dict[str, Any], stage: str) -> None:
    spec = dataclasses.replace(SPEC, **change)
    assert first_difference(stage_keys(Config("tiny"), spec, RTX, PROFILES)) == stage


def test_a_dim_that_stands_in_an_expression_only() -> None:
    """Its range is in no shape and in no profile."""

    def keys(dim: Dim) -> dict[str, str]:
        spec = dataclasses.replace(
            SPEC, inputs=(Input("x", (1, 3, 4 * dim, W)),), outputs=(), padding=None
        )
        return stage_keys(Config("tiny"), spec, RTX, PROFILES)

    before = keys(Dim("n", 1, 2, 3))
    assert first_difference(keys(Dim("n", 1, 2, 3)), before) is None
    for dim in (Dim("n", 1, 2, 30), Dim("n", 1, 3, 3), Dim("n", 1, 2, 3, auto=True)):
        assert first_difference(keys(dim), before) == "export"


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


@dataclasses.dataclass
class OtherPair:
    a: Any
    b: Any


def test_the_form_in_which_forward_gets_its_inputs() -> None:
    a, b = Input("a", (1, H)), Input("b", (1, W))
    forms: list[Any] = [
        ((a, b),),
        ([a, b],),
        ({"a": a, "b": b},),
        (Pair(a, b),),
        (OtherPair(a, b),),
    ]
    found = []
    for form in forms:
        spec = dataclasses.replace(SPEC, inputs=form, arguments=None)
        found.append(stage_keys(Config("tiny"), spec, RTX, PROFILES)["export"])
    assert len(set(found)) == len(forms)


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"precision": "tf32"}, "build"),
        ({"precision": "auto"}, "build"),
        ({"shapes": ("h=6",)}, "compare"),
        ({"seed": 1}, "compare"),
        ({"memory_limit": 10**9}, "compare"),
    ],
)
def test_config(change: dict[str, Any], stage: str) -> None:
    assert first_difference(stage_keys(Config("tiny", **change), SPEC, RTX, PROFILES)) == stage


def test_a_search_depends_on_the_sizes_and_the_tolerances() -> None:
    def keys(spec: ModelSpec = SPEC, **more: Any) -> dict[str, str]:
        return stage_keys(Config("tiny", precision="auto", **more), spec, RTX, PROFILES)

    before = keys()
    for change in ({"seed": 1}, {"shapes": ("h=6",)}, {"memory_limit": 10**9}):
        assert first_difference(keys(**change), before) == "build"
    stated = dataclasses.replace(SPEC, engine_tolerance={"fp16": Tolerance(1e-2, 1e-3, "half")})
    assert first_difference(keys(stated), before) == "build"
    # a quick export looks less far
    assert first_difference(keys(quick=True), before) == "export"


def test_a_search_is_never_quick() -> None:
    """So that a quick conversion can go on from a whole one's engine."""
    whole = stage_options(Config("tiny", precision="auto"), RTX)
    quick = dataclasses.replace(whole, compare=dataclasses.replace(whole.compare, quick=True))
    weights = keys_module.weights_info(Config("tiny"), SPEC)
    before, after = (
        keys_module.stage_keys(Config("tiny"), SPEC, options, weights) for options in (whole, quick)
    )
    assert first_difference(after, before) == "compare"


def test_a_recipe_counts_by_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "recipe"

    def keys(text: str) -> dict[str, str]:
        path.write_text(text)
        return stage_keys(Config("tiny", recipe=path), SPEC, RTX, PROFILES)

    before = keys("* = fp16\n")
    assert first_difference(keys("# words\n* = fp16\n"), before) is None
    assert first_difference(keys("* = fp16\nnorm = fp32\n"), before) == "build"
    assert first_difference(before) == "build"


def test_target_and_profiles() -> None:
    config = Config("tiny")
    other = TARGETS["tensorrt-10"]
    assert first_difference(stage_keys(config, SPEC, other, PROFILES)) == "rewrite"
    profiles = (Profile("all", {"h": (5, 6, 7)}),)
    assert first_difference(stage_keys(config, SPEC, RTX, profiles)) == "build"
    assert first_difference(stage_keys(config, SPEC, RTX, (Profile("more"),))) == "build"
    both = (*PROFILES, Profile("more"))
    assert first_difference(stage_keys(config, SPEC, RTX, both)) == "build"


@pytest.mark.parametrize(
    ("package", "stage"),
    [
        ("torch", "export"),
        ("onnxscript", "export"),
        ("onnx-graphsurgeon", "rewrite"),
        ("polygraphy", "build"),
        ("tensorrt_rtx", "build"),
        ("onnxruntime", "rewrite"),  # folds constants there
    ],
)
def test_versions(package: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stage_keys(Config("tiny"), SPEC, RTX, PROFILES)
    real = importlib.metadata.version

    def version(name: str) -> str:
        return "99" if name == package else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert first_difference(stage_keys(Config("tiny"), SPEC, RTX, PROFILES), before) == stage


def test_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "pipeline_hash", lambda: "other")
    before = first_difference(
        stage_keys(Config("tiny"), SPEC, RTX, PROFILES),
        dict.fromkeys(STAGES, ""),
    )
    assert before == "export"


def test_own_code_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "passes").symlink_to("../real")
    (tmp_path / "package" / "a.py").write_text("a = 1")
    (tmp_path / "real" / "b.py").write_text("b = 1")
    monkeypatch.setattr(keys_module, "_PACKAGE", tmp_path / "package")
    fresh: Callable[[], str] = keys_module.pipeline_hash.__wrapped__
    hashes = [fresh(), fresh()]
    assert hashes[0] == hashes[1]
    (tmp_path / "real" / "b.py").write_text("b = 2")
    hashes.append(fresh())
    (tmp_path / "package" / "a.py").rename(tmp_path / "package" / "c.py")
    hashes.append(fresh())
    assert len(set(hashes)) == 3


def test_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(b"one")
    config = Config("tiny", weights=path)
    before = stage_keys(config, SPEC, RTX, PROFILES)
    assert first_difference(before) == "export"
    path.write_bytes(b"two")
    assert first_difference(stage_keys(config, SPEC, RTX, PROFILES), before) == "export"
    info = weights_info(config, SPEC)
    assert (info.file, info.seed) == ("w.pth", None)
    assert weights_info(Config("tiny"), SPEC).seed == 0
    with pytest.raises(InputError, match="no such file"):
        weights_info(Config("tiny", weights=tmp_path / "none.pth"), SPEC)


def test_source_of_a_spec_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.py"

    def keys(text: str) -> dict[str, str]:
        path.write_text(f"def build(weights):\n    return {text}\n")
        space: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), space)
        spec: ModelSpec = dataclasses.replace(SPEC, build=space["build"])
        return stage_keys(Config("tiny"), spec, RTX, PROFILES)

    before = keys("1")
    assert first_difference(keys("1"), before) is None
    assert first_difference(keys("2"), before) == "export"


def test_registry_checks_options() -> None:
    assert find_spec("raft", {"updates": 3}).options["updates"] == 3
    for options in ({"updates": 3.0}, {"updates": True}, {"updates": "3"}):
        with pytest.raises(InputError, match="expected int"):
            find_spec("raft", options)


def test_a_plan_is_for_one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(target: str, major: int, minor: int) -> dict[str, str]:
        monkeypatch.setattr(keys_module, "find_gpu", lambda: Gpu("some GPU", (major, minor)))
        return stage_keys(Config("tiny"), SPEC, TARGETS[target], PROFILES)

    hopper, ada = (9, 0), (8, 9)
    assert first_difference(on("tensorrt-8.6", *hopper), on("tensorrt-8.6", *ada)) == "build"
    assert first_difference(on("tensorrt-8.6", *hopper), on("tensorrt-8.6", *hopper)) is None
    assert first_difference(on("rtx-1.7", *hopper), on("rtx-1.7", *ada)) is None


def test_every_field_of_the_options_counts_unless_it_is_exempt() -> None:
    """A new field of a stage's options changes the key, or has a reason not to."""
    options = stage_options(Config("tiny"), RTX)
    counted = content_of(options)
    assert isinstance(counted, dict)
    for stage, own in options.by_stage.items():
        kind = type(own).__name__
        names = {field.name for field in dataclasses.fields(own)}  # type: ignore[arg-type]
        assert counted[stage].keys() == {name for name in names if (kind, name) not in EXEMPT}


def test_what_is_exempt_exists() -> None:
    known = {type(own).__name__: own for own in stage_options(Config("a"), RTX).by_stage.values()}
    known |= {"Effort": Effort(), "ModelSpec": SPEC, "Output": Output("y"), "Dim": H}
    for kind, name in EXEMPT:
        assert name in {field.name for field in dataclasses.fields(known[kind])}  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("system", "Plan 9"), ("machine", "aarch64-test")])
def test_another_kind_of_machine_builds_again(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stage_keys(Config("tiny"), SPEC, RTX, PROFILES)
    monkeypatch.setattr(keys_module.platform, name, lambda: value)
    after = stage_keys(Config("tiny"), SPEC, RTX, PROFILES)
    assert first_difference(after, before) == "build"
