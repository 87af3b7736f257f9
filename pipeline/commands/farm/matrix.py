"""The matrix of a farm: every model for every target and every kind of GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ArtifactError, InputError
from pipeline.machine.gpu import check_capabilities, parse_capabilities, sm_text
from pipeline.machine.target import find_target
from pipeline.store.entry import folder_of
from pipeline.store.store import Store

DEFAULT_MEMORY = 8 * 2**30  # the comparison's 6 GiB at most, and 2 GiB for the libraries


@dataclass(frozen=True)
class Job:
    """One conversion of the matrix.

    Args:
        model: The model's name.
        target: The target's name.
        gpus: The kinds of GPU that its engine is for, such as ``("sm86",)``; empty for the default.
    """

    model: str
    target: str
    gpus: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """``linear rtx-1.7 sm86``."""
        return " ".join((self.model, self.target, *([",".join(self.gpus)] if self.gpus else [])))

    @property
    def builds_on_gpu(self) -> bool:
        """Whether its build needs a GPU. TensorRT-RTX needs none."""
        return find_target(self.target).flavour != "tensorrt_rtx"


def matrix(models: Sequence[str], targets: Sequence[str], gpus: Sequence[str]) -> list[Job]:
    """Returns a job for each model, target and kind of GPU. Those of one model are neighbours.

    Args:
        models: The models' names.
        targets: The targets' names.
        gpus: The kinds of GPU, as text. ``sm86,sm89`` is one engine for both.

    Raises:
        InputError: A target or a kind is unknown, or the target cannot build for it.
    """
    kinds = [parse_capabilities([text]) for text in gpus] or [()]
    for target in map(find_target, targets):
        for kind in kinds:
            if target.flavour == "tensorrt_rtx":
                check_capabilities(kind, target)
            elif len(kind) > 1:
                raise InputError(
                    f"--gpu {_texts(kind)[0]},...: {target} builds for one kind of GPU. "
                    "Repeat --gpu for more"
                )
    found = [Job(m, t, _texts(kind)) for m in models for t in targets for kind in kinds]
    return list(dict.fromkeys(found))


def _texts(kind: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    return tuple(map(sm_text, kind))


def targets_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns every ``--target`` of the command line; the default one if there is none."""
    return getattr(arguments, "targets", None) or (arguments.target,)


def shared_store(url: str) -> str:
    """Returns the address of a store as other machines write it: a local folder is absolute.

    Raises:
        InputError: The address is not valid, or other processes cannot open it.
    """
    place = Store.open(url).place
    if url.startswith("memory:"):
        raise InputError(f"--store {url}: other processes cannot open it. Pass a shared folder")
    return str(Path(place.root).absolute()) if place.local else url


def memory_of(store: Store, models: Sequence[str]) -> dict[str, int]:
    """Returns the memory in bytes that a conversion of each model asks for.

    It is what the last used artifact of the model in the store needed: the peak of the conversion's
    process, and that of the builder's process beside it. It is `DEFAULT_MEMORY` if there is none.

    Raises:
        StoreError: The store cannot be read.
    """
    found = dict.fromkeys(models, DEFAULT_MEMORY)
    wanted = {folder_of(model): model for model in models}
    for listed in store.entries():
        model = wanted.get(listed.name.rpartition("/")[0])
        if model is None:
            continue
        try:
            manifest = store.read(listed).manifest
        except ArtifactError:
            continue
        peaks = [stage.peak_bytes or 0 for stage in manifest.stages if stage.name != "build"]
        build = manifest.build
        if any(peaks) and build is not None and build.peak_bytes:
            found[model] = max(peaks) + build.peak_bytes
            del wanted[folder_of(model)]
    return found
