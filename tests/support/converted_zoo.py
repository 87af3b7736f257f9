"""Conversions of the zoo's models, each made once for all test files and all test processes.

The first process that asks for a model converts it. The others wait, and open the same artifact.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run
from pipeline.spec.config import Config

# Every layer of ViT is alike, and so are the updates of RAFT. The limits leave out the largest
# batches of the largest images: `convert --all` compares these.
HOW: Mapping[str, Mapping[str, Any]] = {
    "linear": {},
    "llama": {},
    "raft_small": {"options": {"updates": 2}, "quick": True},
    "unet_sr": {"options": {"channels": 4}, "memory_limit": 200 << 20},
    "vit": {"options": {"layers": 1}},
    "vit_any_size": {"options": {"layers": 1}, "memory_limit": 200 << 20},
}


def converted(name: str, folder: Path) -> Artifact:
    """The artifact of a zoo model. Do not change it.

    Args:
        name: A name in `HOW`.
        folder: A folder that all test processes share.
    """
    place = folder / name
    with FileLock(folder / f"{name}.lock"):
        if not place.is_dir():
            run(Config(name, out=place, **HOW[name]))
    return Artifact.open(place)
