"""``pipeline triton-replay`` against a small server, and against NVIDIA's own if it is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import onnx.parser
import pytest
from helpers import Run, perturb, refinish, refused, refused_late
from triton_servers import nvidia_server, small_server, triton_folder
from tritonclient import grpc as grpc_client

from pipeline.artifact.artifact import Artifact
from pipeline.commands.triton.repository import Choice, write_model
from pipeline.convert.driver import run
from pipeline.convert.report import Report
from pipeline.spec.config import Config

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
GRAPHS = {
    "kinds": """(int64[b, t] ids, float[b] scale) => (float[b, t] y, float[b] most)
        <int64[1] one = {1}> {
        f = Cast <to = 1> (ids)
        column = Unsqueeze (scale, one)
        y = Mul (f, column)
        most = ReduceMax <axes = [1], keepdims = 0> (y) }""",
    "scalar": "(float[n] x) => (float s) { s = ReduceMax <keepdims = 0> (x) }",
    "depend": "(float[b, 8] x) => (float[b, 8] y) { y = Softmax <axis = 0> (x) }",
}
DIMS = {"kinds": ("b=1:2:4", "t=1:8:16"), "scalar": ("n=1:8:16",), "depend": ("b=1:8:32",)}
RANGES = {"kinds": ("ids=1..100", "scale=1..2")}
Where = Callable[[str], Path]


@pytest.fixture(scope="module")
def artifacts(converted: Report, tmp_path_factory: pytest.TempPathFactory) -> Where:
    """The artifacts of `GRAPHS` and of `tiny`, which pads its input."""
    folder = tmp_path_factory.mktemp("replay")
    for name, text in GRAPHS.items():
        onnx.save(onnx.parser.parse_model(f"{HEAD} {name} {text}"), folder / f"{name}.onnx")
        source, ranges = str(folder / f"{name}.onnx"), RANGES.get(name, ())
        run(Config(source, out=folder / name, dims=DIMS[name], ranges=ranges))
    return lambda name: converted.path if name == "tiny" else folder / name


NAMES = (*GRAPHS, "tiny")


@pytest.fixture(scope="module")
def repository(artifacts: Where, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_model(Artifact.open(artifacts(name)), folder, Choice())
    return folder


@pytest.fixture(scope="module")
def grpc(repository: Path) -> Iterator[str]:
    with small_server(repository) as addresses:
        yield addresses["grpc"]


@pytest.mark.parametrize("name", NAMES)
def test_right_answers(name: str, artifacts: Where, grpc: str, cli: Run) -> None:
    code, output, errors = cli("triton-replay", artifacts(name), "--url", grpc)
    assert code == 0, output + errors
    reference = "torch" if name == "tiny" else "exported"
    assert f"{name} on Triton (onnxruntime) agrees with {reference} at " in output


def test_json(artifacts: Where, grpc: str, cli: Run) -> None:
    code, output, _ = cli("triton-replay", artifacts("kinds"), "--url", grpc, "--json")
    found = json.loads(output)
    assert code == 0 and found["ok"] and not found["failed"] and not found["left_out"]
    assert {"b": 4, "t": 16} in [point["sizes"] for point in found["points"]]
    for point in found["points"]:
        assert [result["output"] for result in point["results"]] == ["y", "most"]
        assert all(result["pair"] == ["exported", "triton"] for result in point["results"])


def test_a_model_with_other_weights_fails(artifact: Path, cli: Run) -> None:
    folder = Path("models")
    perturb(artifact)
    assert cli("triton", artifact, folder)[0] == 0
    with small_server(folder) as addresses:
        code, output, _ = cli("triton-replay", artifact, "--url", addresses["grpc"])
    assert code == 1
    assert "tiny on Triton (onnxruntime) DIFFERS from torch: " in output
    assert "y: differs by up to" in output


def test_what_the_server_refuses(artifacts: Where, repository: Path, cli: Run) -> None:
    """A server of another model, with the same name."""
    place = Path(shutil.copytree(repository / "depend", "models/scalar"))
    assert place.is_dir()
    config = place / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "depend"', 'name: "scalar"'))
    with small_server(Path("models")) as addresses:
        code, output, _ = cli("triton-replay", artifacts("scalar"), "--url", addresses["grpc"])
    assert code == 1
    assert "the server failed: " in output


def test_larger_batches_are_not_sent(artifacts: Where, repository: Path, cli: Run) -> None:
    place = Path(shutil.copytree(repository / "kinds", "models/kinds"))
    config = place / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 4", "max_batch_size: 2"))
    with small_server(Path("models")) as addresses:
        code, output, _ = cli("triton-replay", artifacts("kinds"), "--url", addresses["grpc"])
    assert code == 0
    assert "not sent at b=4,t=16: the server takes batches up to 2" in output


def test_no_server_and_no_model(artifacts: Where, grpc: str, cli: Run) -> None:
    for protocol in ("grpc", "http"):
        words = ("--protocol", protocol, "--url", "localhost:1")
        refused(cli("triton-replay", artifacts("kinds"), *words), f"by {protocol}", "Start the")
    words = ("--url", grpc, "--name", "other")
    refused(cli("triton-replay", artifacts("kinds"), *words), "does not serve other by grpc")
    refused(cli("triton-replay", artifacts("kinds"), "--url", f"http://{grpc}"), "host:port")


def test_nothing_is_stored(artifact: Path, grpc: str, cli: Run) -> None:
    shutil.rmtree(artifact / "comparison")
    refinish(artifact)
    refused_late(cli("triton-replay", artifact, "--url", grpc), "no outputs of torch are stored")


@pytest.fixture(scope="module")
def nvidia(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """NVIDIA's server, which loads the written configurations and runs their warm-up requests."""
    folder = triton_folder()
    if folder is None:
        pytest.skip("needs Triton itself: pip install --no-deps nvidia-pytriton")
    spare = tmp_path_factory.mktemp("nvidia")
    with nvidia_server(folder, repository, spare, "--log-verbose=1") as addresses:
        log = (spare / "server.log").read_text()
        for name, label in (("kinds", "max"), ("depend", "opt"), ("tiny", "min")):
            assert f"'{name}' instance {name}_0 is running warmup sample '{label}'" in log
        yield dict(addresses)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("name", NAMES)
def test_nvidias_server(
    name: str, protocol: str, artifacts: Where, nvidia: dict[str, str], cli: Run
) -> None:
    words = ("--protocol", protocol, "--url", nvidia[protocol])
    code, output, errors = cli("triton-replay", artifacts(name), *words)
    assert code == 0, output + errors
    assert f"{name} on Triton (python) agrees with " in output


def test_nvidias_server_batches_requests(nvidia: dict[str, str]) -> None:
    """Requests that wait together run as one batch, and each gets its own rows."""
    client = grpc_client.InferenceServerClient(nvidia["grpc"])
    feeds = [
        {"ids": np.full((1, 7), number, np.int64), "scale": np.full((1, 1), 1.5, np.float32)}
        for number in range(200)
    ]
    done: Queue[tuple[int, Any, Any]] = Queue()

    def answered(number: int, result: Any, error: Any) -> None:
        done.put((number, result, error))

    for number, feed in enumerate(feeds):
        inputs = [
            grpc_client.InferInput("ids", (1, 7), "INT64"),
            grpc_client.InferInput("scale", (1, 1), "FP32"),
        ]
        for each in inputs:
            each.set_data_from_numpy(feed[each.name()])
        client.async_infer("kinds", inputs, partial(answered, number))
    for number, answer, error in (done.get(timeout=60) for _ in feeds):
        assert error is None
        assert (answer.as_numpy("y") == np.full((1, 7), number * 1.5)).all()
        assert (answer.as_numpy("most") == [[number * 1.5]]).all()
    (counts,) = client.get_inference_statistics("kinds").model_stats
    assert max(batch.batch_size for batch in counts.batch_stats) == 4
    assert counts.execution_count < counts.inference_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("linear", {}), ("unet_sr", {}), ("llama", {"layers": 1})]
)
def test_models_of_the_zoo_on_nvidias_server(
    name: str, options: dict[str, int], cli: Run, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    folder = triton_folder()
    if folder is None:
        pytest.skip("needs Triton itself: pip install --no-deps nvidia-pytriton")
    run(Config(name, out=tmp_path / name, options=options, quick=True, memory_limit=700 << 20))
    assert cli("triton", name, "models")[0] == 0
    with nvidia_server(folder, Path("models"), tmp_path / "spare") as addresses:
        for protocol, url in addresses.items():
            code, output, errors = cli("triton-replay", name, "--protocol", protocol, "--url", url)
            assert code == 0, output + errors
            assert f"{name} on Triton (python) agrees with torch at " in output
