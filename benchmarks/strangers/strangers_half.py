"""Converts models of other libraries to half precision, without a tolerance from anybody.

    python benchmarks/strangers/strangers_half.py [--only NAME ...] [--out DIR]

Each command is that of `strangers.py` with ``--quick --precision fp16``, and again with ``bf16``.
Prints a table as Markdown: the exit code, and the largest error of half.onnx, divided by the
output's largest value. It is compared with torch in float32. ONNX Runtime
computes half.onnx on the CPU with the rounding of a GPU. The packages are those of `strangers.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import strangers
from strangers_set import STRANGERS, Stranger

from pipeline.artifact.artifact import Artifact

MODELS = (
    "timm_resnet18", "timm_convnext_atto", "timm_vit_tiny", "smp_unet", "monai_unet",
    "spandrel_compact", "hf_segformer", "hf_bert", "hf_gpt2_cache", "hf_wav2vec2",
    "hf_distilbert",
)  # fmt: skip
PRECISIONS = ("fp16", "bf16")
LIMIT = 900  # CPU seconds of one conversion


def convert(stranger: Stranger, precision: str, out: Path) -> tuple[int, list[str]]:
    """Converts once. Returns the exit code (124 if it ran out of time), and the row's cells."""
    place = out / f"{stranger.name}-{precision}"
    more = ["--quick", "--force", "--precision", precision]
    code, text, seconds, _ = strangers.run([*strangers.command(stranger, place), *more], LIMIT)
    if code != 0:
        return 124 if code is None else code, ["-", f"{seconds:.0f}", strangers.last_line(text)]
    comparison = Artifact.open(place).manifest.comparison
    assert comparison is not None
    errors = [
        result.max_rel
        for point in comparison.points
        for result in point.results
        if result.pair == ("torch", "half") and result.max_rel is not None
    ]
    return 0, [f"{max(errors):.1e}" if errors else "not compared", f"{seconds:.0f}", ""]


def main() -> int:
    """Runs the conversions. Returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("bench-results/strangers-half"))
    options = parser.parse_args()
    strangers.worker.core = 0
    by_name = {stranger.name: stranger for stranger in STRANGERS}
    print("| model | precision | exit code | largest error | CPU s | why |")
    print("|---|---|---|---|---|---|")
    codes = []
    for name in options.only:
        for precision in PRECISIONS:
            code, cells = convert(by_name[name], precision, options.out.resolve())
            codes.append(code)
            print(f"| {name} | {precision} | {code} | {' | '.join(cells)} |", flush=True)
    print(f"\n{codes.count(0)} of {len(codes)} conversions ended with exit code 0.")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
