"""Image models of other libraries, unchanged, with random weights.

Each factory returns a module of the library: a small one of a real family. `strangers_set` has the
inputs and the ranges. `strangers.py` runs the model to find the sizes that it accepts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def alive(module: nn.Module, channels: int = 3) -> nn.Module:
    """The module in eval mode, with weights and statistics that give every part an effect.

    After initialisation, parts of a network have no effect: zeroed residual branches and biases,
    and layer scales of 1e-6. Statistics that saw no data let the signal vanish. A comparison of
    outputs would not notice a fault in such parts. So constant parameters get noise. Each batch
    normalisation gets the mean and variance of its input for a random image.
    """
    torch.manual_seed(1)

    def observe(part: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        axes = [0, *range(2, args[0].ndim)]
        part.running_mean.copy_(args[0].mean(axes))  # type: ignore[operator, union-attr]
        variance = args[0].var(axes)  # keeps a nearly silent channel from becoming the loudest
        part.running_var.copy_(variance + 0.1 * variance.mean() + 1e-6)  # type: ignore[operator, union-attr]

    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and float(parameter.std()) < 1e-4:
                parameter.add_(0.1 * torch.randn_like(parameter))
        hooks = [norm.register_forward_pre_hook(observe) for norm in norms]
        module.eval()
        if norms:
            module(2 * torch.rand(2, channels, 256, 256) - 1)
        for hook in hooks:
            hook.remove()
    return module


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    return alive(timm.create_model(name, pretrained=False, **options))


def _smp(name: str, encoder: str = "resnet18", **options: Any) -> nn.Module:
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    return alive(getattr(smp, name)(encoder, encoder_weights=None, classes=2, **options))


def _monai(name: str, **options: Any) -> nn.Module:
    from monai.networks import nets

    torch.manual_seed(0)
    return alive(getattr(nets, name)(**options), options.get("in_channels", 1))


def _torchvision(group: str, name: str, **options: Any) -> nn.Module:
    import importlib

    torch.manual_seed(0)
    models = importlib.import_module(f"torchvision.models{group}")
    return alive(getattr(models, name)(weights=None, **options))


# timm: classification and backbones


def timm_resnet18() -> nn.Module:
    return _timm("resnet18")


def timm_resnet18_features() -> nn.Module:
    return _timm("resnet18", features_only=True)


def timm_convnext_atto() -> nn.Module:
    return _timm("convnext_atto")


def timm_tf_efficientnet_b0() -> nn.Module:
    return _timm("tf_efficientnet_b0")


def timm_regnety_002() -> nn.Module:
    return _timm("regnety_002")


def timm_densenet121() -> nn.Module:
    return _timm("densenet121", block_config=(2, 2, 4, 2))


def timm_hrnet_w18_small() -> nn.Module:
    return _timm("hrnet_w18_small")


def timm_mobilevit_xxs() -> nn.Module:
    return _timm("mobilevit_xxs")


def timm_swin_tiny() -> nn.Module:
    return _timm("swin_tiny_patch4_window7_224", depths=(2, 2, 2, 2), strict_img_size=False)


def timm_vit_tiny() -> nn.Module:
    return _timm("vit_tiny_patch16_224", depth=4, dynamic_img_size=True)


def timm_maxvit_pico() -> nn.Module:
    return _timm("maxvit_rmlp_pico_rw_256")


def timm_pvt_v2_b0() -> nn.Module:
    return _timm("pvt_v2_b0")


def timm_xcit_nano() -> nn.Module:
    return _timm("xcit_nano_12_p8_224", depth=4)


def timm_poolformer_s12() -> nn.Module:
    return _timm("poolformer_s12")


def timm_edgenext_xx_small() -> nn.Module:
    return _timm("edgenext_xx_small")


def timm_davit_tiny() -> nn.Module:
    return _timm("davit_tiny", depths=(1, 1, 1, 1))


# segmentation-models-pytorch


def smp_unet() -> nn.Module:
    return _smp("Unet")


def smp_unetplusplus() -> nn.Module:
    return _smp("UnetPlusPlus")


def smp_fpn() -> nn.Module:
    return _smp("FPN")


def smp_pspnet() -> nn.Module:
    return _smp("PSPNet")


def smp_pan() -> nn.Module:
    return _smp("PAN")


def smp_deeplabv3plus() -> nn.Module:
    return _smp("DeepLabV3Plus")


def smp_segformer() -> nn.Module:
    return _smp("Segformer", "mit_b0")


def smp_upernet() -> nn.Module:
    return _smp("UPerNet")


# monai: medical


def monai_unet() -> nn.Module:
    return _monai(
        "UNet", spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32, 64),
        strides=(2, 2, 2), num_res_units=2,
    )  # fmt: skip


def monai_segresnet() -> nn.Module:
    return _monai("SegResNet", spatial_dims=2, in_channels=1, out_channels=2)


def monai_swin_unetr() -> nn.Module:
    return _monai("SwinUNETR", in_channels=1, out_channels=2, spatial_dims=2, feature_size=12)


def monai_attention_unet() -> nn.Module:
    return _monai(
        "AttentionUnet", spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32),
        strides=(2, 2),
    )  # fmt: skip


def monai_basic_unet() -> nn.Module:
    return _monai("BasicUNet", spatial_dims=2, features=(8, 8, 16, 32, 64, 8))


def monai_flexible_unet() -> nn.Module:
    return _monai("FlexibleUNet", in_channels=3, out_channels=2, backbone="resnet18")


def monai_highresnet() -> nn.Module:
    return _monai("HighResNet", spatial_dims=2)


# torchvision and efficientnet-pytorch


def torchvision_deeplabv3() -> nn.Module:
    return _torchvision(".segmentation", "deeplabv3_mobilenet_v3_large", weights_backbone=None)


def torchvision_lraspp() -> nn.Module:
    return _torchvision(".segmentation", "lraspp_mobilenet_v3_large", weights_backbone=None)


def torchvision_swin_v2() -> nn.Module:
    return _torchvision("", "swin_v2_t")


def torchvision_vgg11() -> nn.Module:
    return _torchvision("", "vgg11", init_weights=True)


def efficientnet_pytorch_b0() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    torch.manual_seed(0)
    return alive(EfficientNet.from_name("efficientnet-b0"))
