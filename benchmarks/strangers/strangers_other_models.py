"""Models of other libraries with other inputs than one image: text, sound, video, graphs.

See `strangers_models`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SMALL = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "initializer_range": 0.2,
}  # fmt: skip


def _ready(module: nn.Module) -> nn.Module:
    """The module in eval mode, with noise on constant weights and on the norms' statistics."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and float(parameter.std()) < 1e-4:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.running_mean.normal_(0, 0.1)  # type: ignore[operator, union-attr]
                part.running_var.uniform_(0.8, 1.2)  # type: ignore[operator, union-attr]
    return module.eval()


def _transformers(config: str, model: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    return _ready(getattr(transformers, model)(made))


def _decoder(name: str, **options: Any) -> nn.Module:
    return _transformers(f"{name}Config", f"{name}ForCausalLM", **_SMALL, **options)


# text


def hf_bert() -> nn.Module:
    return _transformers("BertConfig", "BertModel", **_SMALL)


def hf_roberta() -> nn.Module:
    return _transformers("RobertaConfig", "RobertaForTokenClassification", **_SMALL)


def hf_distilbert() -> nn.Module:
    return _transformers(
        "DistilBertConfig", "DistilBertModel", vocab_size=100, dim=32, n_layers=2, n_heads=4,
        hidden_dim=64,
    )  # fmt: skip


def hf_electra() -> nn.Module:
    return _transformers("ElectraConfig", "ElectraModel", embedding_size=16, **_SMALL)


def hf_albert() -> nn.Module:
    return _transformers("AlbertConfig", "AlbertModel", embedding_size=16, **_SMALL)


def hf_deberta_v2() -> nn.Module:
    return _transformers(
        "DebertaV2Config", "DebertaV2Model", relative_attention=True, position_buckets=32,
        pos_att_type=["p2c", "c2p"], max_relative_positions=64, **_SMALL,
    )  # fmt: skip


def hf_mpnet() -> nn.Module:
    return _transformers("MPNetConfig", "MPNetModel", **_SMALL)


def hf_modernbert() -> nn.Module:
    return _transformers(
        "ModernBertConfig", "ModernBertModel", pad_token_id=0, local_attention=16, **_SMALL
    )


def hf_t5_encoder() -> nn.Module:
    return _transformers(
        "T5Config", "T5EncoderModel", vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2,
        num_heads=4,
    )  # fmt: skip


def hf_bart() -> nn.Module:
    return _transformers(
        "BartConfig", "BartForConditionalGeneration", vocab_size=100, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=128, init_std=0.2, use_cache=False,
    )  # fmt: skip


def x_transformers_encoder() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    return _ready(TransformerWrapper(num_tokens=100, max_seq_len=128, attn_layers=layers))


# text, with a KV cache


def hf_gpt2_cache() -> nn.Module:
    return _transformers(
        "GPT2Config", "GPT2LMHeadModel", vocab_size=100, n_embd=64, n_layer=2, n_head=4,
        n_positions=128, initializer_range=0.2,
    )  # fmt: skip


def hf_qwen2_cache() -> nn.Module:
    return _decoder("Qwen2", num_key_value_heads=2, head_dim=16)


def hf_phi3_cache() -> nn.Module:
    return _decoder("Phi3", num_key_value_heads=4, head_dim=16, pad_token_id=0)


def hf_gpt_neox_cache() -> nn.Module:
    return _transformers("GPTNeoXConfig", "GPTNeoXForCausalLM", **{**_SMALL, "hidden_size": 64})


def hf_mixtral() -> nn.Module:
    return _decoder(
        "Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip


def hf_qwen3_moe() -> nn.Module:
    return _decoder(
        "Qwen3Moe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=8,
        moe_intermediate_size=32, use_cache=False,
    )  # fmt: skip


def hf_mamba() -> nn.Module:
    return _transformers(
        "MambaConfig", "MambaForCausalLM", vocab_size=100, hidden_size=32, num_hidden_layers=2,
        state_size=8, use_cache=False,
    )  # fmt: skip


# sound and speech


_SPEECH = {
    **_SMALL, "conv_dim": (16, 16, 16), "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 2),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
}  # fmt: skip


def hf_wav2vec2() -> nn.Module:
    return _transformers("Wav2Vec2Config", "Wav2Vec2ForCTC", **_SPEECH)


def hf_hubert() -> nn.Module:
    return _transformers("HubertConfig", "HubertModel", **_SPEECH)


class _Codes(nn.Module):
    """The encoder and the decoder of a codec, without its quantiser."""

    def __init__(self, codec: nn.Module) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.codec.decoder(self.codec.encoder(x))  # type: ignore[operator]
        return result


def hf_encodec() -> nn.Module:
    return _Codes(
        _transformers(
            "EncodecConfig", "EncodecModel", num_filters=8, hidden_size=16, num_lstm_layers=1,
            codebook_size=32, upsampling_ratios=[4, 4, 2, 2],
        )
    ).eval()  # fmt: skip


def hf_whisper_decoder() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2,
        max_target_positions=128, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return _ready(transformers.WhisperModel(config).decoder)


def snac_encoder() -> nn.Module:
    from snac.layers import Encoder

    torch.manual_seed(0)
    return _ready(Encoder(d_model=8, strides=[2, 4, 4], depthwise=True, attn_window_size=None))


def demucs_time() -> nn.Module:
    from demucs.demucs import Demucs

    torch.manual_seed(0)
    return _ready(Demucs(["a", "b"], channels=8, depth=3, resample=False, lstm_layers=0))


def conformer_block() -> nn.Module:
    from conformer import ConformerBlock

    torch.manual_seed(0)
    return _ready(ConformerBlock(dim=32, dim_head=8, heads=4, conv_kernel_size=7))


def tcn() -> nn.Module:
    from pytorch_tcn import TCN

    torch.manual_seed(0)
    return _ready(TCN(num_inputs=8, num_channels=[16, 16, 16], kernel_size=3))


# video and volumes


def torchvision_r3d() -> nn.Module:
    from torchvision.models.video import r3d_18

    torch.manual_seed(0)
    return _ready(r3d_18(weights=None))


def vit_pytorch_vivit() -> nn.Module:
    from vit_pytorch.vivit import ViViT

    torch.manual_seed(0)
    return _ready(
        ViViT(
            image_size=32, image_patch_size=8, frames=16, frame_patch_size=2, num_classes=10,
            dim=32, spatial_depth=1, temporal_depth=1, heads=2, mlp_dim=64,
        )
    )  # fmt: skip


def monai_unet_3d() -> nn.Module:
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    return _ready(UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1))


# diffusion


class _Step(nn.Module):
    """One step of a diffusion model at a fixed time."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.unet(
            sample, 10, encoder_hidden_states=encoder_hidden_states, return_dict=False
        )[0]
        return result


def diffusers_unet_condition() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return _Step(
        _ready(
            UNet2DConditionModel(
                block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
                attention_head_dim=8,
            )
        )
    ).eval()  # fmt: skip


def diffusers_dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    return _ready(
        DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2,
            sample_size=16, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
        )
    )  # fmt: skip


# graphs


class _Graph(nn.Module):
    """Two layers on a graph."""

    def __init__(self, kind: str, **options: Any) -> None:
        from torch_geometric import nn as layers

        super().__init__()
        layer = getattr(layers, kind)
        self.first, self.second = layer(16, 16, **options), layer(16, 8, **options)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return result


def _graph(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return _ready(_Graph(kind, **options))


def pyg_gcn() -> nn.Module:
    return _graph("GCNConv")


def pyg_gat() -> nn.Module:
    return _graph("GATConv")


def pyg_sage() -> nn.Module:
    return _graph("SAGEConv")


# images, of more libraries


def open_clip_visual() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    torch.manual_seed(0)
    return _ready(
        VisionTransformer(
            image_size=32, patch_size=8, width=32, layers=2, heads=4, mlp_ratio=2.0, output_dim=16
        )
    )


def facenet_resnet() -> nn.Module:
    from facenet_pytorch import InceptionResnetV1

    torch.manual_seed(0)
    return _ready(InceptionResnetV1())


def vit_pytorch_cct() -> nn.Module:
    from vit_pytorch.cct import CCT

    torch.manual_seed(0)
    return _ready(
        CCT(
            img_size=64, embedding_dim=32, n_conv_layers=2, kernel_size=3, stride=2, padding=1,
            num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=10,
            positional_embedding="sine",
        )
    )  # fmt: skip


def vit_pytorch_simple() -> nn.Module:
    from vit_pytorch import SimpleViT

    torch.manual_seed(0)
    return _ready(
        SimpleViT(
            image_size=64, patch_size=8, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64,
            dim_head=16,
        )
    )  # fmt: skip


def sam_encoder() -> nn.Module:
    from segment_anything.modeling.image_encoder import ImageEncoderViT

    torch.manual_seed(0)
    return _ready(
        ImageEncoderViT(
            img_size=128, patch_size=16, embed_dim=32, depth=2, num_heads=2, out_chans=16,
            window_size=4, global_attn_indexes=(1,), use_abs_pos=False,
        )
    )  # fmt: skip


def hf_convnextv2() -> nn.Module:
    return _transformers(
        "ConvNextV2Config", "ConvNextV2Model", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]
    )
