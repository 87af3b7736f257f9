"""Lets a model with grouped products of matrices be traced in float32 and float16.

torch's kernels of ``torch.nn.functional.grouped_mm`` take float32, float16 and bfloat16. Its fake
kernel, which computes shapes while a model is traced, refuses all but bfloat16 (torch 2.13).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import _meta_registrations

from pipeline.export.exchange import Exchange

_registrations: Any = _meta_registrations
_common = _registrations._meta_grouped_mm_common


def _of_every_dtype(mat_a: torch.Tensor, mat_b: torch.Tensor, **options: Any) -> Any:
    """`_meta_grouped_mm_common`, which makes a tensor of the output's shape."""
    own = mat_a.dtype == mat_b.dtype and mat_a.dtype in (torch.float32, torch.float16)
    if not own or options["scale_a"] is not None:
        return _common(mat_a, mat_b, **options)
    return _registrations._create_grouped_mm_output_tensor(
        mat_a, mat_b, options["offs"], options["out_dtype"]
    )


_exchange = Exchange({(_meta_registrations, _common.__name__): _of_every_dtype})


def every_dtype() -> AbstractContextManager[None]:
    """While it is active, the fake kernel takes the dtypes that the real one takes."""
    return _exchange.used()
