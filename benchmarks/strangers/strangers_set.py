"""The strangers: the models, their packages, and the sizes that the benchmark asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

REQUIREMENTS = (
    "timm==1.0.31", "transformers==5.23.0", "segmentation-models-pytorch==0.6.0", "monai==1.6.1",
    "spandrel==0.4.2", "super-image==0.2.0", "kornia==0.9.0", "diffusers==0.42.1",
    "efficientnet-pytorch==0.7.1", "ultralytics==8.4.190", "torch_geometric==2.8.1",
    "x-transformers==2.31.10", "vit-pytorch==1.26.11", "conformer==0.3.2",
    "open_clip_torch==3.3.0", "segment-anything==1.0", "pytorch-tcn==1.2.3",
    "facenet-pytorch==2.6.0", "snac==1.2.1", "demucs==4.1.0",
    # dependencies of the packages
    "tokenizers", "huggingface_hub", "regex", "tqdm", "pyyaml", "requests", "urllib3", "certifi",
    "charset-normalizer", "idna", "einops", "pretrainedmodels", "munch", "kornia_rs", "h5py",
    "opencv-python-headless", "einx", "frozendict", "ftfy", "julius", "loguru", "psutil",
    "torch_einops_utils", "wcwidth", "xxhash",
)  # fmt: skip


@dataclass(frozen=True)
class Stranger:
    """One model of the benchmark.

    Args:
        name: The name of the factory.
        package: The distribution of the model.
        kind: The purpose of the model.
        inputs: The inputs, as for ``pipeline convert --input``.
        dims: The range of each dim. Every size in it is asked for.
    """

    name: str
    package: str
    kind: str
    inputs: tuple[str, ...]
    dims: tuple[tuple[str, int, int], ...]


def _image(
    name: str,
    package: str,
    kind: str,
    argument: str = "x",
    channels: int = 3,
    sides: tuple[int, int] = (64, 320),
    batch: int = 4,
) -> Stranger:
    """A model of an image batch. `sides` is the range of height and width."""
    text = f"{argument}:{{b}}x{channels}x{{h}}x{{w}}"
    return Stranger(name, package, kind, (text,), (("b", 1, batch), ("h", *sides), ("w", *sides)))


def _other(name: str, package: str, kind: str, *inputs: str, **dims: tuple[int, int]) -> Stranger:
    """A model of any other inputs."""
    return Stranger(name, package, kind, inputs, tuple((n, *ends) for n, ends in dims.items()))


IDS = "input_ids:{b}x{t}:int64:0..99"
MASK = "attention_mask:{b}x{t}:bool:prefix"


def _cache(layers: int, heads: int, channels: int) -> str:
    return f"past_key_values[0..{layers - 1}][0..1]:{{b}}x{heads}x{{past}}x{channels}"


STRANGERS = (
    _image("timm_resnet18", "timm", "classification"),
    _image("timm_resnet18_features", "timm", "backbone"),
    _image("timm_convnext_atto", "timm", "classification"),
    _image("timm_tf_efficientnet_b0", "timm", "classification"),
    _image("timm_regnety_002", "timm", "classification"),
    _image("timm_densenet121", "timm", "classification"),
    _image("timm_hrnet_w18_small", "timm", "classification"),
    _image("timm_mobilevit_xxs", "timm", "classification"),
    _image("timm_swin_tiny", "timm", "classification"),
    _image("timm_vit_tiny", "timm", "classification"),
    _image("timm_maxvit_pico", "timm", "classification"),
    _image("timm_pvt_v2_b0", "timm", "classification"),
    _image("timm_xcit_nano", "timm", "classification"),
    _image("timm_poolformer_s12", "timm", "classification"),
    _image("timm_edgenext_xx_small", "timm", "classification"),
    _image("timm_davit_tiny", "timm", "classification"),
    _image("efficientnet_pytorch_b0", "efficientnet-pytorch", "classification", "inputs"),
    _image("torchvision_swin_v2", "torchvision", "classification"),
    _image("torchvision_vgg11", "torchvision", "classification"),
    _image("smp_unet", "segmentation-models-pytorch", "segmentation"),
    _image("smp_unetplusplus", "segmentation-models-pytorch", "segmentation"),
    _image("smp_fpn", "segmentation-models-pytorch", "segmentation"),
    _image("smp_pspnet", "segmentation-models-pytorch", "segmentation"),
    _image("smp_pan", "segmentation-models-pytorch", "segmentation"),
    _image("smp_deeplabv3plus", "segmentation-models-pytorch", "segmentation"),
    _image("smp_segformer", "segmentation-models-pytorch", "segmentation"),
    _image("smp_upernet", "segmentation-models-pytorch", "segmentation"),
    _image("torchvision_deeplabv3", "torchvision", "segmentation"),
    _image("torchvision_lraspp", "torchvision", "segmentation", "input"),
    _image("hf_segformer", "transformers", "segmentation", "pixel_values"),
    _image("hf_mobilevitv2", "transformers", "segmentation", "pixel_values"),
    _image("monai_unet", "monai", "medical", channels=1),
    _image("monai_segresnet", "monai", "medical", channels=1),
    _image("monai_swin_unetr", "monai", "medical", "x_in", channels=1),
    _image("monai_attention_unet", "monai", "medical", channels=1),
    _image("monai_basic_unet", "monai", "medical", channels=1),
    _image("monai_flexible_unet", "monai", "medical", "inputs"),
    _image("monai_highresnet", "monai", "medical", channels=1, sides=(64, 160)),
    _image("spandrel_rrdb", "spandrel", "super-resolution", sides=(24, 128)),
    _image("spandrel_compact", "spandrel", "super-resolution", sides=(24, 160)),
    _image("spandrel_swinir", "spandrel", "super-resolution", sides=(24, 128)),
    _image("spandrel_hat", "spandrel", "super-resolution", sides=(24, 128)),
    _image("spandrel_omnisr", "spandrel", "super-resolution", sides=(24, 128)),
    _image("spandrel_dat", "spandrel", "super-resolution", sides=(24, 128)),
    _image("spandrel_realcugan", "spandrel", "super-resolution", sides=(24, 128)),
    _image("super_image_edsr", "super-image", "super-resolution", sides=(24, 160)),
    _image("super_image_carn", "super-image", "super-resolution", sides=(24, 128)),
    _image("hf_swin2sr", "transformers", "super-resolution", "pixel_values", sides=(24, 128)),
    _image("spandrel_nafnet", "spandrel", "restoration", "inp"),
    _image("spandrel_scunet", "spandrel", "restoration", "x0", sides=(64, 160)),
    _image("hf_dinov2", "transformers", "backbone", "pixel_values"),
    _image("hf_depth_anything", "transformers", "depth", "pixel_values"),
    _image("hf_detr", "transformers", "detection", "pixel_values"),
    _image("ultralytics_yolov8n", "ultralytics", "detection"),
    _image("kornia_dexined", "kornia", "edges"),
    _image("diffusers_vae", "diffusers", "generation"),
    _image("diffusers_unet", "diffusers", "generation", sides=(64, 224)),
    # text
    _other("hf_bert", "transformers", "text", IDS, MASK, b=(1, 4), t=(1, 96)),
    _other("hf_roberta", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other("hf_distilbert", "transformers", "text", IDS, MASK, b=(1, 4), t=(1, 96)),
    _other("hf_electra", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other("hf_albert", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other("hf_deberta_v2", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other("hf_mpnet", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other("hf_modernbert", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other("hf_t5_encoder", "transformers", "text", IDS, b=(1, 4), t=(1, 96)),
    _other(
        "hf_bart",
        "transformers",
        "translation",
        IDS,
        "decoder_input_ids:{b}x{u}:int64:0..99",
        b=(1, 4),
        t=(1, 64),
        u=(1, 64),
    ),
    _other(
        "x_transformers_encoder",
        "x-transformers",
        "text",
        "x:{b}x{t}:int64:0..99",
        b=(1, 4),
        t=(1, 96),
    ),
    # text, with a KV cache
    _other(
        "hf_gpt2_cache",
        "transformers",
        "decoder",
        IDS,
        _cache(2, 4, 16),
        b=(1, 4),
        t=(1, 32),
        past=(1, 64),
    ),
    _other(
        "hf_qwen2_cache",
        "transformers",
        "decoder",
        IDS,
        _cache(2, 2, 16),
        b=(1, 4),
        t=(1, 32),
        past=(1, 64),
    ),
    _other(
        "hf_phi3_cache",
        "transformers",
        "decoder",
        IDS,
        _cache(2, 4, 16),
        b=(1, 4),
        t=(1, 32),
        past=(1, 64),
    ),
    _other(
        "hf_gpt_neox_cache",
        "transformers",
        "decoder",
        IDS,
        _cache(2, 4, 16),
        b=(1, 4),
        t=(1, 32),
        past=(1, 64),
    ),
    _other("hf_mixtral", "transformers", "mixture of experts", IDS, b=(1, 4), t=(1, 64)),
    _other("hf_qwen3_moe", "transformers", "mixture of experts", IDS, b=(1, 4), t=(1, 64)),
    _other("hf_mamba", "transformers", "state space", IDS, b=(1, 2), t=(4, 48)),
    # sound and speech
    _other(
        "hf_wav2vec2", "transformers", "speech", "input_values:{b}x{t}", b=(1, 4), t=(400, 16000)
    ),
    _other("hf_hubert", "transformers", "speech", "input_values:{b}x{t}", b=(1, 4), t=(400, 16000)),
    _other("hf_encodec", "transformers", "sound", "x:{b}x1x{t}", b=(1, 4), t=(320, 9600)),
    _other(
        "hf_whisper_decoder",
        "transformers",
        "speech",
        "input_ids:{b}x{t}:int64:0..99",
        "encoder_hidden_states:{b}x{s}x32",
        b=(1, 4),
        t=(1, 64),
        s=(1, 96),
    ),
    _other("snac_encoder", "snac", "sound", "x:{b}x1x{t}", b=(1, 4), t=(512, 8192)),
    _other("demucs_time", "demucs", "sound", "mix:{b}x2x{t}", b=(1, 2), t=(4096, 8192)),
    _other("conformer_block", "conformer", "speech", "x:{b}x{t}x32", b=(1, 4), t=(1, 96)),
    _other("tcn", "pytorch-tcn", "time series", "x:{b}x8x{t}", b=(1, 4), t=(1, 128)),
    # video and volumes
    _other(
        "torchvision_r3d",
        "torchvision",
        "video",
        "x:{b}x3x{t}x{h}x{w}",
        b=(1, 2),
        t=(4, 16),
        h=(32, 96),
        w=(32, 96),
    ),
    _other(
        "vit_pytorch_vivit", "vit-pytorch", "video", "video:{b}x3x{t}x32x32", b=(1, 4), t=(2, 16)
    ),
    _other(
        "monai_unet_3d",
        "monai",
        "medical",
        "x:{b}x1x{d}x{h}x{w}",
        b=(1, 2),
        d=(16, 48),
        h=(16, 48),
        w=(16, 48),
    ),
    # diffusion
    _other(
        "diffusers_unet_condition",
        "diffusers",
        "generation",
        "sample:{b}x4x{h}x{w}",
        "encoder_hidden_states:{b}x{t}x32",
        b=(1, 2),
        h=(8, 48),
        w=(8, 48),
        t=(1, 77),
    ),
    _other(
        "diffusers_dit",
        "diffusers",
        "generation",
        "hidden_states:{b}x4x16x16",
        "timestep:{b}:int64:0..999",
        "class_labels:{b}:int64:0..9",
        b=(1, 8),
    ),
    # graphs, points and tables
    _other(
        "pyg_gcn",
        "torch_geometric",
        "graphs",
        "x:{n}x16",
        "edge_index:2x{e}:int64:0..n-1",
        n=(2, 64),
        e=(1, 128),
    ),
    _other(
        "pyg_gat",
        "torch_geometric",
        "graphs",
        "x:{n}x16",
        "edge_index:2x{e}:int64:0..n-1",
        n=(2, 64),
        e=(1, 128),
    ),
    _other(
        "pyg_sage",
        "torch_geometric",
        "graphs",
        "x:{n}x16",
        "edge_index:2x{e}:int64:0..n-1",
        n=(2, 64),
        e=(1, 128),
    ),
    # images, of more libraries
    _other("open_clip_visual", "open_clip_torch", "embedding", "x:{b}x3x32x32", b=(1, 16)),
    _image("facenet_resnet", "facenet-pytorch", "faces", sides=(80, 200)),
    _other("vit_pytorch_cct", "vit-pytorch", "classification", "x:{b}x3x64x64", b=(1, 16)),
    _image("vit_pytorch_simple", "vit-pytorch", "classification", "img", sides=(32, 128)),
    _image("sam_encoder", "segment-anything", "segmentation", sides=(64, 256), batch=2),
    _image("hf_convnextv2", "transformers", "backbone", "pixel_values", sides=(32, 256)),
    # of more families
    _image("timm_fastvit_t8", "timm", "classification"),
    _image("timm_efficientvit_b0", "timm", "classification"),
    _image("torchvision_fcn", "torchvision", "segmentation"),
    _image("hf_yolos", "transformers", "detection", "pixel_values"),
    _other("hf_clip_text", "transformers", "text", IDS, b=(1, 4), t=(2, 77)),
    _other(
        "hf_gemma_cache",
        "transformers",
        "decoder",
        IDS,
        _cache(2, 1, 16),
        b=(1, 4),
        t=(1, 32),
        past=(1, 64),
    ),
    _other(
        "hf_olmo2_cache",
        "transformers",
        "decoder",
        IDS,
        _cache(2, 4, 8),
        b=(1, 4),
        t=(1, 32),
        past=(1, 64),
    ),
    _image("diffusers_taesd", "diffusers", "generation"),
    _image("spandrel_span", "spandrel", "super-resolution", sides=(24, 128)),
    _image("spandrel_plksr", "spandrel", "super-resolution", sides=(24, 128)),
    _image("monai_dynunet", "monai", "medical", "x", channels=1),
    _other(
        "pyg_gin",
        "torch_geometric",
        "graphs",
        "x:{n}x16",
        "edge_index:2x{e}:int64:0..n-1",
        n=(2, 64),
        e=(1, 128),
    ),
    _other("snac_decoder", "snac", "sound", "x:{b}x32x{t}", b=(1, 4), t=(4, 256)),
    _other("kornia_hardnet", "kornia", "features", "input:{b}x1x32x32", b=(1, 64)),
)


def module_of(stranger: Stranger) -> str:
    """The Python module with the model's factory."""
    for name in ("models", "more_models", "other_models", "later_models"):
        if f"def {stranger.name}(" in (HERE / f"strangers_{name}.py").read_text():
            return f"strangers_{name}"
    raise SystemExit(f"{stranger.name}: no such factory")
