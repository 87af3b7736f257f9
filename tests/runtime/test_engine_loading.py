"""The runtime without a GPU: arguments, sizes, memory accounting, and loading plans.

tests/gpu has the tests that need a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import HERE, refinish

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.errors import ArtifactError, EngineError, InputError, OutOfMemory, TargetMissing
from pipeline.machine.gpu import Gpu, find_gpu
from pipeline.runtime import trust as _trust
from pipeline.runtime.arrays import Port, device_view, host_array, named_inputs, stream_handle
from pipeline.runtime.pool import ALIGN, DIRTY, QUIET, Lease, Pool, block_size
from pipeline.runtime.sizes import EngineSizes, best_profile
from pipeline.spec.dims import Dim, DimExpr
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Input, Output

F32, I32, I64 = (np.dtype(name) for name in ("float32", "int32", "int64"))
X = Port("x", F32, F32)
IDS = Port("ids", I32, I64)  # of a TensorRT without int64


def run_python(code: str, *arguments: object) -> Any:
    """The output of a fresh Python process, as JSON."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=HERE.parent, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


HEAVY = "{'torch', 'onnx', 'onnxruntime', 'polygraphy', 'onnx_graphsurgeon', 'sympy', 'onnx_ir'}"


def test_importing_is_light() -> None:
    code = f"""
import json, sys, pipeline
pipeline.load, pipeline.Engine
print(json.dumps(sorted(({HEAVY} | {{'tensorrt', 'tensorrt_rtx', 'cuda'}}) & sys.modules.keys())))
"""
    assert run_python(code) == []


def test_loading_needs_no_converter(artifact: Path) -> None:
    code = f"""
import json, sys, pipeline
try:
    pipeline.load(sys.argv[1])
except pipeline.PipelineError as error:
    said = str(error)
import pipeline.runtime.call, pipeline.runtime.bindings  # what it imports where there is a GPU
print(json.dumps([said, sorted({HEAVY} & sys.modules.keys())]))
"""
    said, heavy = run_python(code, artifact)
    assert heavy == []
    if isinstance(find_gpu(), str):
        assert said == f"{artifact}: an engine needs a GPU, but {find_gpu()}"
    assert "\n" not in said


def test_what_converts_comes_when_asked_for() -> None:
    assert callable(pipeline.run)
    assert pipeline.Config("raft").model == "raft"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        pipeline.lode  # noqa: B018


# which plan may be loaded


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=": no such folder; pass the folder"):
        pipeline.load(tmp_path / "none")


def test_no_engine_in_it(artifact: Path) -> None:
    (artifact / "engine.plan").unlink()
    refinish(artifact, build=None)
    with pytest.raises(ArtifactError, match=r"has no engine\.plan yet; run `pipeline build"):
        pipeline.load(artifact)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:1000], r"engine\.plan: is cut short: it has 1000 of \d+ bytes"),
        (lambda data: data[:-1] + b"?", r"engine\.plan: its content was changed"),
        (lambda data: bytes(len(data)), r"engine\.plan: its content was changed"),
    ],
)
def test_damaged_plans(artifact: Path, damage: Any, words: str) -> None:
    plan = artifact / "engine.plan"
    plan.write_bytes(damage(plan.read_bytes()))
    with pytest.raises(ArtifactError, match=words):
        pipeline.load(artifact)


def test_edited_manifest(artifact: Path) -> None:
    name = artifact / "manifest.json"
    name.write_text(name.read_text().replace('"h"', '"q"'))
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        pipeline.load(artifact)


def test_engine_of_another_tensorrt(artifact: Path) -> None:
    target = Artifact.open(artifact).manifest.target
    refinish(artifact, target=dataclasses.replace(target, version="1.7.0.9"))
    with pytest.raises(
        TargetMissing, match=r"built with tensorrt_rtx 1\.7\.0\.9, but .* is installed; run `pi"
    ):
        pipeline.load(artifact)
    other = dataclasses.replace(target, name="tensorrt-8.6", flavour="tensorrt", version="8.6.0")
    manifest = refinish(artifact, target=other)
    if _trust.installed_version(_trust.find_target("tensorrt-8.6")) is None:
        with pytest.raises(TargetMissing, match=r"needs tensorrt 8\.6\.0, which is not installed"):
            pipeline.load(artifact)
    assert manifest.target.version == "8.6.0"


def test_which_gpu(artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    _trust.check_gpu(manifest, "a", Gpu("RTX 4090", (8, 9)))  # portable
    with pytest.raises(InputError, match=r"a: TensorRT-RTX does not run on H200 .*9\.0"):
        _trust.check_gpu(manifest, "a", Gpu("H200", (9, 0)))
    target = dataclasses.replace(
        manifest.target, name="tensorrt-8.6", flavour="tensorrt", compute_capabilities=("9.0",)
    )
    bound = dataclasses.replace(manifest, target=target)
    _trust.check_gpu(bound, "a", Gpu("H100", (9, 0)))
    with pytest.raises(
        InputError, match=r"for compute capability 9\.0, but the A100 here has 8\.0; run"
    ):
        _trust.check_gpu(bound, "a", Gpu("A100", (8, 0)))
    unknown = dataclasses.replace(
        bound, target=dataclasses.replace(target, compute_capabilities=())
    )
    with pytest.raises(InputError, match="does not say which GPU its engine is for"):
        _trust.check_gpu(unknown, "a", Gpu("H100", (9, 0)))


# arguments


def test_names_of_inputs() -> None:
    names = ("image1", "image2")
    assert named_inputs(None, {"image1": 1, "image2": 2}, names) == {"image1": 1, "image2": 2}
    assert named_inputs({"a.b": 1}, {}, ("a.b",)) == {"a.b": 1}
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (None, {"image1": 1}, "missing: image2; the inputs are: image1, image2"),
        (None, {}, "missing: image1, image2"),
        (None, {"image1": 1, "imgae2": 2}, "no input 'imgae2', did you mean 'image2'"),
        (None, {"image1": 1, "image2": 2, "flow": 3}, "no input 'flow'; the inputs are"),
        ({"image1": 1}, {"image2": 2}, "as one mapping or as keywords, not both"),
        ([1, 2], {}, "a list without a name; pass it by name; the inputs are: image1, image2"),
    ]
    for mapping, keywords, words in bad:
        with pytest.raises(InputError, match=words):
            named_inputs(mapping, keywords, names)


def test_numpy_arrays() -> None:
    x = np.ones((2, 3), np.float32)
    assert host_array(X, x) is x
    bad: list[tuple[Port, Any, str]] = [
        (X, x.astype(np.float64), "x: dtype float64, expected float32; convert it"),
        (X, x.astype(">f4"), "x: dtype >f4, expected float32"),
        (X, x.T, r"x: is not C-contiguous \(strides \(4, 12\) bytes for shape \(3, 2\)\)"),
        (X, [[1.0]], "x: is a list; pass a numpy array, or an array on the GPU"),
        (X, 1.0, "x: is a float; pass a numpy array"),
        (X, np.float32(1), "x: is a float32; pass a numpy array"),
        (X, np.ma.masked_less(x, 2), r"x: is a masked array; pass its values \(.filled\(VALUE\)\)"),
        (X, None, "x: is a NoneType"),
        (
            IDS,
            x,
            "ids: dtype float32, expected int32 .the model's dtype is int64, which this TensorRT",
        ),
        (IDS, np.array([0, 2**31]), r"ids: holds 0\.\.2147483648; .*ends at 2147483647"),
        (IDS, np.array([-(2**31) - 1]), "ids: holds -2147483649"),
    ]
    for port, value, words in bad:
        with pytest.raises(InputError, match=words):
            host_array(port, value)


def test_int64_as_int32() -> None:
    ids = np.array([[5, -(2**31)], [2**31 - 1, 0]])
    got = host_array(IDS, ids)
    assert got.dtype == I32
    np.testing.assert_array_equal(got, ids)
    assert host_array(IDS, got) is got
    assert host_array(IDS, np.zeros((2, 0), np.int64)).shape == (2, 0)
    assert host_array(Port("ids", I64, I64), ids) is ids
    with pytest.raises(
        InputError, match=r"dtype float64, expected float32 .the model's dtype is float64"
    ):
        host_array(Port("x", F32, np.dtype(np.float64)), np.ones(2))


class Dlpack:
    """An array of another library, in host memory."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = value

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **how: Any) -> Any:
        how["stream"] = None  # numpy has no such dtype
        return self._value.__dlpack__(**how)


class Broken:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("can't export tensors\nthat require gradient")


def test_arrays_that_are_not_on_the_gpu() -> None:
    x = np.ones((2, 3), np.float32)
    bad: list[tuple[Any, str]] = [
        (x, "x: is a numpy array, but other inputs are on the GPU; pass all on one side"),
        (Dlpack(x), "x: the Dlpack is in host memory, the engine on GPU 0; copy it there, or pass"),
        (Broken(), "x: the Broken can't be read: can't export tensors that require gradient"),
        ([1], "x: is a list; pass a numpy array, or an array on the GPU"),
    ]
    for value, words in bad:
        with pytest.raises(InputError, match=words):
            device_view(X, value, 0, 7)
    with pytest.raises(InputError, match="x: is a Dlpack, but other inputs are numpy arrays"):
        host_array(X, Dlpack(x))


def test_streams_of_callers() -> None:
    class Torch:
        cuda_stream = 77

    class Core:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 78)

    class Cupy:
        ptr = 1

    assert [stream_handle(s) for s in (5, 0, 1, Torch(), Core(), Cupy())] == [5, 0, 0, 77, 78, 0]
    bad: list[tuple[Any, str]] = [
        ("s", "stream='s': pass a handle, or an object with"),
        (True, "stream=True: pass"),
        (-1, "stream=-1: pass"),
        (1.5, "stream=1.5: pass"),
        (2, "per-thread default stream can't be used"),
    ]
    for stream, words in bad:
        with pytest.raises(InputError, match=words):
            stream_handle(stream)


# sizes


def test_the_profile_that_fits_best() -> None:
    wide = Profile("wide", {"b": (1, 8, 64), "s": (0, 512, 4096)})
    decode = Profile("decode", {"b": (1, 8, 64), "s": (1, 1, 1)})
    short = Profile("short", {"b": (1, 1, 4), "s": (0, 16, 128)})
    twin = Profile("twin", {"b": (1, 8, 8), "s": (0, 512, 512)})
    profiles = (wide, decode, short, twin)
    for (b, s), name in {
        (8, 1): "decode",
        (1, 1): "decode",  # |log 8| against |log 16|
        (1, 16): "short",
        (2, 0): "short",
        (4, 100): "twin",
        (2, 40): "short",
        (64, 4096): "wide",
        (8, 512): "twin",  # equally near, but narrower
        (9, 512): "wide",
    }.items():
        assert profiles[best_profile(profiles, {"b": b, "s": s})].name == name, (b, s)
    with pytest.raises(
        InputError, match=r"no profile allows b=65,s=1; .* decode: b 1\.\.64, s 1\.\.1;"
    ):
        best_profile(profiles, {"b": 65, "s": 1})
    assert best_profile((Profile("only"),), {}) == 0
    assert best_profile((wide, wide), {"b": 3, "s": 3}) == 0


@pytest.fixture
def sizes() -> EngineSizes:
    """h in 16..64 by 8, w in 8..100; y [1, 2*h, w], n [found]."""
    dims = {"h": Dim("h", 16, 32, 64, 8), "w": Dim("w", 8, 32, 100, 1)}
    h, w = dims.values()
    declared = Interface(
        inputs=(
            Input("x", (1, h, w), "float32", -1.0, 1.0),
            Input("half", (h // 2,), "int64", 0.0, 9.0),
        ),
        outputs=(
            Output("y", (1, 2 * h, w), dtype="float32"),
            Output("n", (1, DimExpr("found")), dtype="int64"),
        ),
        rules=("h + w <= 120",),
        profiles=(
            Profile("low", {"h": (16, 16, 32), "w": (8, 8, 32)}),
            Profile("high", {"h": (16, 48, 64), "w": (8, 64, 100)}),
        ),
    )
    return EngineSizes(declared)


def test_sizes_are_solved_in_the_dims_names(sizes: EngineSizes) -> None:
    assert sizes.solve({"x": (1, 24, 50), "half": (12,)}) == {"h": 24, "w": 50}
    bad: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
        ((1, 24), (12,), "x: rank 2, expected 3"),
        ((2, 24, 50), (12,), "x axis 0: size 2, expected 1"),
        ((1, 72, 50), (36,), r"x axis 1: h=72 is outside 16\.\.64"),
        ((1, 25, 50), (12,), "x axis 1: h=25 is not a multiple of 8; nearest: 24, 32"),
        ((1, 24, 50), (13,), "half axis 0: size 13, expected h // 2 = 12 with h=24"),
        ((1, 64, 90), (32,), r"h \+ w <= 120 does not hold at h=64,w=90"),
    ]
    for x, half, words in bad:
        with pytest.raises(InputError, match=words.replace("//", "//")):
            sizes.solve({"x": x, "half": half})


def test_sizes_for_a_graph(sizes: EngineSizes) -> None:
    assert sizes.check({"w": 50, "h": 24}) == {"h": 24, "w": 50}
    assert sizes.input_shapes({"h": 24, "w": 50}) == {"x": (1, 24, 50), "half": (12,)}
    sample = sizes.sample({"h": 24, "w": 50})
    assert sample["x"].shape == (1, 24, 50)
    assert 0 <= sample["half"].min() <= sample["half"].max() < 9
    for given, words in (
        ({"h": 24}, "no size for w; the dims are: h, w"),
        ({"h": 24, "w": 50, "b": 1}, "no dim 'b'; the dims are: h, w"),
        ({"h": 25, "w": 50}, "h=25 is not a multiple of 8"),
        ({"h": 24, "w": 50.0}, "w=50.0 is not a whole number"),
        ({"h": 64, "w": 90}, "does not hold"),
    ):
        with pytest.raises(InputError, match=words):
            sizes.check(given)  # type: ignore[arg-type]


def test_profiles_by_sizes(sizes: EngineSizes) -> None:
    assert sizes.profile({"h": 16, "w": 8}) == 0
    assert sizes.profile({"h": 16, "w": 8}, forced=1) == 1
    assert sizes.profile({"h": 32, "w": 32}) == 1
    with pytest.raises(InputError, match=r"no profile allows h=40,w=8; .* are low: h 16\.\.32, w"):
        sizes.profile({"h": 40, "w": 8}, forced=0)


def test_outputs_are_held_against_the_manifest(sizes: EngineSizes) -> None:
    at = {"h": 24, "w": 50}
    sizes.check_output("y", (1, 48, 50), at)
    sizes.check_output("n", (1, 17), at)  # the number is unknown before the run
    for name, shape in (("y", (1, 48, 51)), ("y", (48, 50)), ("n", (2, 17)), ("n", (1, 1, 1))):
        with pytest.raises(EngineError, match=rf"output {name} has shape .* at h=24,w=50, but"):
            sizes.check_output(name, shape, at)


def test_the_most_bytes(sizes: EngineSizes) -> None:
    most = sizes.most_bytes({"x": 4, "half": 4, "y": 2, "n": 4})
    assert most == {"x": 64 * 100 * 4, "half": 32 * 4, "y": 128 * 100 * 2}


# memory


class Host:
    """A limited amount of memory of the C library. Streams are recorded, not run."""

    def __init__(self, total: int) -> None:
        self.total, self.blocks, self.synchronised = total, dict[int, int](), 0
        self._c = ctypes.CDLL(None)
        self._c.malloc.restype, self._c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._c.free.argtypes = [ctypes.c_void_p]

    def allocate(self, nbytes: int, /) -> int:
        if sum(self.blocks.values()) + nbytes > self.total:
            return 0
        pointer = int(self._c.malloc(nbytes))
        self.blocks[pointer] = nbytes
        return pointer

    def free(self, pointer: int, /) -> None:
        del self.blocks[pointer]
        self._c.free(pointer)

    def memory(self) -> tuple[int, int]:
        return self.total - sum(self.blocks.values()), self.total

    def synchronise(self) -> None:
        self.synchronised += 1


@pytest.fixture
def host() -> Host:
    return Host(total=1 << 20)


A, B = 101, 102  # streams


def test_block_sizes() -> None:
    assert block_size(1, None) == ALIGN
    assert block_size(0, 1000) == ALIGN
    assert block_size(5000, None) == 8192
    assert block_size(1000000, 1000000) == -(-1000000 // ALIGN) * ALIGN
    assert block_size(600000, 1000000) == block_size(1000000, 1000000)
    assert block_size(500000, 1000000) == -(-500000 // ALIGN) * ALIGN
    assert block_size(3000, 2000) == 4096  # more than the assumed maximum
    for most in (None, 1, 511, 513, 100003):
        for nbytes in (1, 2, 500, 512, 513, 1000, 99999, 100003):
            size = block_size(nbytes, most)
            assert size >= nbytes
            assert size % ALIGN == 0
            assert most is None or nbytes > most or size <= max(most + ALIGN, ALIGN)
    classes = {block_size(n, 100003) for n in range(1, 100004, 7)}
    assert len(classes) <= math.log2(100003 / ALIGN) + 2


def test_blocks_are_used_again_on_their_stream(host: Host) -> None:
    pool = Pool(host, {"y": 4096})
    first, other = pool.take("y", 3000, A), pool.take("y", 3000, A)
    assert first.pointer != other.pointer
    pointer = first.pointer
    del first
    assert pool.take("y", 4000, B).pointer != pointer  # its stream may still use it
    again = pool.take("y", 2500, A)
    assert again.pointer == pointer
    assert host.synchronised == 0
    again.stream = QUIET
    del again
    assert pool.take("y", 4096, 103).pointer == pointer
    assert pool.take("z", 1, A).pointer != pointer
    del other


def test_readers_are_waited_for(host: Host) -> None:
    told: list[Any] = []

    class Reader:
        def release(self) -> None:
            told.append("released")

        def wait(self, stream: int, /) -> None:
            told.append(stream)

    pool = Pool(host)
    lease = pool.take("y", 100, A)
    lease.after.append(Reader())
    assert told == []
    del lease
    assert told == ["released"]
    lease = pool.take("y", 100, A)
    assert told == ["released", A]
    del lease
    pool.take("y", 100, A)
    assert told == ["released", A]
    dirty = pool.take("y", 100, A)
    pointer, dirty.stream = dirty.pointer, DIRTY
    del dirty
    assert host.synchronised == 0
    assert pool.take("y", 100, A).pointer == pointer
    assert host.synchronised == 1


def test_blocks_grow_in_place(host: Host) -> None:
    pool = Pool(host, {"y": 64 * ALIGN})
    for nbytes in (1, 5000, 3, 20000, 32768, 7, 100, 32768):
        pool.take("y", nbytes, A)
        assert len(host.blocks) == 1  # the smaller block was freed
    assert pool.nbytes == sum(host.blocks.values()) == 64 * ALIGN
    held = [pool.take("y", 32768, A) for _ in range(3)]
    assert pool.nbytes == 3 * 64 * ALIGN
    del held
    rng = np.random.default_rng(0)
    for _ in range(500):
        pool.take("y", int(rng.integers(1, 32769)), A)
    assert pool.nbytes == 3 * 64 * ALIGN


def test_streams_that_come_and_go(host: Host) -> None:
    pool = Pool(host, {"y": 4096})
    for stream in range(1000, 1200):
        pool.take("y", 4096, stream)
    assert len(host.blocks) <= 20


def test_memory_that_runs_out(host: Host) -> None:
    pool = Pool(host, {"y": 900_000, "x": 500_000})
    pool.take("x", 500_000, A)  # free, but at a wrong place
    large = pool.take("y", 900_000, A)
    assert len(host.blocks) == 1
    with pytest.raises(
        OutOfMemory, match=r"output y needs 200000 bytes of GPU memory, but only \d+"
    ):
        pool.take("y", 200_000, A, "output y")
    small = pool.take(
        "y", 100_000, A
    )  # no room for its size class of 112640, but enough for its size
    assert small.capacity >= 100_000
    del large
    assert pool.take("y", 800_000, B).capacity >= 900_000
    with pytest.raises(OutOfMemory) as info:
        pool.take("z", 2 << 20, A)
    assert info.value.wanted == 2 << 20
    assert 0 < info.value.free < 1 << 20
    assert pool.take("x", 1000, A).capacity >= 1000


def test_closing_a_pool(host: Host) -> None:
    pool = Pool(host)
    held, free = pool.take("y", 1000, A), pool.take("y", 1000, A)
    del free
    pool.close()
    assert list(host.blocks) == [held.pointer]
    assert pool.nbytes == held.capacity
    ring: list[Any] = [held]
    ring.append(ring)
    del held, ring
    gc.collect()
    assert host.blocks == {}
    assert pool.nbytes == 0


def test_a_lease_is_one_hold(host: Host) -> None:
    pool = Pool(host)
    lease = pool.take("y", 1000, A)
    other: Lease = lease
    del lease
    assert pool.take("y", 1000, A).pointer != other.pointer
