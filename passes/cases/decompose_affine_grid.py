"""AffineGrid in two and three dimensions, and near misses."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Failure, Kind

_PARSE: dict[str, Failure] = {"rtx-1.7": "parse"}
_IMAGES = (
    {"theta": (1, 2, 3), "x": (1, 2, 2, 3)},
    {"theta": (3, 2, 3), "x": (3, 2, 9, 8)},
    {"theta": (2, 2, 3), "x": (2, 2, 16, 31)},
)
_VOLUMES = (
    {"theta": (1, 3, 4), "x": (1, 2, 2, 3, 4)},
    {"theta": (2, 3, 4), "x": (2, 2, 5, 9, 8)},
)


def _case(name: str, kind: Kind, text: str, shapes: Any, **more: Any) -> Case:
    more.setdefault("fails", _PARSE)
    more.setdefault("opset", 20)
    return Case("decompose_affine_grid", name, kind, text, shapes, **more)


CASES: tuple[Case, ...] = (
    *(
        _case(
            f"image, align_corners={aligned}",
            "positive",
            "(float[n,2,3] theta, float[n,2,h,w] x) => (float[n,h,w,2] y) { s = Shape(x) "
            f"y = AffineGrid<align_corners={aligned}>(theta, s) }}",
            _IMAGES,
        )
        for aligned in (0, 1)
    ),
    *(
        _case(
            f"volume, align_corners={aligned}",
            "positive",
            "(float[n,3,4] theta, float[n,2,d,h,w] x) => (float[n,d,h,w,3] y) { s = Shape(x) "
            f"y = AffineGrid<align_corners={aligned}>(theta, s) }}",
            _VOLUMES,
        )
        for aligned in (0, 1)
    ),
    _case(
        "constant sizes",
        "positive",
        "(float[n,2,3] theta) => (float[n,5,7,2] y) <int64[4] s = {1, 3, 5, 7}> { "
        "y = AffineGrid(theta, s) }",
        ({"theta": (1, 2, 3)},),
    ),
    _case(
        "a spatial transformer",
        "positive",
        "(float[n,2,3] theta, float[n,2,h,w] x) => (float[n,2,h,w] y) { s = Shape(x) "
        'g = AffineGrid(theta, s) y = GridSample<mode="linear">(x, g) }',
        _IMAGES[:2],
        # the error is the grid's last bit times the image's width: a small theta keeps it small
        ranges={"theta": (-0.4, 0.4)},
    ),
    _case(
        "another op's grid",
        "near miss",
        "(float[n,2,h,w] x, float[n,h,w,2] g) => (float[n,2,h,w] y) { "
        'y = GridSample<mode="linear">(x, g) }',
        (
            {"x": (1, 2, 2, 3), "g": (1, 2, 3, 2)},
            {"x": (2, 2, 9, 8), "g": (2, 9, 8, 2)},
        ),
        fails={},
    ),
    _case(
        "double precision",
        "refusal",
        "(double[n,2,3] theta, float[n,2,h,w] x) => (double[n,h,w,2] y) { s = Shape(x) "
        "y = AffineGrid(theta, s) }",
        _IMAGES,
        reason="not float or half",
    ),
)
