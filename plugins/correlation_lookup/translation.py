"""Translates the op of `torch_op` to an ONNX node, for torch.onnx.export.

To run the node, ONNX Runtime needs the function of `function.py` and its domain's opset import in
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxscript.values import Op, Opset

from pipeline.errors import ExportError
from pipeline.plugins.base import DOMAIN
from pipeline.plugins.correlation_lookup.function import LEVELS, NAME, schema
from pipeline.plugins.correlation_lookup.torch_op import correlation_lookup

_node: Any = Op(Opset(DOMAIN, 1), NAME, schema())


def translate(features: Any, levels: Sequence[Any], coordinates: Any, radius: int) -> Any:
    """``trt_pipeline::correlation_lookup``.

    Raises:
        ExportError: the number of levels differs from the ONNX function's.
    """
    if len(levels) != LEVELS:
        raise ExportError(
            f"{DOMAIN}::{NAME} has {LEVELS} levels in ONNX, but the model has {len(levels)}"
        )
    return _node(features, *levels, coordinates, radius=radius)


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {correlation_lookup._opoverload: translate}
