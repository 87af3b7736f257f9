"""Building: the results, the refusals, and their messages."""

from __future__ import annotations

import ctypes
import errno
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import pytest
import tiny
from helpers import files_under, refinish

from pipeline.build import build as build_module
from pipeline.build.build import build
from pipeline.build.network import open_network, parsed_network
from pipeline.build.settings import BuildOptions, TimingCache, configure
from pipeline.convert.driver import run, run_export
from pipeline.errors import BuildError, InputError, TargetMissing
from pipeline.machine.target import TARGETS, installed_version, use
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim, Size
from pipeline.spec.effort import Effort
from pipeline.spec.interface import Interface
from pipeline.spec.model import ModelSpec
from pipeline.spec.precision import check_precision
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import Input

RTX = TARGETS["rtx-1.7"]
H = Dim("h", 2, 4, 8)
ALL = [Profile("all").resolve({"h": H})]
TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[1,h] x) => (float[1,h] y) {{ {0} }}"""
PRODUCT = TEXT.replace(" {{", " <float[1,1] k = {{0.5}}> {{").replace("[1,h]", "[h,1]")


def model(tmp_path: Path, body: str, text: str = TEXT) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text.format(body)), path)
    return path


def declared(shape: tuple[Size, ...], profiles: list[Profile]) -> Interface:
    return Interface((Input("x", shape),), profiles=tuple(profiles))


def built(path: Path, **changes: Any) -> build_module.Built:
    shape, profiles = changes.pop("shape", (1, H)), changes.pop("profiles", ALL)
    interface = changes.pop("interface", declared(shape, profiles))
    options = BuildOptions(**{"target": RTX, **changes})
    return build(path, path.with_name("engine.plan"), interface, options)


def here(path: Path, profiles: list[Profile]) -> Any:
    """Runs the child process's work in this process, so that the test sees TensorRT's calls."""
    return build_module._build_here(
        build_module._BuildJob(
            path, path.with_name("engine.plan"), declared((1, H), profiles), BuildOptions(RTX), (),
            path.with_name("trail"),
        )
    )  # fmt: skip


def test_engine_is_well_formed_without_a_gpu(tmp_path: Path) -> None:
    done = built(model(tmp_path, "y = Relu(x)"))
    plan = tmp_path / "engine.plan"
    assert done.version == installed_version(RTX)
    assert done.plan_bytes == plan.stat().st_size > 1000
    assert done.validity.startswith("well-formed (")
    assert set(done.library_seconds) == {"tensorrt parse", "tensorrt build"}
    assert done.plugins == ()
    assert done.peak_memory > 50 << 20
    trt = use(RTX)
    _, diagnostics = trt.Runtime(trt.Logger(trt.Logger.ERROR)).get_engine_validity(
        plan.read_bytes()
    )
    assert int(diagnostics) & 32 == 0


def test_malformed_bytes_are_told() -> None:
    with pytest.raises(BuildError, match="reports that its new engine is malformed"):
        build_module._validity(use(RTX), RTX, b"no engine" * 100)


def exported_and_built(spec: ModelSpec, tmp_path: Path) -> None:
    """Builds torch's export without any pass."""
    run_export(Config(spec, out=tmp_path / "a"))
    path = tmp_path / "a" / "exported.onnx"
    profile = Profile("all").resolve(spec.dims)
    built(path, interface=replace(spec.interface, profiles=(profile,)))


def test_unsupported_op_names_node_module_and_line(tmp_path: Path) -> None:
    def forward(x: Any) -> Any:
        return x + x[:, :, :3, :3].nonzero().sum()  # the line

    lines, first = inspect.getsourcelines(forward)
    line = first + next(n for n, text in enumerate(lines) if "the line" in text)
    with pytest.raises(BuildError) as caught:
        exported_and_built(tiny.of(forward), tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("target rtx-1.7 refuses the NonZero node node_")
    assert f", from module (top) at {__file__}:{line}: " in text
    assert "(slice_2 [1, 3, 3, 3] -> " in text
    assert "UNSUPPORTED_NODE" in caught.value.detail
    assert caught.value.exit_code == 1


def test_module_inside_of_a_module_is_named(tmp_path: Path) -> None:
    import torch

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x[:, :, :3, :3].nonzero().sum()

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Sequential(torch.nn.ReLU(), Inner())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    spec = tiny.of(lambda x: x)
    object.__setattr__(spec, "build", lambda _: Outer())
    with pytest.raises(BuildError, match=r"from module head\.1 at .*test_build\.py:\d+: "):
        exported_and_built(spec, tmp_path)


def test_unsupported_op_without_metadata(tmp_path: Path) -> None:
    body = "n = NonZero(x) m = Cast<to=1>(n) s = ReduceSum<keepdims=0>(m) y = Add(x, s)"
    with pytest.raises(
        BuildError, match=r"target rtx-1\.7 refuses the NonZero node that makes n: "
    ):
        built(model(tmp_path, body))
    assert not (tmp_path / "engine.plan").exists()


def test_parsed_but_not_built(tmp_path: Path) -> None:
    # TopK beyond 3840 parses, and fails only in the builder
    text = """<ir_version: 8, opset_import: ["" : 18]>
g (float[1,h] x) => (float[1,4000] y, int64[1,4000] i)
<int64[1] k = {{4000}}> {{ y, i = TopK(x, k) {0} }}"""
    dim = Dim("h", 4000, 4500, 5000)
    path = model(tmp_path, "", text)
    with pytest.raises(
        BuildError, match=r"the TopK node that makes y: K exceeds the maxi"
    ) as caught:
        built(path, shape=(1, dim), profiles=[Profile("all").resolve({"h": dim})])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "engine.plan").exists()


def test_operator_of_nobody(tmp_path: Path) -> None:
    text = TEXT.replace('"" : 18', '"" : 18, "mine" : 1')
    with pytest.raises(BuildError, match="no plugin for the mine::Foo node that makes y: "):
        built(model(tmp_path, "y = mine.Foo(x)", text))


def test_no_onnx_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"^model\.onnx: not a valid ONNX model: "):
        built(path)


@pytest.mark.parametrize(
    "profiles",
    [
        [Profile("bad", {"h": (8, 4, 2)})],
        [Profile("good", {"h": (2, 4, 8)}), Profile("bad", {"h": (4, 2, 8)})],
    ],
)
def test_invalid_profile_does_not_go_unnoticed(tmp_path: Path, profiles: list[Profile]) -> None:
    with pytest.raises(BuildError, match="profile"):
        built(model(tmp_path, "y = Relu(x)"), profiles=profiles)
    assert not (tmp_path / "engine.plan").exists()


def test_profile_that_contradicts_the_network(tmp_path: Path) -> None:
    text = TEXT.replace("[1,h]", "[1,4]")  # the size is fixed, but the profile has another
    with pytest.raises(BuildError):
        built(model(tmp_path, "y = Relu(x)", text), profiles=[Profile("bad", {"h": (5, 6, 7)})])


def test_profile_that_tensorrt_does_not_add(tmp_path: Path, monkeypatch: Any) -> None:
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    use(RTX)

    def unchecked(_: Any, builder: Any, network: Any) -> Any:
        del network
        made = builder.create_optimization_profile()
        made.set_shape("x", (1, 8), (1, 4), (1, 2))
        return made  # add_optimization_profile returns -1, and the build would ignore the profile

    monkeypatch.setattr(PolygraphyProfile, "to_trt", unchecked)
    with pytest.raises(BuildError, match="refuses a profile"):
        here(model(tmp_path, "y = Relu(x)"), ALL)


def test_several_profiles_are_in_the_engine(tmp_path: Path, monkeypatch: Any) -> None:
    seen = []
    real = build_module.configure

    def config(*words: Any) -> Any:
        seen.append(real(*words))
        return seen[-1]

    monkeypatch.setattr(build_module, "configure", config)
    profiles = [Profile("a", {"h": (2, 2, 2)}), Profile("b", {"h": (3, 4, 8)})]
    here(model(tmp_path, "y = Relu(x)"), profiles)
    assert seen[0].num_optimization_profiles == 2


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True)])
def test_tf32_is_said_either_way(tmp_path: Path, precision: Any, allowed: bool) -> None:
    trt = use(RTX)
    path = model(tmp_path, "y = Relu(x)")
    builder, network, parser = parsed_network(path, RTX)
    config = configure(trt, builder, network, declared((1, H), ALL), BuildOptions(RTX, precision))
    assert config.get_flag(trt.BuilderFlag.TF32) is allowed
    del parser


def test_effort_that_a_target_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"optimisation level 6: must be 0 to 5"):
        Effort(6)
    with pytest.raises(InputError, match=r"rtx-1\.7: times no kernels"):
        built(model(tmp_path, "y = Relu(x)"), effort=Effort(timing_cache=tmp_path / "cache"))
    assert built(model(tmp_path, "y = Relu(x)"), effort=Effort(0)).timing_cache == "none"


def test_unknown_precision() -> None:
    with pytest.raises(
        InputError, match="unknown precision 'int8'; known: fp32, tf32, fp16, bf16, auto"
    ):
        check_precision("int8")


def test_half_precision_is_left_beside_the_plan(tmp_path: Path) -> None:
    path = model(tmp_path, "a = MatMul(x, k) y = Relu(a)", PRODUCT)
    built(path, shape=(H, 1))
    assert not (tmp_path / "half.onnx").exists()
    built(path, shape=(H, 1), precision="fp16")
    half = onnx.load(tmp_path / "half.onnx")
    assert [n.op_type for n in half.graph.node] == ["Cast", "MatMul", "Relu", "Cast"]


def test_what_fails_in_half_precision_names_its_node(tmp_path: Path) -> None:
    path = model(tmp_path, "a = MatMul(x, k) b = Relu(a) y = Unique(b)", PRODUCT)
    with pytest.raises(BuildError, match="refuses the Unique node that makes y"):
        built(path, shape=(H, 1), precision="fp16")


@pytest.mark.parametrize("name", ["tensorrt-8.6", "tensorrt-10", "tensorrt-11"])
def test_target_that_is_not_installed(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    if installed_version(target):
        pytest.skip("a TensorRT is installed here")
    with pytest.raises(TargetMissing) as caught:
        built(model(tmp_path, "y = Relu(x)"), target=target)
    assert str(caught.value) == (
        f"target {name}: tensorrt is not installed here; pip install 'tensorrt=="
        f"{name.split('-')[1]}.*', or build on a machine that has it: `pipeline export`, "
        "`pipeline rewrite` and `pipeline verify --torch` need no TensorRT "
        "(docs/guide/gpu-machine.md)"
    )
    assert caught.value.exit_code == 2


def test_a_tensorrt_that_needs_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """8.6.0's bindings say only `factory function returned nullptr`, on a machine without a GPU."""

    def no_builder(_: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr("pipeline.build.network.find_gpu", lambda: "no driver is here")
    trt = SimpleNamespace(Builder=no_builder, NetworkDefinitionCreationFlag=object)
    with pytest.raises(InputError, match="it needs a GPU, and no driver is here"):
        open_network(trt, TARGETS["tensorrt-8.6"], logger=object())


def test_full_disk_is_the_callers_matter(tmp_path: Path) -> None:
    path = model(tmp_path, "y = Relu(x)")
    with pytest.raises(OSError, match="No space left on device") as caught:
        build(path, Path("/dev/full"), declared((1, H), ALL), BuildOptions(RTX))
    assert caught.value.errno == errno.ENOSPC


def test_crash_kills_nothing_else(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]>
g (float16[1,2,h,64] x) => (float16[1,2,h,64] y) {{ [at] y = Attention(x, x, x) {0} }}"""
    crashing = model(tmp_path, "", text)
    with pytest.raises(BuildError, match="TensorRT crashed: Segmentation fault"):
        built(crashing, shape=(1, 2, H, 64))
    assert built(model(tmp_path, "y = Relu(x)")).plan_bytes > 1000


def test_crash_ends_the_command_with_one_line(tmp_path: Path, cli: Any) -> None:
    run(Config(tiny.of(lambda x: x * 2, shape=(1, 2, H, 64)), out=tmp_path / "a"))
    text = """<ir_version: 10, opset_import: ["" : 23]>
g (float[1,2,h,64] x) => (float[1,2,h,64] y)
{{ t = Attention(x, x, x) y = Attention(t, t, t) {0} }}"""
    model(tmp_path, "", text).replace(tmp_path / "a" / "model.onnx")
    refinish(tmp_path / "a")
    before = files_under(tmp_path)
    code, _, errors = cli("build", tmp_path / "a")
    assert code == 1
    assert "error: target rtx-1.7: TensorRT crashed: Segmentation fault" in errors
    assert errors.count("error: ") == 1
    assert files_under(tmp_path) == before


def test_timings_are_not_kept_where_8_6_would_end_the_process(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcudnn_ops_infer.so.8")
    except OSError:
        cache = TimingCache(tmp_path / "timing.cache", TARGETS["tensorrt-8.6"])
        cache.attach(None)  # the config is not touched
        assert cache.save() == (
            "none: timings were not kept: TensorRT 8.6 needs cuDNN's libcudnn_ops_infer.so.8 to "
            "write them"
        )
        assert cache.note
    else:
        pytest.skip("cuDNN 8 is installed here")
