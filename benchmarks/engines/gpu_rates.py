"""A GPU's rates, which floors are told by: products in each precision, and its memory.

Nothing of the pipeline is imported before it is needed: what measures has torch, and maybe not
much else.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

# operations a second, and bytes a second read plus written, of this GPU where none were measured
RATES_OF = "NVIDIA H200"
RATES = {"fp16": 790e12, "tf32": 395e12, "fp32": 67e12, "bandwidth": 4.3e12}


def measured_rates() -> dict[str, Any]:
    """This GPU's rates, through torch: products of 8192 x 8192 and a copy of 2 GiB, of random
    numbers; the median of 20 after a warm-up."""
    try:
        import torch
    except ImportError:
        raise SystemExit("error: no torch here: measure with a Python that has it") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU here: measure where it does")

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
    """What `floors.py measure --out` wrote.

    Raises:
        InputError: it is not there, or holds something else.
    """
    from pipeline.errors import InputError

    try:
        found = json.loads(path.read_text())
        return {name: float(found[name]) for name in RATES}
    except FileNotFoundError:
        raise InputError(f"--rates {path}: not there; `measure --out` writes it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--rates {path}: not what `measure` wrote: {error!r}") from None
