"""Records the values of an eager torch run, and finds values of an ONNX file among them."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx

from pipeline.compare.divergence.fingerprints import PLACES, Print
from pipeline.graph.origin import NOWHERE, line_of, metadata_of

if TYPE_CHECKING:
    import torch

# the name of a torch op in the metadata of an exported node
_ATEN = re.compile(r"aten\.(\w+)")


@dataclass(frozen=True, eq=False)
class Seen:
    """A value that torch computed, with its op and the Python lines (file, line) of the call."""

    op: str
    lines: frozenset[tuple[str, int]]
    value: Print


def torch_prints(call: Callable[[], object], seconds: float) -> list[Seen]:
    """Returns the floating-point tensors of every op of an eager run, in order.

    Nothing is traced: the ops are those that torch runs, at the sizes of this run.

    Args:
        call: Runs the module.
        seconds: The time limit.

    Raises:
        TimeoutError: The run takes longer than `seconds`.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: list[Seen] = []
    end = time.monotonic() + seconds

    class Recorder(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            if time.monotonic() > end:
                raise TimeoutError
            result = func(*args, **(kwargs or {}))
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            tensors = [t for t in leaves if t.is_floating_point() or t.is_complex()]
            if tensors:
                lines = _lines()
                seen.extend(Seen(str(func), lines, _print(t)) for t in tensors)
            return result

    with torch.inference_mode(), Recorder():  # type: ignore[no-untyped-call, unused-ignore]
        call()
    return seen


def _lines() -> frozenset[tuple[str, int]]:
    frame = sys._getframe(2)
    lines = []
    while frame.f_back is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frozenset(lines)


def _print(tensor: torch.Tensor) -> Print:
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    shape = tuple(tensor.shape)
    flat = tensor.detach().reshape(-1).to(torch.float32)
    flat = torch.cat([flat, flat.new_zeros(1)])
    sample = flat[torch.from_numpy(PLACES % flat.numel())]
    facts = torch.stack([flat.amin(), flat.amax(), torch.linalg.vector_norm(flat)])
    return Print(shape, torch.cat([sample, facts]).numpy())


class Eager:
    """The values of an eager run, found again by shape and numbers."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._by_shape: dict[tuple[int, ...], list[Seen]] = defaultdict(list)
        self._by_line: dict[tuple[str, int], list[Seen]] = defaultdict(list)
        for one in seen:
            self._by_shape[one.value.shape].append(one)
            for line in one.lines:
                self._by_line[line].append(one)

    def apart(self, value: Print, node: onnx.NodeProto) -> float:
        """Returns the difference to the nearest value of the run, from the node's line if any."""
        same = self._by_shape.get(value.shape, [])
        line = line_of(node)
        same = [one for one in same if line in one.lines] or same
        least = math.inf
        for bound, one in sorted(((s.value.bound(value), s.value) for s in same), key=_first):
            if bound >= least:
                break
            least = min(least, one.apart(value))
        return least

    def has(self, value: Print, node: onnx.NodeProto) -> bool:
        """Returns True if the node's line has a value of this shape in the run, or ran the node's
        op. For a node without a line (padding), any line counts."""
        if line_of(node) == NOWHERE:
            return value.shape in self._by_shape
        op = _ATEN.search(metadata_of(node).get("pkg.torch.onnx.fx_node", ""))
        return any(
            one.value.shape == value.shape or (op is not None and one.op.split(".")[1] == op[1])
            for one in self._by_line.get(line_of(node), [])
        )

    def shape_like(self, value: Print, node: onnx.NodeProto) -> tuple[int, ...] | None:
        """Returns the shape at the node's line in the run that is most like the value's shape."""
        here = self._by_line.get(line_of(node), [])
        shapes = [one.value.shape for one in here if len(one.value.shape) == len(value.shape)]
        return min(
            reversed(shapes),
            key=lambda shape: sum(a != b for a, b in zip(shape, value.shape, strict=True)),
            default=None,
        )


def _first(pair: tuple[float, Print]) -> float:
    return pair[0]
