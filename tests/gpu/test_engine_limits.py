"""The engine's limits on a GPU: memory that stays, runs out or is freed, and bad input."""

from __future__ import annotations

import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_engines import (
    Built,
    Loaded,
    OnGpu,
    References,
    in_a_process,
    picture,
    same,
    sizes,
    streams,
)
from gpu_nets import WIDE
from helpers import refinish
from on_gpu import ALONE, TARGET, WHY

import pipeline
from pipeline import EngineError, InputError, OutOfMemory
from pipeline.artifact.artifact import Artifact
from pipeline.errors import ArtifactError, TargetMissing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TARGET is None, reason=WHY)]


@ALONE
def test_memory_stays(loaded: Loaded) -> None:
    from pipeline.runtime import cuda as _cuda

    engine = loaded("PICTURE")
    stream = streams()[0]
    whole = OnGpu(picture(96, 96))

    def call(h: int, w: int, how: int) -> None:
        if how == 0:
            engine(x=picture(h, w))
            return
        interface = {**whole.__cuda_array_interface__, "shape": (1, 3, h, w)}
        part = type("Part", (), {"__cuda_array_interface__": interface})()
        engine(x=part, stream=stream if how == 1 else None)

    left = held = 0
    for turn, (h, w) in enumerate(sizes(2000, seed=5)):
        call(h, w, 0 if turn % 10 == 0 else 1 + turn % 2)
        if turn == 100:
            _cuda.synchronise()
            left, held = _cuda.memory()[0], engine.device_memory
    _cuda.synchronise()
    assert engine.device_memory == held
    assert _cuda.memory()[0] >= left


class Ballast:
    """Allocates the GPU's memory except for some bytes."""

    def __init__(self, leave: int) -> None:
        from pipeline.runtime import cuda as _cuda

        self._cuda = _cuda
        _cuda.synchronise()
        self._taken = []
        step = 1 << 34
        while step >= 1 << 24:
            if _cuda.memory()[0] - leave > step and (pointer := _cuda.allocate(step)):
                self._taken.append(pointer)
            else:
                step //= 2

    def drop(self) -> None:
        while self._taken:
            self._cuda.free(self._taken.pop())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_output_too_large_for_the_gpu(loaded: Loaded, on_gpu: bool) -> None:
    engine = loaded("LARGE_OUTPUT")

    def call(n: int) -> np.ndarray:
        x = np.arange(n, dtype=np.float32)[:, None]
        got = engine(x=OnGpu(x) if on_gpu else x)["y"]
        return got.numpy() if on_gpu else got

    row = call(2)[1]
    ballast = Ballast(leave=1 << 30)
    try:
        for _ in range(2):
            with pytest.raises(OutOfMemory, match=r"at n=8000: output y needs 2097152000 bytes"):
                call(8000)
            got = call(100)
            assert got.shape == (100, WIDE)
            np.testing.assert_allclose(got[99], 99 * row, rtol=1e-6)
    finally:
        ballast.drop()
    assert call(8000).shape == (8000, WIDE)


def test_activations_too_large_for_the_gpu(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("LARGE_INSIDE"), reference("LARGE_INSIDE")
    need = engine._runs.plan.activation
    assert need > 1 << 30  # otherwise this net shows nothing
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    ballast = Ballast(leave=need // 2)
    try:
        with pytest.raises(OutOfMemory, match=r"at n=8000: activation memory needs \d+ bytes"):
            engine(x=np.ones((8000, 1), np.float32))
    finally:
        ballast.drop()
    same(engine(x=x), right(x=x))


@ALONE
def test_closing_gives_the_memory_back(built: Built) -> None:
    from pipeline.runtime import cuda as _cuda

    def once() -> int:
        engine = pipeline.load(built("LARGE_OUTPUT"))
        out = engine(x=OnGpu(np.ones((1000, 1), np.float32)))["y"]
        engine(x=np.ones((2000, 1), np.float32))
        engine.capture({"n": 10})
        engine.close()
        engine.close()
        assert out.numpy().shape == (1000, WIDE)  # outlives the engine
        for use in (
            lambda: engine(x=np.ones((1, 1), np.float32)),
            lambda: engine.capture({"n": 1}),
        ):
            with pytest.raises(EngineError, match="the engine is closed"):
                use()
        with pytest.raises(EngineError, match="is closed"), engine:
            pass
        del out
        assert engine.device_memory == 0
        gc.collect()
        return _cuda.memory()[0]

    once()
    first = once()
    slack = 4 << 20  # a temporary use of CUDA; the buffers here have hundreds of MiB
    assert min(once() for _ in range(3)) >= first - slack
    # garbage collection frees it, too
    engine = pipeline.load(built("LARGE_OUTPUT"))
    engine(x=np.ones((2000, 1), np.float32))
    del engine
    gc.collect()
    assert _cuda.memory()[0] >= first - slack


def changed(built: Built, tmp_path: Path, **changes: Any) -> Path:
    """A copy of an artifact with another target in its manifest."""
    place = Path(shutil.copytree(built("FIXED"), tmp_path / "a"))
    target = Artifact.open(place).manifest.target
    refinish(place, target=replace(target, **changes))
    return place


def test_engine_of_another_gpu_or_tensorrt(built: Built, tmp_path: Path) -> None:
    place = changed(built, tmp_path, compute_capabilities=("1.0",))
    with pytest.raises(InputError, match=r"compute capability 1\.0, but the .* here has \d"):
        pipeline.load(place)
    shutil.rmtree(place)
    place = changed(built, tmp_path, version="8.5.9")
    with pytest.raises(TargetMissing, match=r"built with tensorrt 8\.5\.9, but .* is installed"):
        pipeline.load(place)
    shutil.rmtree(place)
    place = changed(built, tmp_path, compute_capabilities=())
    with pytest.raises(InputError, match="does not say which GPU"):
        pipeline.load(place)


LOAD = """
import sys
import pipeline
try:
    pipeline.load(sys.argv[1])
except pipeline.PipelineError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("damage", ["cut", "zeros", "other", "empty"])
def test_bad_plans(built: Built, tmp_path: Path, damage: str) -> None:
    place = Path(shutil.copytree(built("FIXED"), tmp_path / "a"))
    plan = place / "engine.plan"
    data = plan.read_bytes()
    plan.write_bytes(
        {
            "cut": data[: len(data) // 2],
            "zeros": bytes(len(data)),
            "other": (built("TWO_PROFILES") / "engine.plan").read_bytes(),
            "empty": b"",
        }[damage]
    )
    with pytest.raises(ArtifactError, match=r"engine\.plan: (is cut|its content)"):
        pipeline.load(place)
    refinish(place)  # although the manifest states it
    said = in_a_process(LOAD, place)
    assert re.match(r"ArtifactError: .*(does not load|are from different builds)[^\n]*\n$", said), (
        said
    )


def test_missing_plugin(built: Built, tmp_path: Path) -> None:
    place = Path(shutil.copytree(built("FIXED"), tmp_path / "a"))
    build = Artifact.open(place).manifest.build
    assert build is not None
    refinish(place, build=replace(build, plugins=("./libnone.so",)))
    with pytest.raises(InputError, match=r"no hash of the plugin \./libnone\.so, so the plugin is"):
        pipeline.load(place)


def test_no_such_gpu(built: Built) -> None:
    with pytest.raises(InputError, match="device=99: there are"):
        pipeline.load(built("FIXED"), device=99)


def test_bad_sizes_lose_nothing(loaded: Loaded, reference: References) -> None:
    engine, x = loaded("PICTURE"), picture(10, 12)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"x": picture(3, 10)}, r"x axis 2: h=3 is outside 4\.\.96"),
        ({"x": picture(10, 97)}, r"x axis 3: w=97 is outside"),
        ({"x": x[0]}, "x: rank 3, expected 4"),
        ({"x": x[:, :2].copy()}, "x axis 1: size 2, expected 3"),
        ({"x": x[:, :, ::2]}, "x: is not C-contiguous"),
        ({"x": x.astype(np.float64)}, "x: dtype float64, expected float32"),
        ({"x": x.tolist()}, "x: is a list; pass a numpy array"),
        ({"x": OnGpu(picture(3, 10))}, "x axis 2: h=3 is outside"),
        ({"x": OnGpu(x.astype(np.float16))}, "x: dtype float16, expected float32"),
        ({"x": x, "stream": 5}, "stream= needs inputs on the GPU"),
        ({"y": x}, "no input 'y'"),
        ({}, "missing: x"),
    ]
    for feed, words in bad:
        with pytest.raises(InputError, match=words):
            engine(**feed)
    same(engine(x=x), reference("PICTURE")(x=x))
