"""The commands ``triton ARTIFACT REPOSITORY`` and ``triton-replay ARTIFACT``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pipeline.commands.options import plugins
from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.machine.progress import Announce

if TYPE_CHECKING:
    from pipeline.commands.triton.replay import Replayed
    from pipeline.commands.triton.repository import Written


_NO_ENGINE = (
    "model.onnx with ONNX Runtime on the CPU, in float32 also where the engine is in half "
    "precision. The engine is not used"
)


def add_commands(add: Callable[..., Any]) -> None:
    """Adds ``triton`` and ``triton-replay`` to the command line."""
    sub = add(
        "triton",
        triton,
        "Write an artifact into a model repository of NVIDIA's Triton Inference Server.",
    )
    sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    sub.add_argument(
        "repository", type=Path, metavar="REPOSITORY",
        help="Folder of the repository. Its other models stay as they are",
    )  # fmt: skip
    sub.add_argument(
        "--backend", choices=("auto", "tensorrt", "onnxruntime"), default="auto",
        help="Serve the engine, or model.onnx (default: auto, the engine if Triton can load it)",
    )  # fmt: skip
    sub.add_argument(
        "--container", metavar="RELEASE",
        help="Release of Triton's container, such as 24.12 (default: one with the TensorRT that "
        "built the engine)",
    )  # fmt: skip
    plugins(sub)
    again = add(
        "triton-replay",
        triton_replay,
        "Send an artifact's stored inputs to a Triton server, and compare the answers. The exit "
        "code is 1 if one differs.",
    )
    again.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    again.add_argument(
        "--url", metavar="HOST:PORT",
        help="Address of the server (default: localhost:8001 by grpc, localhost:8000 by http)",
    )  # fmt: skip
    again.add_argument(
        "--protocol", choices=("grpc", "http"), default="grpc",
        help="Protocol of the requests (default: grpc)",
    )  # fmt: skip
    for each in (sub, again):
        each.add_argument(
            "--name",
            metavar="NAME",
            help="Name of the model on the server (default: the artifact's)",
        )


def triton(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``triton``. Returns 0: the model is written."""
    from pipeline.artifact.artifact import Artifact
    from pipeline.commands.triton.repository import Choice, write_model

    del announce
    choice = Choice(arguments.backend, arguments.name, arguments.container, arguments.plugin)
    written = write_model(Artifact.open(arguments.artifact), arguments.repository, choice)
    show(written.to_json() if arguments.json else written_text(written, arguments.artifact))
    return 0


def triton_replay(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``triton-replay``. Returns 0 if all answers are right, 1 if one is not."""
    from pipeline.artifact.artifact import Artifact
    from pipeline.commands.triton.replay import replay

    protocol = arguments.protocol
    url = arguments.url or ("localhost:8001" if protocol == "grpc" else "localhost:8000")
    found = replay(Artifact.open(arguments.artifact), url, protocol, arguments.name, announce)
    show(found.to_json() if arguments.json else replayed_text(found))
    return 0 if found.ok else 1


def written_text(written: Written, artifact: Path) -> str:
    """What was written, how requests are batched, and how to start the server."""
    engine = f" with TensorRT {written.tensorrt}" if written.tensorrt else ""
    gpu = ", ".join(written.compute_capabilities)
    batches = f"batches of up to {written.max_batch_size}"
    if not written.max_batch_size:
        batches = f"one by one: {written.why_no_batches}"
    lines = [
        f"model:    {written.model}, for Triton's backend {written.backend}",
        f"serves:   {_NO_ENGINE}" if written.backend == "onnxruntime" else "",
        f"server:   {written.image}{engine}",
        f"GPU:      compute capability {gpu}" if gpu else "",
        f"requests: {batches}",
        f"warm-up:  {', '.join(written.warm_up) or 'none'}",
        _compared(written, artifact),
        f"start:    {written.command}",
    ]
    return "\n".join(line for line in lines if line)


def _compared(written: Written, artifact: Path) -> str:
    """The line on the comparison; empty if all of it passed."""
    if written.engine_failed:
        return "compared: model.onnx passed. The engine failed, and is not served"
    return "" if written.compared else f"compared: no. Run `pipeline verify {quote(str(artifact))}`"


def replayed_text(found: Replayed) -> str:
    """A table of all answers, and the outcome."""
    rows = [("sizes", "output", "largest difference", "verdict")]
    bad = []
    for point in found.points:
        for verdict in point.results:
            most = "-" if verdict.max_abs is None else f"{verdict.max_abs:.3g}"
            rows.append((point.label, verdict.output, most, verdict.kind))
            if not verdict.passed:
                bad.append(f"{point.label}: {verdict.output}: {verdict.text}")
    bad += [f"{sizes}: the server failed: {text}" for sizes, text in found.failed.items()]
    lines = [table(rows), ""] if found.points else []
    lines += [f"not sent at {sizes}: {why}" for sizes, why in found.left_out.items()]
    lines += bad
    server = f"{found.name} on Triton ({found.backend})"
    if found.ok:
        count = len(found.points)
        at = f"{count} set{'' if count == 1 else 's'} of sizes"
        lines.append(f"{server} agrees with {found.reference} at {at}")
    else:
        problems = f"{len(bad)} problem{'' if len(bad) == 1 else 's'}"
        lines.append(f"{server} DIFFERS from {found.reference}: {problems}")
    return "\n".join(lines)
