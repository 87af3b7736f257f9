"""The models that come with the pipeline: name -> ``module:factory``, imported when asked for."""

from __future__ import annotations

MODELS: dict[str, str] = {
    "raft": "pipeline.models.raft:raft",
    "raft_small": "pipeline.models.raft:raft_small",
}
