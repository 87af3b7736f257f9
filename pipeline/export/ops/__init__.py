"""Ops of torch as ONNX, where torch's own exporter is wrong at sizes other than the example's.

Faults that are born at torch.onnx.export can't be mended in the graph: it holds the example's
window in place of an adaptive pool, or has lost the scale factor of an antialiased resize. So the
exporter is given other translations (its ``custom_translation_table``), which it takes in place of
its own and of torch's decompositions. Every node that they make carries the module and source
line of the op, as the exporter's own do.

Tied to torch 2.13: which overloads reach the exporter (``upsample_nearest2d.vec``), and that sizes'
``//`` and ``%`` are dispatched by `operator.floordiv` and `operator.mod`. `exporter.to_onnx` raises
where an op went another way; tests/export/ops hold each translation to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.export.ops import attention, integers, pools, reductions, resize, scatters, taps
from pipeline.plugins.correlation_lookup import translation as correlation_lookup

Translation = Callable[..., Any]

_TABLES: tuple[Mapping[Any, Translation], ...] = (
    pools.TRANSLATIONS,
    resize.TRANSLATIONS,
    taps.TRANSLATIONS,
    integers.TRANSLATIONS,
    attention.TRANSLATIONS,
    reductions.TRANSLATIONS,
    scatters.TRANSLATIONS,
    correlation_lookup.TRANSLATIONS,
)


def translation_table() -> dict[Any, Translation]:
    """A fresh table for ``torch.onnx.export(custom_translation_table=...)``: by OpOverload, or by
    the Python operator for arithmetic of sizes."""
    return {target: function for table in _TABLES for target, function in table.items()}
