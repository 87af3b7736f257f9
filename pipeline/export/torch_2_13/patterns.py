"""Looks for a pattern of several outputs only where its first output can be.

onnxscript's optimizer, which torch.onnx.export calls, lists all nodes of the graph for each node
that it compares with such a pattern, so its time grows with the square of the nodes. A node of
another op than the first output's ends the search before that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from onnxscript.rewriter import _basics, _matcher

from pipeline.export.exchange import Exchange

_match: Callable[..., Any] = _matcher.SimplePatternMatcher.match


def _first_of_all(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
    """`SimplePatternMatcher.match`, unless the node's op is another than the first output's."""
    outputs = matcher.pattern.output_nodes
    if len(outputs) > 1:
        wanted = outputs[0].op_identifier()  # domain, op and overload; a pattern fits any overload
        if wanted is not None and wanted[:2] != node.op_identifier()[:2]:
            return _basics.MatchResult().fail("The first output is of another op.")
    return _match(matcher, model, graph, node, **options)


_exchange = Exchange({(_matcher.SimplePatternMatcher, _match.__name__): _first_of_all})


def by_first_output() -> AbstractContextManager[None]:
    """While it is active, onnxscript's rewriter does not list all nodes for each node."""
    return _exchange.used()
