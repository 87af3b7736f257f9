"""Translations of torch's ops to ONNX, where torch's exporter is correct only at example sizes.

A pass on the graph can't repair what torch.onnx.export loses: the graph has the example's window
instead of an adaptive pool, or lacks the scale factor of an antialiased resize. So the exporter
gets our translations (``custom_translation_table``), which replace its own and torch's
decompositions. Each node they make carries the module and source line of its op.

This depends on torch 2.13: on the overloads that reach the exporter (``upsample_nearest2d.vec``),
and on `operator.floordiv` and `operator.mod` as the keys of ``//`` and ``%`` of sizes.
`exporter.to_onnx` raises if an op bypassed its translation; tests/export/ops checks each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.export.ops import (
    angles,
    attention,
    convolutions,
    deformable,
    diagonals,
    einsum,
    extremes,
    floats,
    groups,
    integers,
    pools,
    recurrent,
    reductions,
    repeats,
    resize,
    roll,
    scans,
    scatters,
    search,
    selections,
    small_matrices,
    special,
    squeezes,
    taps,
)
from pipeline.plugins.correlation_lookup import translation as correlation_lookup

Translation = Callable[..., Any]

_TABLES: tuple[Mapping[Any, Translation], ...] = (
    pools.TRANSLATIONS,
    resize.TRANSLATIONS,
    roll.TRANSLATIONS,
    repeats.TRANSLATIONS,
    taps.TRANSLATIONS,
    integers.TRANSLATIONS,
    floats.TRANSLATIONS,
    attention.TRANSLATIONS,
    reductions.TRANSLATIONS,
    scatters.TRANSLATIONS,
    diagonals.TRANSLATIONS,
    einsum.TRANSLATIONS,
    extremes.TRANSLATIONS,
    scans.TRANSLATIONS,
    search.TRANSLATIONS,
    selections.TRANSLATIONS,
    special.TRANSLATIONS,
    squeezes.TRANSLATIONS,
    small_matrices.TRANSLATIONS,
    angles.TRANSLATIONS,
    convolutions.TRANSLATIONS,
    groups.TRANSLATIONS,
    recurrent.TRANSLATIONS,
    correlation_lookup.TRANSLATIONS,
)


def translation_table() -> dict[Any, Translation]:
    """A new table for ``torch.onnx.export(custom_translation_table=...)``.

    The keys are OpOverloads, or Python operators for the arithmetic of sizes.
    """
    tables = (*_TABLES, groups.of_libraries(), deformable.translations())
    return {target: function for table in tables for target, function in table.items()}
