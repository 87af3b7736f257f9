"""The models that come with the pipeline: name -> ``module:factory``, imported on first use."""

from __future__ import annotations

MODELS: dict[str, str] = {
    "linear": "pipeline.models.linear:linear",
    "llama": "pipeline.models.llama:llama",
    "raft": "pipeline.models.raft:raft",
    "raft_small": "pipeline.models.raft:raft_small",
    "unet_sr": "pipeline.models.unet_sr:unet_sr",
    "vit": "pipeline.models.vit:vit",
    "vit_any_size": "pipeline.models.vit:vit_any_size",
}
