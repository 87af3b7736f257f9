"""Tables of how each standard op is lowered from opsets 18..24.

`CONVERTERS` holds the ops whose form changed. `SAME` holds ops whose later forms only accept more
dtypes, or have a new attribute with the old meaning as its default. A changed op in neither table
is refused (OptionalHasElement). A test compares the tables with all schemas of the standard.
"""

from __future__ import annotations

from pipeline.passes.infra import Refused
from pipeline.passes.lowering import images, norms, quantize, reductions, split
from pipeline.passes.lowering._site import Converter, Site, Steps

__all__ = ["CONVERTERS", "NEWEST", "SAME", "THROUGH_FLOAT32", "Converter", "Site", "Steps"]

# the newest opset whose changes the tables hold
NEWEST = 24


def _scatter(site: Site) -> Steps:
    reduction = site.node.attrs.get("reduction", "none")
    if site.crosses(18) and reduction in ("max", "min", b"max", b"min"):
        raise Refused(f"reduction {reduction} is new in opset 18")
    yield from ()


def _pool(site: Site) -> Steps:
    """AveragePool has dilations from opset 19, LpPool has dilations and ceil_mode from opset 18."""
    attrs, since = site.node.attrs, 19 if site.node.op == "AveragePool" else 18
    if not site.crosses(since) or "dilations" not in attrs:
        return
    if any(int(step) != 1 for step in attrs["dilations"]):
        raise Refused(f"dilations are new in opset {since}: use dilations of 1")
    yield "dilations of 1 dropped"
    del attrs["dilations"]


def _cast(site: Site) -> Steps:
    """Drops attributes that only matter for float8. Newer float8 dtypes are refused elsewhere."""
    news = [(key, since) for key, since in (("saturate", 19), ("round_mode", 24))
            if key in site.node.attrs and site.crosses(since)]  # fmt: skip
    if news:
        yield f"{' and '.join(key for key, _ in news)} dropped: they only matter for float8"
        for key, _ in news:
            del site.node.attrs[key]


CONVERTERS: dict[str, Converter] = {
    **images.CONVERTERS,
    **norms.CONVERTERS,
    **quantize.CONVERTERS,
    **reductions.CONVERTERS,
    **split.CONVERTERS,
    "AveragePool": Converter(_pool, attrs=("dilations",)),
    "Cast": Converter(_cast, attrs=("saturate", "round_mode")),
    "CastLike": Converter(_cast, attrs=("saturate", "round_mode")),
    "LpPool": Converter(_pool, attrs=("dilations",)),
    "ScatterElements": Converter(_scatter),
    "ScatterND": Converter(_scatter),
}

# float ops that may compute in float32 if the older form lacks a half-precision dtype
THROUGH_FLOAT32 = frozenset(
    {
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "AveragePool", "Conv", "ConvTranspose",
        "Cos", "Cosh", "DeformConv", "Det", "Elu", "GlobalAveragePool", "GlobalLpPool",
        "GlobalMaxPool", "GridSample", "HardSigmoid", "HardSwish", "InstanceNormalization",
        "IsInf", "IsNaN", "LpNormalization", "LpPool", "MaxPool", "MaxRoiPool", "Mish", "RoiAlign",
        "Round", "Selu", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "ThresholdedRelu",
    }
)  # fmt: skip

SAME = THROUGH_FLOAT32 - CONVERTERS.keys() | frozenset(
    {
        "Bernoulli", "Constant", "ConstantOfShape", "Dropout", "Equal", "EyeLike", "Flatten",
        "GRU", "Identity", "If", "LSTM", "Loop", "MaxUnpool", "Multinomial",
        "NegativeLogLikelihoodLoss", "QLinearMatMul",
        "RNN", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Reshape",
        "Scan", "Shape", "Size", "SplitToSequence", "Squeeze", "TopK", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
