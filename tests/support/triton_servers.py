"""Servers that serve a model repository with ONNX Runtime: a small one, and NVIDIA's own.

The small server speaks Triton's gRPC protocol by the classes of tritonclient. NVIDIA's server is
the one in the wheel nvidia-pytriton, which has the Python backend only. `pip install --no-deps
nvidia-pytriton` brings it; it needs no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

# The wheel's Python backend reads arrays of numpy 2 wrongly, so tensors pass by DLPack:
# https://github.com/triton-inference-server/server/blob/r24.10/docs/introduction/release_notes.md
MODEL_PY = """
import json
import sys
sys.path.insert(0, {packages!r})
import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, arguments):
        file = "{{model_repository}}/{{model_version}}/model.onnx".format(**arguments)
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]
        self.batches = json.loads(arguments["model_config"])["max_batch_size"]

    def execute(self, requests):
        feeds = [
            {{tensor.name(): np.from_dlpack(tensor) for tensor in request.inputs()}}
            for request in requests
        ]
        if not self.batches:
            return [self.answer(self.run(feed)) for feed in feeds]
        # the rows of all requests in one run, as Triton's own backends do
        whole = self.run({{n: np.concatenate([feed[n] for feed in feeds]) for n in feeds[0]}})
        ends = np.cumsum([len(next(iter(feed.values()))) for feed in feeds])[:-1]
        parts = [np.split(array, ends) for array in whole]
        return [self.answer(arrays) for arrays in zip(*parts)]

    def run(self, feed):
        return self.session.run(self.names, feed)

    def answer(self, arrays):
        made = zip(self.names, map(np.ascontiguousarray, arrays))
        tensors = [triton.Tensor.from_dlpack(name, array) for name, array in made]
        return triton.InferenceResponse(tensors)
"""


def read_config(model: Path) -> Any:
    """The configuration of a model, parsed by Triton's own protobuf."""
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers as Triton does, with ONNX Runtime as its backend."""

    def __init__(self, repository: Path) -> None:
        self.configs = {path.name: read_config(path) for path in repository.iterdir()}
        self.sessions = {
            name: onnxruntime.InferenceSession(repository / name / "1" / "model.onnx")
            for name in self.configs
        }

    def _config(self, name: str, context: grpc.ServicerContext) -> Any:
        if name not in self.configs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {name}")
        return self.configs[name]

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ModelConfigResponse(config=self._config(request.name, context))

    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        config = self._config(request.name, context)
        answer = service_pb2.ModelMetadataResponse(name=request.name)
        for tensors, into in ((config.input, answer.inputs), (config.output, answer.outputs)):
            for tensor in tensors:
                kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
                shape = [-1] * bool(config.max_batch_size) + list(tensor.dims)
                into.add(name=tensor.name, datatype=kind, shape=shape)
        return answer

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        config, session = self._config(request.model_name, context), self.sessions
        ranks = {i.name: len(i.shape) for i in session[config.name].get_inputs()}
        feed = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            array = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
            feed[tensor.name] = array.reshape(tensor.shape[: ranks[tensor.name]])
        answer = service_pb2.ModelInferResponse(model_name=config.name)
        names = [output.name for output in config.output]
        for output, array in zip(config.output, session[config.name].run(names, feed), strict=True):
            shape = [*array.shape, 1] if len(array.shape) < 1 or output.HasField("reshape") else 0
            kind = np_to_triton_dtype(array.dtype)
            answer.outputs.add(name=output.name, datatype=kind, shape=shape or array.shape)
            answer.raw_output_contents.append(array.tobytes())
        return answer


@contextmanager
def small_server(repository: Path) -> Iterator[Mapping[str, str]]:
    """Serves a repository by gRPC; yields the address by protocol."""
    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(repository), server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        yield {"grpc": f"localhost:{port}"}
    finally:
        server.stop(None).wait()


def triton_folder() -> Path | None:
    """The folder of NVIDIA's server; None if the wheel is not installed for this Python."""
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "tritonserver"
    return folder if _stub(folder).is_file() else None


def _stub(folder: Path) -> Path:
    version = "{}.{}".format(*sys.version_info[:2])
    return folder / "python_backend_stubs" / version / "triton_python_backend_stub"


@contextmanager
def nvidia_server(
    folder: Path, repository: Path, spare: Path, *more: str
) -> Iterator[Mapping[str, str]]:
    """Serves a repository by NVIDIA's server; yields the address by protocol.

    The models must be for ONNX Runtime. A copy of each runs in the Python backend: only the line
    of the backend differs.

    Args:
        folder: The result of `triton_folder`.
        repository: The repository.
        spare: An empty folder.
        more: More options of the server.
    """
    backends, models = spare / "backends", spare / "models"
    shutil.copytree(folder / "backends", backends)
    shutil.copy(_stub(folder), backends / "python")
    shutil.copytree(repository, models)
    for each in models.iterdir():
        config = each / "config.pbtxt"
        text = config.read_text().replace('backend: "onnxruntime"', 'backend: "python"')
        config.write_text(text)
        packages = str(Path(np.__file__).parents[1])
        (each / "1" / "model.py").write_text(MODEL_PY.format(packages=packages))
    for file in (folder / "bin" / "tritonserver", backends / "python" / _stub(folder).name):
        file.chmod(0o755)
    ports = {protocol: _free_port() for protocol in ("http", "grpc")}
    words = [str(folder / "bin" / "tritonserver"), f"--model-repository={models}"]
    words += [f"--backend-directory={backends}", "--allow-metrics=false", *more]
    words += [f"--{protocol}-port={port}" for protocol, port in ports.items()]
    libraries = folder.parents[1] / "nvidia_pytriton.libs"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    log = (spare / "server.log").open("w")
    with log, subprocess.Popen(words, stdout=log, stderr=log, env=environment) as server:
        try:
            _wait(f"http://localhost:{ports['http']}/v2/health/ready", server, spare)
            yield {protocol: f"localhost:{port}" for protocol, port in ports.items()}
        finally:
            server.terminate()
            server.wait(60)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def _wait(url: str, server: subprocess.Popen[bytes], spare: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, (spare / "server.log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError((spare / "server.log").read_text()[-3000:])
