"""A GPU's rates for the floors: matrix products in each precision, and memory.

Imports of pipeline are inside of functions, because a Python that measures may only have torch.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

# operations a second, and bytes read plus written a second, if no rates were measured
RATES_OF = "NVIDIA H200"
RATES = {"fp16": 790e12, "tf32": 395e12, "fp32": 67e12, "bandwidth": 4.3e12}


def measured_rates() -> dict[str, Any]:
    """Measures this GPU's rates with torch: products of 8192 x 8192 and a copy of 2 GiB.

    The numbers are random. Each rate is the median of 20 runs after a warm-up.
    """
    try:
        import torch
    except ImportError:
        raise SystemExit("error: torch is not installed. Use a Python that has torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: torch finds no GPU. Use a machine with a GPU")

    def seconds(call: Any) -> float:
        found = []
        for n in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if n >= 5:
                found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)

    rates: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    size = 8192
    for name, dtype in (("fp16", torch.float16), ("tf32", torch.float32), ("fp32", torch.float32)):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates[name] = 2.0 * size**3 / seconds(lambda: torch.mm(a, b, out=out))  # noqa: B023
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    rates["bandwidth"] = 2.0 * source.numel() * 4 / seconds(lambda: target.copy_(source))
    return rates


def stored_rates(path: Path) -> dict[str, float]:
    """Reads the rates that `floors.py measure --out` wrote.

    Raises:
        InputError: The file does not exist, or is not a file of rates.
    """
    from pipeline.errors import InputError

    try:
        found = json.loads(path.read_text())
        return {name: float(found[name]) for name in RATES}
    except FileNotFoundError:
        raise InputError(f"--rates {path}: no such file. Write it with `measure --out`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--rates {path}: not a file from `measure`: {error!r}") from None
