"""The engine on a GPU: values, exact shapes, profiles, dtypes, data-dependent sizes, threads."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_engines import (
    ROOT,
    Built,
    Loaded,
    OnGpu,
    References,
    hosted,
    in_a_process,
    picture,
    same,
    sizes,
    streams,
)
from on_gpu import TARGET, WHY

import pipeline
from pipeline import EngineError, InputError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TARGET is None, reason=WHY)]


def test_any_order_of_sizes(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine.poison = True
    for turn, (h, w) in enumerate([(96, 96), (4, 4), *sizes(30), (4, 96), (96, 4)]):
        x = picture(h, w, turn)
        got = engine(x=x)
        same(got, right(x=x))
        assert got["y"].shape == (1, 4, 2 * h, 2 * w)
        x += 1  # the input and the outputs belong to the caller
        kept = got["y"].copy()
        engine(x=x)
        np.testing.assert_array_equal(got["y"], kept)


def test_what_it_says_of_itself(loaded: Loaded) -> None:
    engine = loaded("PICTURE")
    assert [i.name for i in engine.inputs] == ["x"]
    assert [o.name for o in engine.outputs] == ["y", "z", "top"]
    assert [p.name for p in engine.profiles] == ["default"]
    assert engine.manifest.name == "picture"
    assert engine.gpu
    before = engine.device_memory
    engine(x=picture(50, 50))
    assert engine.device_memory > before > 0


def test_profiles(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("TWO_PROFILES"), reference("TWO_PROFILES")
    engine.poison = True
    rng = np.random.default_rng(0)
    expected = {
        (4, 32): "all",
        (4, 1): "decode",
        (1, 1): "decode",
        (1, 100): "one",
        (16, 128): "all",
    }
    for (b, s), name in [*expected.items(), *reversed(expected.items())]:
        x = rng.uniform(-1, 1, (b, s, 8)).astype(np.float32)
        same(engine(x=x), right(x=x))
        assert engine.profiles[used_profile(engine, (b, s, 8))].name == name
    engine.profile = 0
    x = np.ones((1, 1, 8), np.float32)
    same(engine(x=x), right(x=x))
    engine.profile = 1
    with pytest.raises(InputError, match=r"no profile allows b=1,s=5; .*decode: b 1\.\.16"):
        engine(x=np.ones((1, 5, 8), np.float32))
    with pytest.raises(InputError, match="profile=3: there are 3"):
        engine.profile = 3


def used_profile(engine: pipeline.Engine, shape: tuple[int, ...]) -> int:
    """The profile of the engine's runs for a shape."""
    found = [s for s in engine._runs._sized.values() if s.inputs[0][1] == shape]
    assert len(found) == 1
    return found[0].profile


def test_integers_and_bools(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("IDS"), reference("IDS")
    rng = np.random.default_rng(0)
    for b, s in ((2, 8), (4, 64), (1, 1), (3, 17)):
        ids, mask = rng.integers(0, 50, (b, s)), rng.uniform(size=(b, s)) > 0.5
        got = engine(ids=ids, mask=mask)
        assert got["next"].dtype == np.int64
        same(got, right(ids=ids, mask=mask))
    ids, mask = np.zeros((1, 4), np.int64), np.ones((1, 4), bool)
    if narrow(engine):
        same(engine(ids=ids.astype(np.int32), mask=mask), right(ids=ids, mask=mask))
        ids[0, 1] = 2**31
        with pytest.raises(InputError, match=r"ids: holds 0\.\.2147483648; .* ends at 2147483647"):
            engine(ids=ids, mask=mask)
        with pytest.raises(
            InputError, match=r"ids: dtype int64, expected int32 .the model's dtype"
        ):
            engine(ids=OnGpu(ids), mask=OnGpu(mask))
        ids = np.array([[1, 2, 3, 49]])
        on_gpu = engine(ids=OnGpu(ids.astype(np.int32)), mask=OnGpu(mask))
        assert on_gpu["next"].dtype == np.int32
        np.testing.assert_array_equal(on_gpu["next"].numpy(), ids + 1)
    with pytest.raises(InputError, match="mask: dtype uint8, expected bool"):
        engine(ids=ids, mask=mask.astype(np.uint8))


def narrow(engine: pipeline.Engine) -> bool:
    """True if this TensorRT has no int64."""
    return engine._runs.plan.inputs[0].dtype == np.int32


def test_sizes_that_depend_on_data(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("FOUND"), reference("FOUND")
    engine.poison = True
    rng = np.random.default_rng(0)
    for n in (5000, 1, 100, 7, 5000, 300):
        x = rng.uniform(-1, 1, n).astype(np.float32)
        same(engine(x=x), right(x=x))
        got = engine(x=OnGpu(x))["places"]
        np.testing.assert_array_equal(got.numpy(), right(x=x)["places"])
    x = -np.ones(50, np.float32)
    assert engine(x=x)["places"].shape == (1, 0)
    assert engine(x=-x)["places"].shape == (1, 50)
    held = [engine(x=OnGpu(np.full(n, 1, np.float32)))["places"] for n in (9, 8, 9)]
    assert [array.shape for array in held] == [(1, 9), (1, 8), (1, 9)]
    assert len({array.ptr for array in held}) == 3
    for array in held:
        np.testing.assert_array_equal(array.numpy()[0], np.arange(array.shape[1]))
    with pytest.raises(InputError, match="out: the shape of places depends on the data"):
        engine(x=OnGpu(x), out={"places": OnGpu(np.zeros((1, 50), np.int32))})
    with pytest.raises(EngineError, match="captured at n=50: the shape of places"):
        engine.capture({"n": 50})
    assert engine(x=x)["places"].shape == (1, 0)


def test_no_elements(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("CACHE"), reference("CACHE")
    engine.poison = True
    rng = np.random.default_rng(0)
    for past_len, s in ((0, 32), (8, 1), (0, 1), (32, 8), (0, 7)):
        feed = {
            "past": rng.uniform(-1, 1, (2, past_len, 8)).astype(np.float32),
            "new": rng.uniform(-1, 1, (2, s, 8)).astype(np.float32),
        }
        same(engine(**feed), right(**feed))
        same(hosted(engine({n: OnGpu(v) for n, v in feed.items()})), right(**feed))
    engine.capture({"past_len": 0, "s": 7})
    same(engine(**feed), right(**feed))
    with pytest.raises(InputError, match=r"past_len \+ s <= 40 does not hold at past_len=30,s=20"):
        engine(past=np.zeros((2, 30, 8), np.float32), new=np.zeros((2, 20, 8), np.float32))


def test_an_output_as_the_next_input(loaded: Loaded) -> None:
    engine = loaded("CACHE")
    cache: Any = OnGpu(np.zeros((2, 0, 8), np.float32))
    want = np.zeros((2, 0, 8), np.float32)
    for n in range(12):
        new = np.full((2, 1, 8), n, np.float32)
        cache = engine(past=cache, new=OnGpu(new), stream=streams()[n % 2])["present"]
        want = np.concatenate([want, new], axis=1)
    np.testing.assert_array_equal(cache.numpy(), want)


def test_input_read_on_the_host(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("EXPANDED"), reference("EXPANDED")
    x = np.array([[1, 2, 3]], np.float32)
    for rows in (4, 50, 1, 4, 33):
        shape = np.array([rows, 3])
        same(engine(x=x, shape=shape), right(x=x, shape=shape))
        got = engine(x=OnGpu(x), shape=shape)["y"]
        np.testing.assert_array_equal(got.numpy(), right(x=x, shape=shape)["y"])
    on_host = [port for port in engine._runs.plan.inputs if port.on_host]
    assert [port.name for port in on_host] == ["shape"]
    with pytest.raises(EngineError, match="computes sizes on the host from shape's values"):
        engine.capture({})
    same(engine(x=x, shape=shape), right(x=x, shape=shape))


def test_without_dims(loaded: Loaded) -> None:
    engine = loaded("FIXED")
    x = np.array([[1, -2, 3], [-4, 5, -6]], np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(engine(x=x)["y"], np.maximum(x, 0))
        engine.capture({})
    assert engine.captured == ({},)
    np.testing.assert_array_equal(engine(x=OnGpu(-x))["y"].numpy(), np.maximum(-x, 0))


def test_threads(loaded: Loaded, reference: References) -> None:
    engine, right = loaded("PICTURE"), reference("PICTURE")
    engine.poison = True
    engine.capture({"h": 20, "w": 20})
    plan = [(h, w) for h, w in sizes(12)] + [(20, 20)]
    wanted = {(h, w): right(x=picture(h, w)) for h, w in plan}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = np.random.default_rng(number)
            for _ in range(40):
                h, w = plan[int(rng.integers(len(plan)))]
                x = picture(h, w)
                if number == 0:
                    same(engine(x=x), wanted[h, w])
                else:
                    stream = None if number == 1 else made[number - 2]
                    same(hosted(engine(x=OnGpu(x), stream=stream)), wanted[h, w])
        except BaseException as error:
            errors.append(error)

    made = streams()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_the_readmes_example(built: Built, tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.S | re.M)
    (example,) = blocks
    place = tmp_path / "artifacts" / "raft"
    place.parent.mkdir()
    place.symlink_to(built("LIKE_RAFT"))
    code = f"import os, sys; os.chdir(sys.argv[1])\n{example}"
    assert in_a_process(code, tmp_path) == "(1, 2, 441, 1023)\n"
