"""Measures the cost of the rewrite passes, and their effect on TensorRT-RTX's network.

    python benchmarks/conversion/rewriting.py [MODEL.onnx ...]

Without arguments it measures two models. One is RAFT with 12 updates, from `make convert
MODEL=raft` (artifacts/raft, converted if it is missing). The other is torchvision's ViT-B/16 with a
dynamic batch.

For every target it prints the seconds of all passes together, and the nodes before and after. It
also prints the memory that the rewrite adds, divided by the model's size. For TensorRT-RTX it also
prints the layers of the parsed network before and after. A separate process measures each line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.commands.table import table
from pipeline.machine.child import Child

_VIT = """
import sys, torch
from pipeline.machine.libraries import import_torchvision
import_torchvision()
from torchvision.models import vit_b_16
torch.manual_seed(0)
x = torch.randn(2, 3, 224, 224)
with torch.no_grad():
    program = torch.export.export(
        vit_b_16().eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=32)},)
    )
    torch.onnx.export(program, dynamo=True, opset_version=18).save(sys.argv[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = arguments.models or _default_models(Path(folder))
        rows = [row for model in models for row in _rows(model, Path(folder))]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    head = [
        "model",
        "target",
        "seconds",
        "memory / model",
        "nodes",
        "RTX layers",
        "passes that changed it",
    ]
    print(table([head, *([str(value) for value in row.values()] for row in rows)]))


def _default_models(folder: Path) -> list[Path]:
    raft = Path("artifacts/raft/exported.onnx")
    if not raft.is_file():
        subprocess.run([sys.executable, "-m", "pipeline", "export", "raft"], check=True)
    vit = folder / "vit_b_16.onnx"
    subprocess.run([sys.executable, "-c", _VIT, str(vit)], check=True, stdout=subprocess.DEVNULL)
    return [raft, vit]


def _rows(model: Path, folder: Path) -> list[dict[str, Any]]:
    from pipeline.build.shape_inference import why_not_asked
    from pipeline.machine.target import TARGETS

    rtx = TARGETS["rtx-1.7"]
    rows = []
    for target in TARGETS.values():
        out = folder / "rewritten.onnx"
        with Child() as child:
            done = child.call(measure, model, out, target)
        layers = "-"
        if target is rtx and not why_not_asked(rtx):
            with Child() as child:
                counts = [child.call(layers, path) for path in (model, out)]
            layers = " -> ".join(map(str, counts))
        rows.append(
            {
                "model": model.parent.name if model.stem == "exported" else model.stem,
                "target": target.name,
                "seconds": f"{done['seconds']:.2f}",
                "memory": f"{done['memory'] / done['size']:.1f}",
                "nodes": f"{done['before']} -> {done['after']}",
                "layers": layers,
                "passes": ", ".join(f"{name} {count}" for name, count in done["passes"]) or "none",
            }
        )
    return rows


def measure(model: Path, out: Path, target: Any) -> dict[str, Any]:
    """Measures one rewrite, in a process that has only imported everything."""
    import onnx_ir.passes.common  # noqa: F401
    import onnxruntime  # noqa: F401

    from pipeline.machine.resources import Stopwatch, peak_memory, reset_peak_memory
    from pipeline.rewrite.rewrite import rewrite

    reset_peak_memory()
    held = peak_memory() or 0
    watch = Stopwatch()
    with watch("rewrite"):
        result = rewrite(model, out, target)
    files = [model, model.with_name(f"{model.name}.data")]
    return {
        "seconds": watch.seconds["rewrite"],
        "memory": (peak_memory() or 0) - held,
        "size": sum(path.stat().st_size for path in files if path.is_file()),
        "before": result.nodes_before,
        "after": result.nodes_after,
        "passes": [(p.name, len(p.rewritten)) for p in result.passes if p.rewritten],
    }


def layers(model: Path) -> int:
    """The layers of the network that TensorRT-RTX's parser makes of the file, before any fusion."""
    from pipeline.machine.target import TARGETS, use

    trt = use(TARGETS["rtx-1.7"])
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(model)), parser.get_error(0).desc()
    return int(network.num_layers)


if __name__ == "__main__":
    import rewriting  # by the name of this module: a child imports `measure` and `layers` from it

    rewriting.main()
