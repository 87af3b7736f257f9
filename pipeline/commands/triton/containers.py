"""The releases of NVIDIA's Triton containers, and the TensorRT in each.

A plan loads only in the TensorRT that wrote it, down to the fourth number. The table has the
releases whose TensorRT a source names. NVIDIA's own table of all releases is `MATRIX`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipeline.errors import InputError

MATRIX = "https://docs.nvidia.com/deeplearning/frameworks/support-matrix/index.html"
_SERVER = "https://github.com/triton-inference-server/server"
# release: the TensorRT of nvcr.io/nvidia/tritonserver:RELEASE-py3, and the source
TENSORRT: Mapping[str, tuple[str, str]] = {
    "23.04": ("8.6.1.2", f"{_SERVER}/issues/5812"),
    "23.05": ("8.6.1.2", f"{_SERVER}/issues/5975"),
    "24.02": ("8.6.3.1", f"{_SERVER}/issues/7221"),
    "24.03": ("8.6.3.1", f"{_SERVER}/issues/7221"),
    "24.04": ("8.6.3.1", f"{_SERVER}/issues/7221"),
    "24.05": ("10.0.1.6", f"{_SERVER}/issues/7374"),
    "24.10": ("10.5.0.18", f"{_SERVER}/blob/r24.10/docs/introduction/release_notes.md"),
    "24.12": ("10.7.0.23", f"{_SERVER}/blob/r24.12/docs/introduction/release_notes.md"),
}
# pip's packages of three numbers whose fourth number no container has, and the source
_WHEELS: Mapping[str, tuple[str, str]] = {
    "8.6.0": ("8.6.0.12", f"{_SERVER}/issues/5812"),
    "8.6.1": ("8.6.1.6", "https://github.com/NVIDIA/TensorRT/issues/3071"),
}
# its ONNX Runtime is 1.27.0, by docs/introduction/compatibility.md of the server's repository
ONNX_RUNTIME = "26.07"


def image(release: str) -> str:
    """The name of a release's container image."""
    return f"nvcr.io/nvidia/tritonserver:{release}-py3"


def find_release(tensorrt: str, given: str | None) -> str:
    """Finds the newest release of Triton's container that loads a plan.

    Args:
        tensorrt: The version that built the plan, as its manifest states it.
        given: The release that the user chose; None to look it up.

    Raises:
        InputError: No release is known to have this TensorRT. Or the given one has another one.
    """
    public = tensorrt.partition(".post")[0]
    full = _WHEELS.get(public, (public, ""))[0]
    if given is not None:
        has = TENSORRT.get(check_release(given), (full, ""))[0]
        if not _same(full, has):
            raise InputError(
                f"--container {given}: it has TensorRT {has}, and the plan needs {full}. Pass "
                "another release, or --backend onnxruntime"
            )
        return given
    fitting = [release for release, (has, _) in TENSORRT.items() if _same(full, has)]
    if not fitting:
        raise InputError(
            f"no Triton container is known to have TensorRT {full}, which built the plan. Find a "
            f"release in {MATRIX} and pass --container RELEASE, or pass --backend onnxruntime"
        )
    return max(fitting)


def check_release(given: str) -> str:
    """Returns a release as it is given. Raises `InputError` if it is not like ``24.12``."""
    if not re.fullmatch(r"\d\d\.\d\d", given, re.ASCII):
        raise InputError(f"--container {given}: is not a release. Write for example 24.12")
    return given


def _same(wanted: str, has: str) -> bool:
    """True if the container's version has all numbers of the wanted one."""
    return f"{has}.".startswith(f"{wanted}.")
