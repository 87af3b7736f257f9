"""The plain exports behind the naive engine. Building one needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "engines"
sys.path.append(str(BENCHMARKS))

import children  # noqa: E402
from naive_engine import EXPORTERS  # noqa: E402


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_plain_export_has_the_names_and_dims_of_the_model(tmp_path: Path, exporter: str) -> None:
    place = tmp_path / "naive.onnx"
    command = [sys.executable, str(BENCHMARKS / "naive_engine.py"), "export", "unet_sr"]
    command += ["--option", "channels=4", "--exporter", exporter, "--out", str(place)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=children.other_python([])
    )
    assert done.returncode == 0, done.stderr
    model = onnx.load(place)
    graph = model.graph
    if exporter == "torchscript-17":
        assert [o.version for o in model.opset_import if not o.domain] == [17]
    (image,) = graph.input
    dims = [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim]
    assert dims[1] == 3 and all(isinstance(dims[n], str) for n in (0, 2, 3))
    assert len(graph.output) == 1
    assert narrow(place) == ""
    for dim, size in zip(image.type.tensor_type.shape.dim, (4, 3, 256, 256), strict=True):
        dim.dim_value = size
    onnx.save(model, place)
    assert narrow(place).startswith("at batch=1,h=200,w=200 ONNX Runtime says: ")


def narrow(place: Path) -> str:
    """What `naive_engine.py check` says of a file of the UNet."""
    command = [sys.executable, str(BENCHMARKS / "naive_engine.py"), "check", "unet_sr"]
    said: dict[str, str] = {}
    why = children.lines(
        [*command, "--option", "channels=4", str(place)], said.update, limit=300,
        env=children.other_python([]),
    )  # fmt: skip
    assert not why, why
    return said["narrow"]
