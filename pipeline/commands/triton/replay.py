"""Sends an artifact's stored inputs to a Triton server, and compares its answers.

The protocols are KServe's, by tritonclient:
https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import PointInfo
from pipeline.artifact.records import encode
from pipeline.artifact.stored import stored_points
from pipeline.commands.triton.config import EXTRA
from pipeline.compare.near_zero import settled
from pipeline.compare.verdict import judge
from pipeline.errors import InputError, first_line
from pipeline.machine.progress import Announce
from pipeline.spec.dims import sizes_text
from pipeline.spec.tensors import Feed

Protocol = Literal["http", "grpc"]
RUN = "triton"
_SECONDS = 600.0  # of one request
_CONVERTED = {("int64", "int32"), ("float64", "float32")}  # what TensorRT lacks


@dataclass(frozen=True)
class Replayed:
    """The answers of a server, compared.

    Args:
        name: The model's name on the server.
        backend: The server's backend.
        reference: The run whose stored outputs the answers were compared with.
        points: The stored sizes, each with a verdict for each output.
        failed: The server's error by the sizes, as text.
        left_out: The sizes that were not sent, as text, and why.
    """

    name: str
    backend: str
    reference: str
    points: tuple[PointInfo, ...]
    failed: Mapping[str, str]
    left_out: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """True if the server answered at least once, and all its answers are right."""
        results = [verdict for point in self.points for verdict in point.results]
        return bool(results) and not self.failed and all(verdict.passed for verdict in results)

    def to_json(self) -> str:
        """All fields as JSON."""
        content = {
            "name": self.name,
            "backend": self.backend,
            "reference": self.reference,
            "ok": self.ok,
            "points": [encode(point) for point in self.points],
            "failed": dict(self.failed),
            "left_out": dict(self.left_out),
        }
        return json.dumps(content, indent=2)


class Server:
    """A model on a Triton server.

    Args:
        url: ``host:port``.
        protocol: ``http`` or ``grpc``.
        name: The model's name.

    Attributes:
        backend: The backend's name.
        max_batch_size: The largest batch; 0 if requests run alone.

    Raises:
        InputError: tritonclient is missing, no server answers, or it does not serve the model.
    """

    def __init__(self, url: str, protocol: Protocol, name: str) -> None:
        if "://" in url:
            raise InputError(f"--url {url}: pass host:port, without a scheme")
        try:
            if protocol == "http":
                from tritonclient import http as client
            else:
                from tritonclient import grpc as client
        except ImportError as error:
            raise InputError(f"triton-replay {EXTRA}") from error
        self._library, self._name, self._options = client, name, {}
        try:
            if protocol == "http":
                self._client = client.InferenceServerClient(url, network_timeout=_SECONDS)
                config = self._client.get_model_config(name)
                about = self._client.get_model_metadata(name)
            else:
                self._client = client.InferenceServerClient(url)
                self._options = {"client_timeout": _SECONDS}
                config = self._client.get_model_config(name, as_json=True)["config"]
                about = self._client.get_model_metadata(name, as_json=True)
        except Exception as error:  # of grpc, gevent and tritonclient, without a common base
            raise InputError(
                f"{url}: does not serve {name} by {protocol}: {first_line(error)}. Start the "
                "server, or pass --url, --protocol or --name"
            ) from error
        self.backend = str(config.get("backend", ""))
        self.max_batch_size = int(config.get("max_batch_size", 0))
        self._ports = {
            port["name"]: (port["datatype"], len(port.get("shape", ())))
            for port in (*about["inputs"], *about["outputs"])
        }

    def run(self, feed: Feed) -> dict[str, np.ndarray]:
        """The answer to one request, by output name.

        Raises:
            Exception: The server refuses the request, or does not answer. The errors of grpc,
                gevent and tritonclient have no common base.
        """
        from tritonclient.utils import triton_to_np_dtype

        inputs = []
        for name, array in feed.items():
            datatype, rank = self._ports.get(name, ("", array.ndim))
            wanted = np.dtype(triton_to_np_dtype(datatype) or array.dtype)
            if (array.dtype.name, wanted.name) in _CONVERTED:
                array = array.astype(wanted)  # noqa: PLW2901
            # Triton has no scalars: a number of each request has an axis of 1
            array = array.reshape(*array.shape, *[1] * (rank - array.ndim))  # noqa: PLW2901
            one = self._library.InferInput(name, array.shape, datatype)
            one.set_data_from_numpy(np.ascontiguousarray(array))
            inputs.append(one)
        answer = self._client.infer(self._name, inputs, **self._options)
        outputs = [name for name in self._ports if name not in feed]
        return {name: answer.as_numpy(name) for name in outputs}


def replay(
    artifact: Artifact, url: str, protocol: Protocol, name: str | None, announce: Announce
) -> Replayed:
    """Sends the stored inputs of an artifact to a server, and compares the answers.

    The reference is the stored outputs of the artifact's reference, and the tolerances are those
    of the artifact: those of its engine, if the server runs it.

    Raises:
        ArtifactError: The artifact stores no outputs.
        InputError: See `Server`.
    """
    manifest = artifact.manifest
    stored = stored_points(artifact.path, manifest.reference)
    server = Server(url, protocol, name or manifest.name)
    engine = server.backend == "tensorrt"
    tolerances = manifest.engine_tolerances() if engine else manifest.tolerances()
    points, failed, left_out = [], {}, {}
    for point in stored:
        sizes = manifest.interface.sizes_of({n: a.shape for n, a in point.feed.items()})
        text = sizes_text(sizes, "fixed sizes")
        announce(f"ask at {text}")
        batch = max((a.shape[0] for a in point.feed.values() if a.ndim), default=0)
        if 0 < server.max_batch_size < batch:
            left_out[text] = f"the server takes batches up to {server.max_batch_size}"
            continue
        profiles = manifest.interface.profiles
        if engine and not any(profile.allows(sizes) for profile in profiles):
            left_out[text] = "no profile of the engine allows it"
            continue
        try:
            got = server.run(point.feed)
        except Exception as error:  # see `Server.run`
            failed[text] = first_line(error)
            continue
        want = point.outputs
        alike = {n: _as_declared(array, want.get(n)) for n, array in got.items()}
        results = judge(manifest.reference, RUN, want, alike, tolerances)
        points.append(PointInfo(text, sizes, 0, tuple(results)))
    judged, _ = settled(points)
    return Replayed(
        name or manifest.name, server.backend, manifest.reference, tuple(judged), failed, left_out
    )


def _as_declared(array: np.ndarray, want: np.ndarray | None) -> np.ndarray:
    """The answer without an axis that Triton added, and in the model's dtype."""
    if want is None:
        return array
    if array.ndim == want.ndim + 1 and array.shape[-1] == 1:
        array = array.reshape(array.shape[:-1])
    if (want.dtype.name, array.dtype.name) in _CONVERTED:
        array = array.astype(want.dtype)
    return array
