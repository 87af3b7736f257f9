"""Charts of a report as SVG shapes: sizes on a map, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 320  # of a map, in CSS pixels
_LEFT, _BOTTOM, _EDGE = 64, 44, 16
_LEVELS = 5  # colours of errors


@dataclass(frozen=True)
class Dot:
    """One set of sizes on a map.

    Args:
        x, y: the centre.
        kind: ``failed``, ``left-out``, ``level-0`` (the smallest errors) to ``level-4``, or
            ``plain`` if nothing was measured.
        text: the sizes, and what came out.
    """

    x: float
    y: float
    kind: str
    text: str


@dataclass(frozen=True)
class Tick:
    """A number on an axis, at a place along it."""

    at: float
    text: str


@dataclass(frozen=True)
class SizeMap:
    """Sets of sizes over one dim or two.

    Args:
        across: the name of the dim on the horizontal axis.
        up: the name of the dim on the vertical axis; empty if there is one dim.
        dots: the sets of sizes.
        columns, rows: the ticks of the axes.
        legend: the kinds of dots, each with what it means.
    """

    across: str
    up: str
    dots: tuple[Dot, ...]
    columns: tuple[Tick, ...]
    rows: tuple[Tick, ...]
    legend: tuple[tuple[str, str], ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Point:
    """A set of sizes, and what came out.

    Args:
        sizes: the size of each dim.
        error: the largest error in units of the output's largest value; None if none was measured.
        failed: True if a result at these sizes failed.
        text: what came out, for a reader.
        left_out: True if nothing was compared.
    """

    sizes: Mapping[str, int]
    error: float | None
    failed: bool
    text: str
    left_out: bool = False


def size_map(points: Sequence[Point], ranges: Mapping[str, tuple[int, int]]) -> SizeMap | None:
    """A map of the points over the two dims with the widest ranges; the second one is across.

    Args:
        points: the points.
        ranges: the smallest and the largest size of each dim.

    Returns:
        The map; None without a dim that has several sizes.
    """
    free = [name for name, (low, high) in ranges.items() if high > low]
    wide = sorted(free, key=lambda name: -ranges[name][1] / max(ranges[name][0], 1))[:2]
    if not wide or not points:
        return None
    *first, across = sorted(wide, key=free.index)
    up = first[0] if first else ""
    right = WIDTH - _EDGE
    worst = max((p.error for p in points if p.error and not p.failed), default=0.0)
    failed = max((p.error for p in points if p.error and p.failed), default=0.0)
    dots = []
    for point in points:
        x = _placed(point.sizes.get(across, 0), ranges[across], _LEFT, right)
        y = (HEIGHT - _BOTTOM + _EDGE) / 2
        if up:
            y = _placed(point.sizes.get(up, 0), ranges[up], HEIGHT - _BOTTOM, _EDGE)
        dots.append(Dot(round(x, 1), round(y, 1), _kind(point, worst), point.text))
    order = {"failed": 2, "left-out": 0}  # what failed is drawn last
    return SizeMap(
        across,
        up,
        tuple(sorted(dots, key=lambda dot: order.get(dot.kind, 1))),
        _ticks(ranges[across], _LEFT, right),
        _ticks(ranges[up], HEIGHT - _BOTTOM, _EDGE) if up else (),
        _legend({dot.kind for dot in dots}, worst, failed),
    )


def bars(values: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    """Each name with its value, and the value in percent of the largest."""
    most = max(values.values(), default=0.0) or 1.0
    return tuple((name, value, round(100 * value / most, 1)) for name, value in values.items())


def _placed(size: int, ends: tuple[int, int], first: float, last: float) -> float:
    """A place on a logarithmic axis, which shows small sizes as well as large ones."""
    low, high = (math.log(max(end, 1)) for end in ends)
    share = (math.log(max(size, 1)) - low) / (high - low) if high > low else 0.5
    return first + share * (last - first)


def _ticks(ends: tuple[int, int], first: float, last: float) -> tuple[Tick, ...]:
    low, high = ends
    middle = round(math.sqrt(max(low, 1) * high))
    sizes = sorted({low, middle, high})
    return tuple(Tick(round(_placed(s, ends, first, last), 1), str(s)) for s in sizes)


def _kind(point: Point, worst: float) -> str:
    if point.left_out:
        return "left-out"
    if point.failed:
        return "failed"
    if point.error is None:
        return "plain"
    if not point.error or not worst:
        return "level-0"
    decades = math.log10(worst / point.error)
    return f"level-{max(0, _LEVELS - 1 - int(2 * decades))}"


def _legend(kinds: set[str], worst: float, failed: float) -> tuple[tuple[str, str], ...]:
    texts = {
        "failed": f"failed, error up to {failed:.0e}" if failed else "failed",
        "left-out": "not compared",
        "plain": "compared, without numbers",
        **{
            f"level-{level}": f"error up to {worst / 10 ** ((_LEVELS - 1 - level) / 2):.0e}"
            for level in range(_LEVELS)
        },
    }
    if not worst:
        texts["level-0"] = "no error"
    return tuple((kind, text) for kind, text in texts.items() if kind in kinds)
