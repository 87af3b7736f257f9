"""``pipeline triton``: the files of a model repository, parsed by Triton's own protobuf."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from helpers import Run, files_under, redeclare, refinish, refused
from triton_servers import read_config

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import BuildInfo, TargetInfo
from pipeline.commands.triton.containers import TENSORRT, find_release, image
from pipeline.compare.problems import only_engine_failed
from pipeline.convert.driver import run, run_rewrite
from pipeline.errors import InputError
from pipeline.machine.files import hash_file
from pipeline.models import MODELS
from pipeline.spec.config import Config
from pipeline.spec.profiles import Profile

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
GRAPHS = {
    "relu": "(float[b, 8] x) => (float[b, 8] y) { y = Relu (x) }",
    # the rows of a batch depend on each other
    "depend": "(float[b, 8] x) => (float[b, 8] y) { y = Softmax <axis = 0> (x) }",
    "kinds": """(int64[b, t] ids, bool[b, t] mask, float[b] scale) => (float[b, t] y)
        <float zero = {0.0}, int64[1] one = {1}> {
        f = Cast <to = 1> (ids)
        kept = Where (mask, f, zero)
        column = Unsqueeze (scale, one)
        y = Mul (kept, column) }""",
    "fixed": """(float[2, 8, t] x) => (float[2, u] y) {
        y = ReduceMax <axes = [1], keepdims = 0> (x) }""",
    # `a` is beyond fp16
    "large": """(float[b, 3, 4, 4] x) => (float[b, 1, 4, 4] y)
        <float[1, 3, 1, 1] k = {6e4, 6e4, 6e4}, float[1] tenth = {0.1}> {
        a = Conv (x, k)
        r = Relu (a)
        y = Mul (r, tenth) }""",
    "scalar": "(float[n] x) => (float s) { s = ReduceMax <keepdims = 0> (x) }",
}
RANGES = {
    "kinds": ("ids=0..100", "mask=1..2"),
}
DIMS = {
    "relu": ("b=1:8:32",),
    "depend": ("b=1:8:32",),
    "kinds": ("b=1:2:4", "t=1:8:16"),
    "fixed": ("t=4:4",),
    "large": ("b=1:4:8",),
    "scalar": ("n=1:8:16",),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Converts one of `GRAPHS` once. Its artifact is not to be changed."""
    folder = tmp_path_factory.mktemp("triton")

    def make(name: str) -> Path:
        if not (folder / name).is_dir():
            model = onnx.parser.parse_model(f"{HEAD} {name} {GRAPHS[name]}")
            onnx.save(model, folder / f"{name}.onnx")
            run(
                Config(
                    str(folder / f"{name}.onnx"),
                    out=folder / name,
                    dims=DIMS[name],
                    ranges=RANGES.get(name, ()),
                )
            )
        return folder / name

    return make


@pytest.fixture
def changed(converted: Make, tmp_path: Path) -> Make:
    """Converts one of `GRAPHS`, and copies its artifact. You may change it."""
    return lambda name: Path(shutil.copytree(converted(name), tmp_path / "changed" / name))


def for_tensorrt(artifact: Path, version: str = "10.0.1", **changes: Any) -> None:
    """States in a manifest that its plan is one of TensorRT's, which can't be built here."""
    target = TargetInfo("tensorrt-10", "tensorrt", version, ("9.0",))
    refinish(artifact, target=target, **changes)


def tensors(config: Any) -> list[tuple[str, int, list[int], bool]]:
    """Name, data type, dims of each input and output, and whether it is reshaped."""
    return [
        (t.name, t.data_type, list(t.dims), t.HasField("reshape"))
        for t in (*config.input, *config.output)
    ]


def check_shapes(model: Path) -> None:
    """Checks a configuration as Triton's ONNX Runtime backend does when it loads the model.

    Outputs must have exactly the shape that ONNX Runtime reports (`CompareDimsSupported` in its
    source). Inputs must have it where it is fixed.
    """
    session = onnxruntime.InferenceSession(model / "1" / "model.onnx")
    config = read_config(model)
    for tensors, ports in (
        (config.input, session.get_inputs()),
        (config.output, session.get_outputs()),
    ):
        assert [t.name for t in tensors] == [port.name for port in ports]
        for tensor, port in zip(tensors, ports, strict=True):
            dims = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
            got = [-1, *dims] if config.max_batch_size else dims
            want = [size if isinstance(size, int) else -1 for size in port.shape]
            assert got == (want or [1]), port.name


FP32, INT64, INT32, BOOL = 11, 9, 8, 1


def test_a_model_with_a_batch(converted: Make, cli: Run, tmp_path: Path) -> None:
    code, output, errors = cli("triton", converted("relu"), "models")
    assert code == 0, errors
    assert "serves:   model.onnx with ONNX Runtime on the CPU, in float32" in output
    assert "tritonserver:26.07-py3" in output and "--gpus" not in output
    model = tmp_path / "models" / "relu"
    assert files_under(tmp_path / "models") == [
        "relu", "relu/1", "relu/1/model.onnx", "relu/config.pbtxt", "relu/pipeline.json",
    ]  # fmt: skip
    assert (model / "1" / "model.onnx").read_bytes() == (
        converted("relu") / "model.onnx"
    ).read_bytes()
    config = read_config(model)
    assert (config.name, config.backend, config.max_batch_size) == ("relu", "onnxruntime", 32)
    assert tensors(config) == [("x", FP32, [8], False), ("y", FP32, [8], False)]
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert [(w.name, w.batch_size) for w in config.model_warmup] == [
        ("min", 1), ("opt", 8), ("max", 32),
    ]  # fmt: skip
    assert all(w.inputs["x"].zero_data and list(w.inputs["x"].dims) == [8]
               for w in config.model_warmup)  # fmt: skip
    assert not config.instance_group and not config.optimization.cuda.graphs
    assert "batches of up to 32" in output and "compared: no" not in output
    assert f"{image('26.07')} tritonserver --model-repository=/models" in output


def test_a_model_that_failed_its_comparison_is_refused(changed: Make, cli: Run) -> None:
    artifact = changed("relu")
    model = onnx.load(artifact / "model.onnx")
    model.graph.node[0].op_type = "Abs"
    onnx.save(model, artifact / "model.onnx")
    refinish(artifact)
    assert cli("verify", artifact)[0] == 1
    refused(
        cli("triton", artifact, "models"),
        f"{artifact}: its comparison failed, so it is not served",
        f"`pipeline inspect {artifact}`",
        "Convert again",
    )
    assert not Path("models").exists()


def test_only_the_engine_failed(converted: Make, cli: Run) -> None:
    source = converted("large").with_suffix(".onnx")
    code, _, errors = cli(
        "convert", source, "--dim", "b=1:4:8", "--precision", "fp16", "--quick", "--out", "half"
    )
    assert code == 1 and "is kept, marked as failed" in errors
    code, output, errors = cli("triton", "half", "models")
    assert code == 0, errors
    assert "compared: model.onnx passed. The engine failed, and is not served" in output
    assert read_config(Path("models/large")).backend == "onnxruntime"
    comparison = Artifact.open("half").manifest.comparison
    assert comparison is not None and only_engine_failed(comparison)
    # as if model.onnx had been changed by a pass, and compared at no sizes
    others = tuple(note for note in comparison.notes if note.kind != "model-unchanged")
    assert not only_engine_failed(replace(comparison, notes=others))
    made = cli("triton", "half", "models", "--json")[1]
    assert (json.loads(made)["compared"], json.loads(made)["engine_failed"]) == (True, True)
    for_tensorrt(Path("half"))
    refused(
        cli("triton", "half", "models"),
        "half: its engine failed its comparison, so it is not served",
        "--backend onnxruntime",
    )


def test_rows_that_depend_are_not_batched(converted: Make, cli: Run) -> None:
    _, output, _ = cli("triton", converted("depend"), "models")
    config = read_config(Path("models/depend"))
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert tensors(config) == [("x", FP32, [-1, 8], False), ("y", FP32, [-1, 8], False)]
    assert [w.batch_size for w in config.model_warmup] == [1, 1, 1]
    assert [list(w.inputs["x"].dims) for w in config.model_warmup] == [[1, 8], [8, 8], [32, 8]]
    assert "requests: one by one: batch rows of exported: as in the model: a row changes" in output


def test_integers_bools_and_one_number_of_each_request(converted: Make, cli: Run) -> None:
    assert cli("triton", converted("kinds"), "models")[0] == 0
    model = Path("models/kinds")
    config = read_config(model)
    assert config.max_batch_size == 4
    assert tensors(config) == [
        ("ids", INT64, [-1], False), ("mask", BOOL, [-1], False), ("scale", FP32, [1], True),
        ("y", FP32, [-1], False),
    ]  # fmt: skip
    for warm_up, length in zip(config.model_warmup, (1, 8, 16), strict=True):
        assert list(warm_up.inputs["ids"].dims) == [length]
        assert list(warm_up.inputs["scale"].dims) == [1]
        raw = (model / "warmup" / warm_up.inputs["ids"].input_data_file).read_bytes()
        ids = np.frombuffer(raw, np.int64)
        assert len(ids) == length and (ids >= 0).all() and (ids < 100).all()
        raw = (model / "warmup" / warm_up.inputs["mask"].input_data_file).read_bytes()
        assert raw == b"\1" * length  # the declared range is true only


@pytest.mark.parametrize("name", GRAPHS)
def test_onnx_runtime_gets_the_shapes_that_it_reports(name: str, converted: Make, cli: Run) -> None:
    assert cli("triton", converted(name), "models")[0] == 0
    check_shapes(Path("models") / name)


def test_a_scalar(converted: Make, changed: Make, cli: Run) -> None:
    assert cli("triton", converted("scalar"), "models")[0] == 0
    config = read_config(Path("models/scalar"))
    assert config.max_batch_size == 0
    assert tensors(config) == [("x", FP32, [-1], False), ("s", FP32, [1], False)]
    artifact = changed("scalar")
    for_tensorrt(artifact)
    refused(cli("triton", artifact, "models", "--name", "plan"), "s is a scalar", "onnxruntime")
    assert not Path("models/plan").exists()


def test_the_engine_and_its_profiles(changed: Make, cli: Run) -> None:
    artifact = changed("kinds")
    few = Profile("few", {"b": (1, 2, 4), "t": (1, 8, 16)})
    long = Profile("long", {"b": (1, 1, 2), "t": (1, 16, 16)})
    redeclare(artifact, profiles=(few, long))
    for_tensorrt(artifact)
    code, output, errors = cli("triton", artifact, "models")
    assert code == 0, errors
    plan = Path("models/kinds/1/model.plan").read_bytes()
    assert plan == (artifact / "engine.plan").read_bytes()
    config = read_config(Path("models/kinds"))
    # every profile must allow each batch that Triton can form
    assert (config.backend, config.max_batch_size) == ("tensorrt", 2)
    (group,) = config.instance_group
    assert list(group.profile) == ["0", "1"]
    assert config.input[0].data_type == INT64
    assert list(config.dynamic_batching.preferred_batch_size) == [2]
    # `scale` has no axis but the batch, so that no graph can be described
    assert not config.optimization.cuda.graphs
    assert [(w.name, w.batch_size) for w in config.model_warmup] == [
        ("few: min", 1), ("few: opt", 2), ("few: max", 2), ("long: opt", 1),
    ]  # fmt: skip
    for part in (
        image("24.05"),
        "TensorRT 10.0.1",
        "compute capability 9.0",
        "--gpus=all",
        "compared: no. Run `pipeline verify ",
    ):
        assert part in output


@pytest.mark.parametrize("name", ["relu", "depend"])
def test_graphs_are_captured_at_opt(changed: Make, cli: Run, name: str) -> None:
    artifact = changed(name)
    for_tensorrt(artifact)
    assert cli("triton", artifact, "models")[0] == 0
    config = read_config(Path("models") / name)
    cuda = config.optimization.cuda
    assert cuda.graphs
    (spec,) = cuda.graph_spec
    batched = name == "relu"
    assert spec.batch_size == (8 if batched else 0)
    assert list(spec.input["x"].dim) == ([8] if batched else [8, 8])


def test_tensorrt_8_has_no_int64(changed: Make, cli: Run) -> None:
    artifact = changed("kinds")
    for_tensorrt(artifact, "8.6.3.1")
    _, output, _ = cli("triton", artifact, "models")
    config = read_config(Path("models/kinds"))
    assert config.input[0].data_type == INT32
    warm_up = config.model_warmup[1].inputs["ids"]
    assert warm_up.data_type == INT32
    file = Path("models/kinds/warmup") / warm_up.input_data_file
    assert len(file.read_bytes()) == 4 * 8
    assert image("24.04") in output


def test_which_container_has_which_tensorrt() -> None:
    for release, (version, source) in TENSORRT.items():
        assert source.startswith("https://github.com/triton-inference-server/server/")
        assert find_release(version, release) == release
    assert find_release("8.6.1.2", None) == "23.05"
    assert find_release("10.0.1", None) == find_release("10.0.1.post1", None) == "24.05"
    assert find_release("10.3.0", "24.08") == "24.08"  # not in the table: the user's word
    for version, release, part in (
        ("8.6.0", None, "known to have TensorRT 8.6.0.12"),
        ("8.6.1", None, "known to have TensorRT 8.6.1.6"),  # pip's; the container has 8.6.1.2
        ("8.6.1", "23.05", "it has TensorRT 8.6.1.2, and the plan needs 8.6.1.6"),
        ("10.0.10", None, "known to have TensorRT 10.0.10,"),
        ("10.0.1", "24.10", "it has TensorRT 10.5.0.18"),
        ("10.0.1", "latest", "is not a release"),
    ):
        with pytest.raises(InputError) as caught:
            find_release(version, release)
        assert part in str(caught.value)


def test_what_is_refused(converted: Make, changed: Make, cli: Run) -> None:
    refused(
        cli("triton", converted("relu"), "models", "--backend", "tensorrt"),
        "TensorRT-RTX, which no backend of Triton loads",
    )
    artifact = changed("relu")
    for_tensorrt(artifact, "8.6.0")
    refused(cli("triton", artifact, "models"), "TensorRT 8.6.0.12", "--container")
    assert cli("triton", artifact, "models", "--backend", "onnxruntime")[0] == 0
    assert read_config(Path("models/relu")).backend == "onnxruntime"
    refused(cli("triton", artifact, artifact), "is an artifact, not a model repository")
    for name in ("../other", "a b/c", ".hidden"):
        refused(
            cli("triton", converted("relu"), "models", "--name", name), repr(name), "Pass a --name"
        )
    (artifact / "engine.plan").unlink()
    refinish(artifact)
    refused(cli("triton", artifact, "models", "--backend", "tensorrt"), "run the build stage first")


def test_models_of_others_stay(converted: Make, cli: Run) -> None:
    own = Path("models/relu/config.pbtxt")
    own.parent.mkdir(parents=True)
    own.write_text('name: "relu"')
    other = Path("models/other/config.pbtxt")
    other.parent.mkdir()
    other.write_text("mine")
    refused(cli("triton", converted("relu"), "models"), "pipeline did not write", "--name")
    assert own.read_text() == 'name: "relu"'
    for _ in range(2):  # its own model is replaced
        assert cli("triton", converted("relu"), "models", "--name", "second")[0] == 0
    assert other.read_text() == "mine"
    assert sorted(path.name for path in Path("models").iterdir()) == ["other", "relu", "second"]


def test_plugins(changed: Make, cli: Run) -> None:
    artifact = changed("relu")
    library = Path("libfoo.so").resolve()
    library.write_bytes(b"not loaded here")

    def needs(*plugins: str, **hashes: str) -> None:
        build = Artifact.open(artifact).manifest.build
        assert isinstance(build, BuildInfo)
        more = {"plugins": plugins, "plugin_hashes": hashes}
        changes = {name: getattr(build, name) for name in build.__dataclass_fields__}
        for_tensorrt(artifact, build=BuildInfo(**{**changes, **more}))

    build = Artifact.open(artifact).manifest.build
    assert build is not None
    needs(str(library), **{str(library): hash_file(library).sha256})
    refused(cli("triton", artifact, "models"), "runs the code of the plugin", "--plugin")
    code, output, errors = cli("triton", artifact, "models", "--plugin", library)
    assert code == 0, errors
    assert Path("models/relu/plugins/libfoo.so").read_bytes() == b"not loaded here"
    assert '--backend-config=tensorrt,plugins="/models/relu/plugins/libfoo.so"' in output
    needs("correlation_lookup")
    refused(cli("triton", artifact, "models"), "correlation_lookup, which is Python code")


def test_an_op_that_onnx_runtime_lacks(changed: Make, cli: Run) -> None:
    artifact = changed("relu")
    model = onnx.load(artifact / "model.onnx")
    model.graph.node[0].domain = "own"
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    onnx.save(model, artifact / "model.onnx")
    refinish(artifact)
    refused(cli("triton", artifact, "models"), "ONNX Runtime refuses it", "own:Relu")


def test_large_weights_are_beside_the_model(changed: Make, cli: Run) -> None:
    artifact = changed("relu")
    weights = onnx.numpy_helper.from_array(np.ones(8, np.float32), "w")
    model = onnx.load(artifact / "model.onnx")
    model.graph.initializer.append(weights)
    onnx.save(
        model, artifact / "model.onnx", save_as_external_data=True, location="model.onnx.data",
        size_threshold=0,
    )  # fmt: skip
    refinish(artifact)
    assert cli("triton", artifact, "models")[0] == 0
    assert files_under(Path("models/relu/1")) == ["model.onnx", "model.onnx.data"]
    onnx.load(Path("models/relu/1/model.onnx"))


def test_weights_outside_of_the_artifact_are_not_served(changed: Make, cli: Run) -> None:
    artifact = changed("relu")
    (artifact.parent / "secret").write_bytes(b"x" * 32)
    model = onnx.load(artifact / "model.onnx")
    weights = onnx.TensorProto(name="w", data_type=1, dims=[8], raw_data=b"")
    onnx.external_data_helper.set_external_data(weights, "../secret")
    weights.data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer.append(weights)
    (artifact / "model.onnx").write_bytes(model.SerializeToString())
    refinish(artifact)
    refused(cli("triton", artifact, "models"), "../secret")
    assert not Path("models").exists()


def test_a_model_with_other_outputs_than_its_manifest(
    changed: Make, converted: Make, cli: Run
) -> None:
    artifact = changed("relu")
    shutil.copy(converted("scalar") / "model.onnx", artifact)
    refinish(artifact)
    refused(cli("triton", artifact, "models"), "model.onnx")


def test_json(converted: Make, cli: Run) -> None:
    _, output, _ = cli("triton", converted("depend"), "models", "--json")
    found = json.loads(output)
    assert found["max_batch_size"] == 0
    assert found["backend"] == "onnxruntime" and found["tensorrt"] is None
    assert found["why_no_batches"] and found["warm_up"] == ["min", "opt", "max"]


def test_without_tritonclient(converted: Make, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritonclient", None)
    for name in [name for name in sys.modules if name.startswith("tritonclient.")]:
        monkeypatch.setitem(sys.modules, name, None)
    refused(cli("triton", converted("relu"), "models"), "pip install 'trt-pipeline[triton]'")
    refused(cli("triton-replay", converted("relu")), "pip install 'trt-pipeline[triton]'")


@pytest.fixture(scope="module", params=MODELS)
def of_the_zoo(request: pytest.FixtureRequest, zoo_artifact: Callable[[str], Artifact]) -> Artifact:
    return zoo_artifact(request.param)


@pytest.mark.slow
def test_every_model_that_comes_with_pipeline(
    of_the_zoo: Artifact, cli: Run, tmp_path: Path
) -> None:
    """Without a comparison, no model is batched: its rows may depend on each other."""
    name = of_the_zoo.manifest.name
    artifact = Path(shutil.copytree(of_the_zoo.path, tmp_path / name))
    report = run_rewrite(artifact, "tensorrt-8.6")
    assert report.manifest.comparison is None
    assert cli("triton", artifact, "models")[0] == 0
    config = read_config(Path("models") / name)
    assert config.max_batch_size == 0
    check_shapes(Path("models") / name)
    assert config.model_warmup
