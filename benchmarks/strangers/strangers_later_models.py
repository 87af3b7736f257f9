"""Models that joined the set later, of more families. See `strangers_models`."""

from __future__ import annotations

import torch
from strangers_models import _monai, _timm, _torchvision
from strangers_more_models import _spandrel
from strangers_other_models import _decoder, _ready, _transformers
from torch import nn


def timm_fastvit_t8() -> nn.Module:
    return _timm("fastvit_t8")


def timm_efficientvit_b0() -> nn.Module:
    return _timm("efficientvit_b0")


def torchvision_fcn() -> nn.Module:
    return _torchvision(".segmentation", "fcn_resnet50", weights_backbone=None, num_classes=3)


def hf_yolos() -> nn.Module:
    return _transformers(
        "YolosConfig", "YolosForObjectDetection", hidden_size=48, num_hidden_layers=2,
        num_attention_heads=3, intermediate_size=96, image_size=[128, 160],
        num_detection_tokens=8, initializer_range=0.1,
    )  # fmt: skip


def hf_clip_text() -> nn.Module:
    return _transformers(
        "CLIPTextConfig", "CLIPTextModel", vocab_size=100, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, eos_token_id=99, bos_token_id=98,
    )  # fmt: skip


def hf_gemma_cache() -> nn.Module:
    return _decoder("Gemma", num_key_value_heads=1, head_dim=16)


def hf_olmo2_cache() -> nn.Module:
    return _decoder("Olmo2", num_key_value_heads=4)


def diffusers_taesd() -> nn.Module:
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    return _ready(
        AutoencoderTiny(
            encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), latent_channels=4,
        ).encoder
    )  # fmt: skip


def spandrel_span() -> nn.Module:
    return _spandrel("SPAN", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=16, upscale=2)


def spandrel_plksr() -> nn.Module:
    return _spandrel("PLKSR", "PLKSR", dim=16, n_blocks=2, upscaling_factor=2)


def monai_dynunet() -> nn.Module:
    return _monai(
        "DynUNet", spatial_dims=2, in_channels=1, out_channels=2, kernel_size=[3, 3, 3],
        strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[8, 16, 32],
    )  # fmt: skip


def pyg_gin() -> nn.Module:
    from torch_geometric.nn import GIN

    torch.manual_seed(0)
    return _ready(GIN(16, 32, num_layers=2, out_channels=4))


def snac_decoder() -> nn.Module:
    from snac import SNAC

    torch.manual_seed(0)
    model = SNAC(
        encoder_dim=8, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2],
        attn_window_size=None, codebook_size=16, codebook_dim=4, vq_strides=[2, 1], noise=False,
    )  # fmt: skip
    return _ready(model.decoder)


def kornia_hardnet() -> nn.Module:
    from kornia.feature import HardNet

    torch.manual_seed(0)
    return _ready(HardNet(pretrained=False))
