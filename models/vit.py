"""torchvision's ViT-B/16 (https://arxiv.org/abs/2010.11929), also for other image sizes.

`vit` takes images of 224 x 224, like torchvision's. `vit_any_size` resizes the position embedding
to the image's patches as DINOv2 does (bicubic, antialiased); at 224 x 224 it equals `vit`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.machine.libraries import import_torchvision
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    import torch

_SEED = 0
_IMAGE, _PATCH, _CLASSES = 224, 16, 1000
# Measured on all twelve layers at every size that is compared (largest logit 2).
# tests/models/test_vit.py plants the faults that have to be found; the smallest is a position
# embedding resized to 512 x 240 without antialias.
_TOLERANCE = Tolerance(
    rtol=1e-5,
    atol=2e-5,
    why="logits; ONNX Runtime is within 4e-6 of torch, the smallest planted fault gives 4e-4",
)

# Of `vit`; stated as about four times what was measured (docs/results/h200.md).
_ENGINE = {
    "tf32": Tolerance(1e-3, 1e-2, "logits; an engine was within 2.2e-3 on an H200"),
    "fp16": Tolerance(5e-3, 1e-2, "logits; an engine was within 2.4e-3 on an H200"),
}


def vit(*, layers: int = 12) -> ModelSpec:
    """torchvision's vit_b_16 for batches of 224 x 224.

    Args:
        layers: the number of encoder layers, 1 to 12.
    """
    batch = Dim("batch", 1, 8, 32)
    image = Input("image", (batch, 3, _IMAGE, _IMAGE))
    return _spec("vit", layers, image, any_size=False)


def vit_any_size(*, layers: int = 12) -> ModelSpec:
    """vit_b_16 with its position embedding resized; the arguments are `vit`'s."""
    batch = Dim("batch", 1, 2, 8)
    h, w = (Dim(name, 160, _IMAGE, 512, multiple_of=_PATCH) for name in ("h", "w"))
    return _spec("vit_any_size", layers, Input("image", (batch, 3, h, w)), any_size=True)


def _spec(name: str, layers: int, image: Input, *, any_size: bool) -> ModelSpec:
    if type(layers) is not int or not 1 <= layers <= 12:
        raise InputError(f"model {name}: layers={layers!r} must be a whole number from 1 to 12")

    def build(weights: Path | None) -> torch.nn.Module:
        return _build(layers, weights, any_size=any_size)

    return ModelSpec(
        name=name,
        build=build,
        inputs=(image,),
        outputs=(Output("logits", (image.shape[0], _CLASSES), metric="top-1"),),
        tolerance=_TOLERANCE,
        engine_tolerance={} if any_size else _ENGINE,
        libraries=("torch", "torchvision"),
        seed=_SEED,
        options={"layers": layers},
    )


def _build(layers: int, weights: Path | None, *, any_size: bool) -> torch.nn.Module:
    from pipeline.models._seeded import seeded

    model: torch.nn.Module = seeded(lambda: _torchvision_vit(layers), _SEED)
    if weights is not None:
        load_weights(model, weights)
    if any_size:
        from pipeline.models._vit_any_size import AnySize

        model = AnySize(model).eval()
    return model


def _torchvision_vit(layers: int) -> Any:
    """vit_b_16, or a shallower one, with random values where torchvision starts with zeros."""
    import torch

    import_torchvision()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=_IMAGE,
        patch_size=_PATCH,
        num_layers=layers,
        num_heads=12,
        hidden_dim=768,
        mlp_dim=3072,
        num_classes=_CLASSES,
    )
    # With a head of zeros, every image would have the same logits. The convolution's weights are
    # drawn again: trunc_normal_ and every later draw depend on torch's version.
    torch.manual_seed(_SEED)
    convolution = model.conv_proj.weight
    torch.nn.init.normal_(convolution, std=convolution[0].numel() ** -0.5)
    torch.nn.init.normal_(model.heads.head.weight, std=0.02)
    torch.nn.init.normal_(model.class_token, std=0.02)
    return model
