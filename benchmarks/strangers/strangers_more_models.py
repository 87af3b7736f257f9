"""Image models of other libraries: super-resolution, transformers, detection, others.

See `strangers_models`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from strangers_models import alive
from torch import nn


def _spandrel(module: str, name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    importlib.import_module("spandrel")  # first, because its modules import each other in a circle
    found = importlib.import_module(f"spandrel.architectures.{module}")
    return alive(getattr(found, name)(**options))


def _super_image(name: str, **options: Any) -> nn.Module:
    import super_image

    torch.manual_seed(0)
    config = getattr(super_image, f"{name}Config")(**options)
    return alive(getattr(super_image, f"{name}Model")(config))


def _transformers(name: str, config: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return alive(getattr(transformers, name)(config))


class _With(nn.Module):
    """A module with more, fixed arguments. Returns the first tensor of its result."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.module, self.arguments = module, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x, **self.arguments)[0]
        return result


# spandrel and super-image: super-resolution and restoration


def spandrel_rrdb() -> nn.Module:
    return _spandrel("ESRGAN", "ESRGAN", num_filters=16, num_blocks=2)


def spandrel_compact() -> nn.Module:
    return _spandrel("Compact", "Compact", num_feat=16, num_conv=4)


def spandrel_swinir() -> nn.Module:
    return _spandrel(
        "SwinIR", "SwinIR", embed_dim=24, depths=[2, 2], num_heads=[2, 2], window_size=8,
        upscale=2, upsampler="pixelshuffle",
    )  # fmt: skip


def spandrel_hat() -> nn.Module:
    return _spandrel(
        "HAT", "HAT", embed_dim=24, depths=(2, 2), num_heads=(2, 2), window_size=8, upscale=2,
        squeeze_factor=4,
    )  # fmt: skip


def spandrel_nafnet() -> nn.Module:
    return _spandrel("NAFNet", "NAFNet", width=8, enc_blk_nums=[1, 1, 1], dec_blk_nums=[1, 1, 1])


def spandrel_scunet() -> nn.Module:
    return _spandrel("SCUNet", "SCUNet", dim=64, config=[2] * 7)


def spandrel_omnisr() -> nn.Module:
    return _spandrel("OmniSR", "OmniSR", num_feat=32, up_scale=2)


def spandrel_dat() -> nn.Module:
    return _spandrel("DAT", "DAT", embed_dim=64, depth=[2], num_heads=[2], split_size=[8, 8])


def spandrel_realcugan() -> nn.Module:
    return _spandrel("RealCUGAN", "UpCunet2x")


def super_image_edsr() -> nn.Module:
    return _super_image("Edsr", n_resblocks=2, n_feats=16, scale=3)


def super_image_carn() -> nn.Module:
    return _super_image("Carn", scale=2)


# transformers, diffusers and others


def hf_segformer() -> nn.Module:
    from transformers import SegformerConfig

    config = SegformerConfig(depths=[1, 1, 1, 1], decoder_hidden_size=32, initializer_range=0.1)
    return _transformers("SegformerForSemanticSegmentation", config)


def hf_dinov2() -> nn.Module:
    from transformers import Dinov2Config

    config = Dinov2Config(hidden_size=48, num_hidden_layers=2, num_attention_heads=3)
    return _transformers("Dinov2Model", config)


def hf_depth_anything() -> nn.Module:
    from transformers import DepthAnythingConfig, Dinov2Config

    stages = [f"stage{n}" for n in range(1, 5)]
    backbone = Dinov2Config(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=3, out_features=stages,
        reshape_hidden_states=False,
    )  # fmt: skip
    config = DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=48, neck_hidden_sizes=[8, 16, 32, 32],
        fusion_hidden_size=16, head_hidden_size=8, depth_estimation_type="metric",
        max_depth=10, initializer_range=0.1,
    )  # fmt: skip
    return _transformers("DepthAnythingForDepthEstimation", config)


def hf_swin2sr() -> nn.Module:
    from transformers import Swin2SRConfig

    config = Swin2SRConfig(embed_dim=24, depths=[2, 2], num_heads=[2, 2])
    return _transformers("Swin2SRForImageSuperResolution", config)


def hf_mobilevitv2() -> nn.Module:
    from transformers import MobileViTV2Config

    config = MobileViTV2Config(width_multiplier=0.5, initializer_range=0.2)
    return _transformers("MobileViTV2ForSemanticSegmentation", config)


def hf_detr() -> nn.Module:
    from transformers import DetrConfig, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=2,
        decoder_attention_heads=2, num_queries=20, init_std=0.3, init_xavier_std=3.0,
    )  # fmt: skip
    return _transformers("DetrForObjectDetection", config)


def diffusers_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    stages = 3
    return _With(
        alive(
            AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * stages,
                up_block_types=("UpDecoderBlock2D",) * stages,
                block_out_channels=(16, 32, 32), norm_num_groups=8, latent_channels=4,
            )
        ),
        return_dict=False,
    )  # fmt: skip


def diffusers_unet() -> nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        in_channels=3, out_channels=3, block_out_channels=(16, 32, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return _With(alive(unet), timestep=10, return_dict=False)


def kornia_dexined() -> nn.Module:
    from kornia.models.dexined import DexiNed

    torch.manual_seed(0)
    return alive(DexiNed(pretrained=False))


def ultralytics_yolov8n() -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    return alive(DetectionModel("yolov8n.yaml", verbose=False))
