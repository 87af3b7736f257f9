"""The op of `torch_op` as a node of ONNX: what torch.onnx.export needs to write it.

ONNX Runtime then needs the function of `function.py` in the model, and the domain among its opset
imports.
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
        ExportError: the op has another number of levels than it has in ONNX.
    """
    if len(levels) != LEVELS:
        raise ExportError(f"{DOMAIN}::{NAME} has {LEVELS} levels in ONNX, the model {len(levels)}")
    return _node(features, *levels, coordinates, radius=radius)


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {correlation_lookup._opoverload: translate}
