"""Checks and times the CUDA kernel of the correlation lookup on a GPU.

    python3 benchmarks/engines/correlation_kernel.py [--json FILE]

Needs a GPU, torch with CUDA, and torchvision. TensorRT is not needed. The script launches
plugins/correlation_lookup/kernel.cu at several sizes of the feature maps. It does so as the plugin
does, with cuda-bindings and NVRTC. If these are missing, it uses torch.cuda._compile_kernel.

The result is compared with the op in torch, and with the all-pairs volume of torchvision's
CorrBlock. Prints a Markdown table. Exit code 1 means that an error is above its limit. The run
takes about a minute on an H200.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 12
# The kernel and the op round in different orders: about 256 products of standard normals, divided
# by 16. The volume is read at normalised coordinates: 480 * 6e-8 px of rounding, times slopes of
# about 5.
LIMIT_TORCH, LIMIT_TORCH_HALF, LIMIT_VOLUME = 2e-5, 8e-3, 2e-3


@dataclass(frozen=True)
class Case:
    """A case: `batch` feature maps of H x W x channels; a window radius; float16 or float32."""

    batch: int
    height: int
    width: int
    channels: int = 256
    radius: int = 4
    half: bool = False


CASES = (
    Case(1, 16, 16),
    Case(2, 17, 31),
    Case(3, 23, 33, channels=128, radius=3),
    Case(1, 19, 21, channels=102),
    Case(1, 55, 128),
    Case(1, 55, 128, channels=128, radius=3),
    Case(1, 55, 128, half=True),
    Case(1, 135, 240),
    Case(1, 270, 480),
    Case(1, 270, 480, half=True),
    Case(1, 270, 480, channels=128, radius=3),
)


def load_plugin() -> tuple[Any, Any]:
    """The modules `torch_op` and `cuda` of the plugin."""
    sys.path.insert(0, str(ROOT))
    package = "pipeline.plugins.correlation_lookup"
    torch_op, cuda = (importlib.import_module(f"{package}.{name}") for name in ("torch_op", "cuda"))
    return torch_op, cuda


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a call on the GPU, after two warm-up calls."""
    times = []
    for number in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak_bytes(call: Callable[[], Any]) -> int:
    """The peak GPU memory that a call adds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def make_kernel(cuda: Any) -> tuple[str, Callable[..., Tensor]]:
    """The launch method as text, and a function that launches kernel.cu with the op's arguments."""
    try:
        capability = torch.cuda.get_device_capability()
        cuda.compile_kernel(4, False, capability)
    except Exception as error:
        print(f"the plugin's launch fails ({error}); using torch.cuda._compile_kernel")
        return "torch.cuda._compile_kernel", _through_torch(cuda)

    def call(
        features: Tensor, levels: Sequence[Tensor], coordinates: Tensor, radius: int
    ) -> Tensor:
        windows, sizes = _prepare(cuda, features, levels, radius)
        pointers = [t.data_ptr() for t in (features, *levels, coordinates, windows)]
        stream = torch.cuda.current_stream().cuda_stream
        cuda.launch(radius, features.dtype == torch.float16, sizes, pointers, stream)
        return windows

    return "the plugin's own launch (cuda-bindings)", call


def _prepare(
    cuda: Any, features: Tensor, levels: Sequence[Tensor], radius: int
) -> tuple[Tensor, Any]:
    batch, height, width, channels = features.shape
    points = len(levels) * (2 * radius + 1) ** 2
    windows = features.new_empty((batch, points, height, width))
    shapes = tuple((level.shape[1], level.shape[2]) for level in levels)
    return windows, cuda.Sizes(batch, height, width, channels, shapes)


def _through_torch(cuda: Any) -> Callable[..., Tensor]:
    compiled: dict[tuple[int, bool], Any] = {}

    def call(
        features: Tensor, levels: Sequence[Tensor], coordinates: Tensor, radius: int
    ) -> Tensor:
        windows, sizes = _prepare(cuda, features, levels, radius)
        key = (radius, features.dtype == torch.float16)
        if key not in compiled:
            macros = f"#define RADIUS {radius}\n#define HALF {int(key[1])}\n"
            source = macros + cuda.SOURCE.read_text(encoding="utf-8")
            compiled[key] = torch.cuda._compile_kernel(source, "correlation_lookup")
        compiled[key](
            grid=sizes.grid,
            block=(256, 1, 1),
            args=[features, *levels, coordinates, windows, *sizes.numbers],
            shared_mem=sizes.shared_bytes,
        )
        return windows

    return call


def make_inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Two feature maps [N, C, H, W] of standard normals, and coordinates [N, 2, H, W].

    The coordinates are the pixels' coordinates, moved smoothly by up to a quarter of the map. Some
    are whole numbers, and some are outside of the map.
    """
    generator = torch.Generator(device).manual_seed(case.height)
    shape = (case.batch, case.channels, case.height, case.width)
    first, second = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    if case.half:
        first, second = first.half(), second.half()
    y, x = torch.meshgrid(
        torch.arange(case.height, device=device),
        torch.arange(case.width, device=device),
        indexing="ij",
    )
    grid = torch.stack([x, y]).float().repeat(case.batch, 1, 1, 1)
    flow = torch.stack([(y / 9).sin() * case.width / 4, (x / 13).cos() * case.height / 4])
    noise = torch.rand(grid.shape, generator=generator, device=device)
    coordinates = grid + flow + noise
    coordinates[:, :, ::5] = coordinates[:, :, ::5].round()
    coordinates[:, 0, 0, 0] = -1e9
    return first, second, coordinates


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite if only one of two elements is a number."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a.float() - b.float()).nan_to_num().abs().max())


def measure(case: Case, torch_op: Any, kernel: Callable[..., Tensor], block: Any) -> dict[str, Any]:
    """All measurements of one case.

    Args:
        case: The case.
        torch_op: The module of the op in torch.
        kernel: Launches kernel.cu.
        block: torchvision's CorrBlock.
    """
    first, second, coordinates = make_inputs(case, "cuda")
    row: dict[str, Any] = asdict(case)
    windows = _on_demand(row, (first, second, coordinates), torch_op, kernel)
    limit = LIMIT_TORCH_HALF if case.half else LIMIT_TORCH
    row["ok"] = row["error_torch"] <= limit
    torch.cuda.empty_cache()
    if not case.half:
        try:
            _volume(row, (first, second, coordinates), windows, block)
            row["ok"] = row["ok"] and row["error_volume"] <= LIMIT_VOLUME
        except RuntimeError as error:  # such as out of memory
            row["volume_failed"] = str(error).splitlines()[0][:120]
        torch.cuda.empty_cache()
    return row


def _on_demand(
    row: dict[str, Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    torch_op: Any,
    kernel: Callable[..., Tensor],
) -> Tensor:
    """Adds the measurements of the kernel and of the op in torch. Returns the kernel's windows."""
    first, second, coordinates = inputs
    correlation = torch_op.OnDemandCorrelation(row["radius"])
    row["maps_bytes"] = peak_bytes(lambda: correlation.build_pyramid(first, second))
    row["maps_ms"] = milliseconds(lambda: correlation.build_pyramid(first, second), 10)
    arguments = (correlation._features, correlation._levels, coordinates, row["radius"])
    windows = kernel(*arguments)
    row["kernel_bytes"] = peak_bytes(lambda: kernel(*arguments))
    row["kernel_ms"] = milliseconds(lambda: kernel(*arguments), 20)
    row["error_torch"] = apart(windows, torch_op.correlation_lookup(*arguments))
    row["torch_op_ms"] = milliseconds(lambda: torch_op.correlation_lookup(*arguments), 3)
    return windows


def _volume(
    row: dict[str, Any], inputs: tuple[Tensor, Tensor, Tensor], windows: Tensor, block: Any
) -> None:
    """Adds the measurements of the all-pairs volume, and compares the windows with it."""
    first, second, coordinates = inputs
    volume = block(radius=row["radius"])
    row["volume_bytes"] = peak_bytes(lambda: volume.build_pyramid(first, second))
    row["error_volume"] = apart(windows, volume.index_pyramid(coordinates))
    row["volume_lookup_ms"] = milliseconds(lambda: volume.index_pyramid(coordinates), 10)

    def rebuild() -> None:
        volume.corr_pyramid = []  # frees the memory before the next volume
        volume.build_pyramid(first, second)

    row["volume_ms"] = milliseconds(rebuild, 5)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The measurements as a Markdown table. Memory is what each method adds to its inputs."""

    def cell(row: dict[str, Any], name: str, form: str, scale: float = 1.0) -> str:
        return format(row[name] / scale, form) if name in row else "-"

    lines = [
        "| N, H x W, C, radius | error vs torch op | error vs volume | volume: build + lookup ms "
        f"| on demand: maps + kernel ms | op in torch ms | {UPDATES} updates: volume / on demand "
        "| memory: volume / on demand MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_volume = "-"
        if "volume_ms" in row:
            of_volume = f"{row['volume_ms'] + UPDATES * row['volume_lookup_ms']:.2f}"
        of_kernel = f"{row['maps_ms'] + UPDATES * row['kernel_ms']:.2f}"
        memory = (row["maps_bytes"] + row["kernel_bytes"]) / 2**20
        kind = " half" if row["half"] else ""
        lines.append(
            f"| {row['batch']}, {row['height']} x {row['width']}, {row['channels']}, "
            f"{row['radius']}{kind} "
            f"| {row['error_torch']:.1e} | {cell(row, 'error_volume', '.1e')} "
            f"| {cell(row, 'volume_ms', '.2f')} + {cell(row, 'volume_lookup_ms', '.3f')} "
            f"| {row['maps_ms']:.2f} + {row['kernel_ms']:.3f} | {row['torch_op_ms']:.1f} "
            f"| {of_volume} / {of_kernel} "
            f"| {cell(row, 'volume_bytes', '.0f', 2**20)} / {memory:.0f} |"
        )
        if "volume_failed" in row:
            lines.append(f"| | | volume: {row['volume_failed']} | | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the measurements to this file"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/engines/correlation_kernel.py: needs a GPU that torch can use")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch_op, cuda = load_plugin()
    from torchvision.models.optical_flow.raft import CorrBlock

    way, kernel = make_kernel(cuda)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; launched by {way}")
    rows = []
    with torch.inference_mode():
        for case in CASES:
            rows.append(measure(case, torch_op, kernel, CorrBlock))
            print(f"{case}: {'ok' if rows[-1]['ok'] else 'WRONG'}", flush=True)
    print("\n" + table(rows))
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "launch": way}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
    if not all(row["ok"] for row in rows):
        raise SystemExit("the kernel is wrong at some sizes")


if __name__ == "__main__":
    main()
