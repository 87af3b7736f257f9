"""An artifact with several engines: `load` takes the one for the card, or says why there is none.

The engines are built for real by TensorRT-RTX. The card that loads them is pretended (`fake_rtx`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_rtx
import pytest
from fake_rtx import RtxPlan, right
from fake_tensorrt import Installer
from helpers import refinish

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.artifact.engines import engine_places, keep_engines
from pipeline.convert.driver import run_build, verify
from pipeline.errors import InputError, TargetMissing
from pipeline.machine.gpu import Gpu, parse_capabilities
from pipeline.runtime.choose import choose
from pipeline.runtime.rtx import RtxSettings
from pipeline.spec.verdicts import Check

PROFILES = ("b=1:2:8,w=1:8:64", "b=1:2:8,w=1:3:16")
CARDS = {"sm86": "RTX 3090", "sm89": "RTX 4090", "sm120": "RTX 5090"}
Insert = Callable[[str], RtxPlan]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a portable engine, and one for each of `CARDS`; not to be changed."""
    place = tmp_path_factory.mktemp("engines") / "net"
    source = f"{Path(fake_rtx.__file__)}:net"
    dims = ("b=1:2:8", "w=1:8:64")
    inputs = ("x:{b}x{w}", "z:{w}")
    config = pipeline.Config(
        source, inputs=inputs, dims=dims, out=place, profiles=PROFILES, quick=True,
        output_names=("y", "s"),
    )  # fmt: skip
    pipeline.run(config)
    for kind in CARDS:
        run_build(place, gpus=(kind,))
    return place


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Path:
    """A copy of `built`. You may change it."""
    return Path(shutil.copytree(built, tmp_path / "net"))


@pytest.fixture
def insert(monkeypatch: pytest.MonkeyPatch) -> Iterator[Insert]:
    """Puts a card into the pretended machine: ``insert("sm86")``."""
    installer = Installer(monkeypatch)

    def put(kind: str) -> RtxPlan:
        (capability,) = parse_capabilities([kind])
        card = Gpu(CARDS.get(kind, f"card {kind}"), capability)
        return fake_rtx.pretend(monkeypatch, installer(0), card)

    yield put
    installer.end()


def loaded(place: Path, **options: object) -> tuple[str, ...]:
    """The compute capabilities of the engine that is loaded. Its numbers are right."""
    with pipeline.load(place, **options) as engine:  # type: ignore[arg-type]
        for b, w in ((1, 1), (8, 64), (2, 3)):
            right(engine, b, w)
        return engine.manifest.target.compute_capabilities


def precision_of(place: Path, **options: object) -> str:
    with pipeline.load(place, **options) as engine:  # type: ignore[arg-type]
        return engine.manifest.precision


def run_at(place: Path, b: int, w: int, **options: object) -> None:
    """Loads the engine and runs it once."""
    with pipeline.load(place, **options) as engine:  # type: ignore[arg-type]
        right(engine, b, w)


def test_each_card_takes_its_own_engine(built: Path, insert: Insert) -> None:
    for kind, capability in (("sm86", "8.6"), ("sm89", "8.9"), ("sm120", "12.0")):
        insert(kind)
        assert loaded(built) == (capability,)
    insert("sm80")  # none was built for it, and the portable engine runs there
    assert loaded(built) == ()


def test_each_engine_refuses_the_other_cards(built: Path, insert: Insert) -> None:
    for kind in CARDS:
        for other, name in CARDS.items():
            insert(other)
            engine = built / "engines" / f"rtx-1.7-{kind}"
            if kind == other:
                loaded(engine)
                continue
            with pytest.raises(InputError, match=rf"built for compute capability .* the {name}"):
                pipeline.load(engine)


def test_no_engine_for_the_card(place: Path, insert: Insert) -> None:
    insert("sm90")
    with pytest.raises(InputError) as error:
        pipeline.load(place)
    text = str(error.value)
    assert f"{place}: no engine runs here (the GPU is card sm90 (compute capability 9.0))" in text
    assert "its own engine: TensorRT-RTX does not run on card sm90" in text
    for kind, capability in (("sm86", "8.6"), ("sm89", "8.9"), ("sm120", "12.0")):
        need = f"rtx-1.7-{kind}: the engine needs compute capability {capability}, card sm90 has"
        assert need in text
    insert("sm86")
    with pytest.raises(InputError, match=r"no engine in fp16 runs here .*its own engine: it is fp"):
        pipeline.load(place, precision="fp16")


def test_precisions(place: Path, insert: Insert) -> None:
    run_build(place, gpus=("sm86",), precision="bf16")
    insert("sm86")
    assert precision_of(place) == "fp32"
    assert precision_of(place, precision="bf16") == "bf16"
    insert("sm120")
    with pytest.raises(InputError, match=r"rtx-1\.7-sm86-bf16: the engine needs compute capabi"):
        pipeline.load(place, precision="bf16")


@pytest.mark.parametrize("file", ["exported.onnx", "exported.onnx.data"])
def test_an_engine_of_another_model_is_not_taken(place: Path, insert: Insert, file: str) -> None:
    engine = place / "engines" / "rtx-1.7-sm86"
    with (engine / file).open("ab") as other:  # the file of large weights is new
        other.write(b"\x00")
    refinish(engine)
    insert("sm86")
    assert loaded(place) == ()  # the portable one
    own = Artifact.open(place).manifest
    shutil.rmtree(place / "engines" / "rtx-1.7-sm89")
    shutil.rmtree(place / "engines" / "rtx-1.7-sm120")
    (place / "engine.plan").unlink()
    refinish(place, build=None)
    with pytest.raises(InputError, match=r"sm86: it was built from another exported\.onnx"):
        pipeline.load(place)
    assert own.build is not None


def test_another_tensorrt_is_not_taken(place: Path, insert: Insert) -> None:
    engine = place / "engines" / "rtx-1.7-sm86"
    target = Artifact.open(engine).manifest.target
    refinish(engine, target=target.__class__(target.name, target.flavour, "1.7.0.9", ("8.6",)))
    insert("sm86")
    assert loaded(place) == ()


# TensorRT-RTX's settings of a run


def test_the_cache_is_warmed_once_and_kept_per_card(
    built: Path, insert: Insert, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    names = []
    for kind in CARDS:
        insert(kind)
        pipeline.load(built, runtime_cache=cache).close()
        (name,) = {path.name for path in cache.iterdir()} - set(names)
        names.append(name)
        shapes = (cache / name).read_text().split("\n")[1:-1]
        # min, opt and max of both profiles
        assert shapes == ["1x1", "2x3", "2x8", "8x16", "8x64"]
    assert not any(".lock" in name for name in names)


def test_a_later_run_adds_kernels_and_uses_them(
    built: Path, insert: Insert, tmp_path: Path
) -> None:
    insert("sm86")
    run_at(built, 5, 7, runtime_cache=tmp_path)
    (file,) = tmp_path.iterdir()
    assert "5x7" in file.read_text().split("\n")
    before = file.read_bytes()
    plan = insert("sm86")
    pipeline.load(built, runtime_cache=tmp_path).close()
    assert plan.config is None  # nothing ran: the file's kernels are there
    run_at(built, 5, 7, runtime_cache=tmp_path)
    assert plan.config is not None and plan.config.cache is not None
    assert "8x64" in plan.config.cache.shapes
    assert file.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda d: d[:-2], lambda d: d[:0], lambda d: b"other" + d])
def test_a_damaged_cache_is_made_again(
    built: Path, insert: Insert, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    insert("sm86")
    pipeline.load(built, runtime_cache=tmp_path).close()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    insert("sm86")
    pipeline.load(built, runtime_cache=tmp_path).close()
    assert file.read_bytes() == whole


def test_a_process_with_fewer_kernels_does_not_replace_more(
    built: Path, insert: Insert, tmp_path: Path
) -> None:
    insert("sm86")
    with pipeline.load(built, runtime_cache=tmp_path):
        (file,) = tmp_path.iterdir()
        more = file.read_bytes().replace(b"\nend", b"\n9x9\nend")
        file.write_bytes(more)  # as another process would
    assert file.read_bytes() == more


def test_kernels(built: Path, insert: Insert) -> None:
    for kernels, strategy in ((None, None), ("eager", "EAGER"), ("none", "NONE"), ("lazy", "LAZY")):
        plan = insert("sm86")
        run_at(built, 2, 3, **({} if kernels is None else {"kernels": kernels}))
        found = plan.config and plan.config.dynamic_shapes_kernel_specialization_strategy
        assert found == strategy


def test_settings_that_are_wrong(built: Path, insert: Insert, tmp_path: Path) -> None:
    insert("sm86")
    with pytest.raises(InputError, match="kernels 'fast' is unknown; known: lazy, eager, none"):
        pipeline.load(built, kernels="fast")
    with pytest.raises(InputError, match=r"no option 'cache'.*kernels, runtime_cache"):
        pipeline.load(built, cache=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"runtime cache .*file/.*: can't be written"):
        pipeline.load(built, runtime_cache=tmp_path / "file")
    with pytest.raises(InputError, match="only TensorRT-RTX has kernels"):
        RtxSettings(kernels="eager").check("tensorrt", "a")


def test_each_engine_records_where_it_was_compared(place: Path, insert: Insert) -> None:
    for kind, name in CARDS.items():
        plan = insert(kind)
        report = verify(place / "engines" / f"rtx-1.7-{kind}")
        assert report.ok
        assert report.manifest.engine_compared
        assert report.manifest.engine_gpu == name
        assert plan.config is not None  # the kernels for each shape, from its first call on
        assert plan.config.dynamic_shapes_kernel_specialization_strategy == "EAGER"
    assert not Artifact.open(place).manifest.engine_compared


def test_the_work_folder_of_a_killed_run_is_no_engine(place: Path, insert: Insert) -> None:
    left = place / "engines" / ".rtx-1.7-sm86.tmp-1-0123abcd"
    shutil.copytree(place / "engines" / "rtx-1.7-sm86", left)
    assert choose(place, insert("sm86").card) == place / "engines" / "rtx-1.7-sm86"
    assert [engine.name for engine in engine_places(place)] == [
        "rtx-1.7-sm120", "rtx-1.7-sm86", "rtx-1.7-sm89",
    ]  # fmt: skip
    verify(place)  # copies the artifact
    assert not left.exists()


def test_which_of_several_engines_is_taken(place: Path, insert: Insert) -> None:
    card = insert("sm86").card
    own = place / "engines" / "rtx-1.7-sm86"
    assert choose(place, card) == own
    # one with other profiles comes after those that have the artifact's
    run_build(place, gpus=("sm86",), profiles=("b=1:2:4,w=1:8:32",))
    assert choose(place, card) == place
    run_build(place, gpus=("sm86",))
    assert choose(place, card) == own
    # one in another precision too
    run_build(place, gpus=("sm86",), precision="bf16")
    assert choose(place, card) == own
    # one whose comparison failed comes last
    verify(own)
    info = Artifact.open(own).manifest.comparison
    assert info is not None
    fault = Check("determinism", "engine", "run-failed", facts={"reason": "a fault"})
    refinish(own, comparison=replace(info, checks=(fault,)))
    assert choose(place, card) == place


def test_a_damaged_engine_is_left_out_and_kept(place: Path, insert: Insert, cli: Any) -> None:
    (place / "engines" / "rtx-1.7-sm89" / "manifest.json").write_text("{")
    card = insert("sm86").card
    assert choose(place, card).name == "rtx-1.7-sm86"
    assert choose(place, insert("sm89").card) == place
    with pytest.raises(InputError, match=r"engines/rtx-1\.7-sm89: .*not JSON"):
        choose(place, insert("sm90").card)
    code, out, _ = cli("inspect", place)
    assert code == 2 and "rtx-1.7-sm89: can't be used: " in out
    folder = place.with_name("new")
    keep_engines(place, folder, Artifact.open(place).manifest, lambda _: None)
    assert (folder / "engines" / "rtx-1.7-sm89" / "manifest.json").read_text() == "{"


def test_without_a_gpu_several_engines_say_the_same_as_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runtime.engine.find_gpu", lambda _=0: "there is no GPU")
    with pytest.raises(TargetMissing, match="an engine needs a GPU, but there is no GPU"):
        pipeline.load(place)


def test_a_cache_that_cannot_be_written(built: Path, insert: Insert, tmp_path: Path) -> None:
    insert("sm86")
    assert "can't be written" in fail_at_close(built, tmp_path, None)
    insert("sm86")
    assert fail_at_close(built, tmp_path, ValueError("the user's")) == "the user's"


def fail_at_close(built: Path, folder: Path, error: Exception | None) -> str:
    """The error of a block whose engine can't save its kernels. All its memory is freed."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    try:
        with pipeline.load(built, runtime_cache=folder / "cache") as engine:
            (file,) = (folder / "cache").iterdir()
            file.unlink()
            file.mkdir()  # nothing can replace it
            right(engine, 5, 5)
            if error is not None:
                raise error
    except Exception as caught:
        return str(caught)
    raise AssertionError("no error")
