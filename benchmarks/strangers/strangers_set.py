"""The strangers: the models, their packages, and the sizes that the benchmark asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

REQUIREMENTS = (
    "timm==1.0.31", "transformers==5.23.0", "segmentation-models-pytorch==0.6.0", "monai==1.6.1",
    "spandrel==0.4.2", "super-image==0.2.0", "kornia==0.9.0", "diffusers==0.42.1",
    "efficientnet-pytorch==0.7.1", "ultralytics==8.4.190",
    # dependencies of the packages
    "tokenizers", "huggingface_hub", "regex", "tqdm", "pyyaml", "requests", "urllib3", "certifi",
    "charset-normalizer", "idna", "einops", "pretrainedmodels", "munch", "kornia_rs", "h5py",
    "opencv-python-headless",
)  # fmt: skip


@dataclass(frozen=True)
class Stranger:
    """One model of the benchmark.

    Args:
        name: The name of the factory.
        package: The distribution of the model.
        kind: The purpose of the model.
        argument: The name of the image in ``forward``: [batch, channels, height, width].
        channels: The channels of the image.
        low, high: The range of height and width. Every size in it is asked for.
        batch: The largest batch.
    """

    name: str
    package: str
    kind: str
    argument: str = "x"
    channels: int = 3
    low: int = 64
    high: int = 320
    batch: int = 4

    @property
    def input(self) -> str:
        """The input as text for ``pipeline convert --input``."""
        return f"{self.argument}:{{b}}x{self.channels}x{{h}}x{{w}}"


STRANGERS = (
    Stranger("timm_resnet18", "timm", "classification"),
    Stranger("timm_resnet18_features", "timm", "backbone"),
    Stranger("timm_convnext_atto", "timm", "classification"),
    Stranger("timm_tf_efficientnet_b0", "timm", "classification"),
    Stranger("timm_regnety_002", "timm", "classification"),
    Stranger("timm_densenet121", "timm", "classification"),
    Stranger("timm_hrnet_w18_small", "timm", "classification"),
    Stranger("timm_mobilevit_xxs", "timm", "classification"),
    Stranger("timm_swin_tiny", "timm", "classification"),
    Stranger("timm_vit_tiny", "timm", "classification"),
    Stranger("timm_maxvit_pico", "timm", "classification"),
    Stranger("timm_pvt_v2_b0", "timm", "classification"),
    Stranger("timm_xcit_nano", "timm", "classification"),
    Stranger("timm_poolformer_s12", "timm", "classification"),
    Stranger("timm_edgenext_xx_small", "timm", "classification"),
    Stranger("timm_davit_tiny", "timm", "classification"),
    Stranger("efficientnet_pytorch_b0", "efficientnet-pytorch", "classification", "inputs"),
    Stranger("torchvision_swin_v2", "torchvision", "classification"),
    Stranger("torchvision_vgg11", "torchvision", "classification"),
    Stranger("smp_unet", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_unetplusplus", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_fpn", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_pspnet", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_pan", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_deeplabv3plus", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_segformer", "segmentation-models-pytorch", "segmentation"),
    Stranger("smp_upernet", "segmentation-models-pytorch", "segmentation"),
    Stranger("torchvision_deeplabv3", "torchvision", "segmentation"),
    Stranger("torchvision_lraspp", "torchvision", "segmentation", "input"),
    Stranger("hf_segformer", "transformers", "segmentation", "pixel_values"),
    Stranger("hf_mobilevitv2", "transformers", "segmentation", "pixel_values"),
    Stranger("monai_unet", "monai", "medical", channels=1),
    Stranger("monai_segresnet", "monai", "medical", channels=1),
    Stranger("monai_swin_unetr", "monai", "medical", "x_in", channels=1),
    Stranger("monai_attention_unet", "monai", "medical", channels=1),
    Stranger("monai_basic_unet", "monai", "medical", channels=1),
    Stranger("monai_flexible_unet", "monai", "medical", "inputs"),
    Stranger("monai_highresnet", "monai", "medical", channels=1, high=160),
    Stranger("spandrel_rrdb", "spandrel", "super-resolution", low=24, high=128),
    Stranger("spandrel_compact", "spandrel", "super-resolution", low=24, high=160),
    Stranger("spandrel_swinir", "spandrel", "super-resolution", low=24, high=128),
    Stranger("spandrel_hat", "spandrel", "super-resolution", low=24, high=128),
    Stranger("spandrel_omnisr", "spandrel", "super-resolution", low=24, high=128),
    Stranger("spandrel_dat", "spandrel", "super-resolution", low=24, high=128),
    Stranger("spandrel_realcugan", "spandrel", "super-resolution", low=24, high=128),
    Stranger("super_image_edsr", "super-image", "super-resolution", low=24, high=160),
    Stranger("super_image_carn", "super-image", "super-resolution", low=24, high=128),
    Stranger("hf_swin2sr", "transformers", "super-resolution", "pixel_values", low=24, high=128),
    Stranger("spandrel_nafnet", "spandrel", "restoration", "inp"),
    Stranger("spandrel_scunet", "spandrel", "restoration", "x0", high=160),
    Stranger("hf_dinov2", "transformers", "backbone", "pixel_values"),
    Stranger("hf_depth_anything", "transformers", "depth", "pixel_values"),
    Stranger("hf_detr", "transformers", "detection", "pixel_values"),
    Stranger("ultralytics_yolov8n", "ultralytics", "detection"),
    Stranger("kornia_dexined", "kornia", "edges"),
    Stranger("diffusers_vae", "diffusers", "generation"),
    Stranger("diffusers_unet", "diffusers", "generation", high=224),
)


def module_of(stranger: Stranger) -> str:
    """The Python module with the model's factory."""
    for name in ("strangers_models", "strangers_more_models"):
        if f"def {stranger.name}(" in (HERE / f"{name}.py").read_text():
            return name
    raise SystemExit(f"{stranger.name}: no such factory")
