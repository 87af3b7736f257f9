"""``matrix``: prints the conversions of a farm, as a table or as Kubernetes Jobs.

A Job is ``batch/v1``: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1.
The node labels of a GPU's compute capability are those of NVIDIA's GPU feature discovery:
https://github.com/NVIDIA/k8s-device-plugin/blob/main/docs/gpu-feature-discovery/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pipeline.commands.options import Each
from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.errors import InputError
from pipeline.machine.progress import Announce
from pipeline.machine.target import DEFAULT_TARGET, TARGETS
from pipeline.models import MODELS

_RETRIES = 3  # as on Ray
_KEPT = 7 * 24 * 3600  # seconds that a finished Job and its log stay


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``matrix``."""
    sub = add(
        "matrix", command,
        "List the conversions of every model for several targets and GPUs, as a table or as "
        "Kubernetes Jobs.",
    )  # fmt: skip
    sub.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="TARGET", action=Each,
        help=f"Convert for this TensorRT: {', '.join(TARGETS)}. Repeat for more (default: "
        f"{DEFAULT_TARGET})",
    )  # fmt: skip
    sub.add_argument(
        "--gpu", action="append", default=[], metavar="SM,...",
        help="Build an engine for these GPUs. Repeat for more engines (default: one for every GPU "
        "that the target supports)",
    )  # fmt: skip
    sub.add_argument(
        "--kubernetes", metavar="IMAGE",
        help="Print a Kubernetes Job for each conversion, that runs this container image, as YAML. "
        "It needs --store",
    )  # fmt: skip
    sub.add_argument("--store", metavar="STORE", help="The store of the Jobs: s3://... or gs://...")


def command(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``matrix``."""
    from pipeline.commands.farm.matrix import matrix, memory_of, targets_of
    from pipeline.store.store import Store

    del announce
    jobs = matrix(list(MODELS), targets_of(arguments), arguments.gpu)
    if arguments.kubernetes is None:
        if arguments.json:
            show(json.dumps([asdict(job) for job in jobs], indent=2))
        else:
            rows = [(job.model, job.target, ",".join(job.gpus) or "-") for job in jobs]
            show(table([("model", "target", "GPU"), *rows]))
        return 0
    store = arguments.store or ""
    if "://" not in store or store.startswith(("memory:", "file:", "local:")):
        raise InputError(
            f"--store {store or 'is missing'}: a Job does not see the folders of this machine. "
            "Pass --store s3://BUCKET/PATH or gs://BUCKET/PATH"
        )
    memory = memory_of(Store.open(store), list(MODELS))
    found = [kubernetes_job(job, arguments.kubernetes, store, memory[job.model]) for job in jobs]
    if arguments.json:
        show(json.dumps(found, indent=2))
    else:  # JSON is YAML: https://yaml.org/spec/1.2.2/#12-yaml-history
        show("\n".join(f"---\n{json.dumps(job, indent=2)}" for job in found))
    return 0


def kubernetes_job(job: Any, image: str, store: str, memory: int) -> dict[str, Any]:
    """Returns one conversion as a Kubernetes Job of ``batch/v1``.

    Args:
        job: The conversion, a `pipeline.commands.farm.matrix.Job`.
        image: The container image. It has pipeline, the models' libraries and the target's
            TensorRT.
        store: The store's address.
        memory: The memory that it asks for, in bytes.

    Returns:
        The Job. Its name has a hash of its spec: the pod template of a Job cannot be changed.
    """
    words = ["pipeline", "convert", job.model, "--target", job.target, "--store", store]
    words += ["--gpu", ",".join(job.gpus)] if job.gpus else []
    words += ["--out", f"/tmp/{job.model}"]
    container: dict[str, Any] = {
        "name": "convert",
        "image": image,
        "command": words,
        "resources": {"requests": {"cpu": "1", "memory": str(memory)}},
    }
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if job.builds_on_gpu:
        container["resources"]["limits"] = {"nvidia.com/gpu": "1"}
        for kind in job.gpus:
            pod["nodeSelector"] = {
                "nvidia.com/gpu.compute.major": kind[2:-1],
                "nvidia.com/gpu.compute.minor": kind[-1],
            }
    spec = {
        "backoffLimit": _RETRIES, "ttlSecondsAfterFinished": _KEPT, "template": {"spec": pod},
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _name(job.text, spec), "labels": {"app": "pipeline"}},
        "spec": spec,
    }


def _name(text: str, spec: dict[str, Any]) -> str:
    """A name of at most 63 lower-case letters, digits and ``-`` (RFC 1123), unique for the spec."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    digits = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    return f"{plain[:54].strip('-')}-{digits[:8]}"
