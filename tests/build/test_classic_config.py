"""The builder config of a TensorRT that is not RTX, on a pretended builder: 8.6 needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.build.settings import BuildOptions, _classic_config
from pipeline.machine.target import TARGETS

T86 = TARGETS["tensorrt-8.6"]


class Config:
    """Keeps what is set; what is not set has TensorRT's default."""

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.features: list[tuple[str, bool]] = []

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def set_tactic_sources(self, sources: int) -> None:
        self.sources = sources

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self.features.append((feature, on))


TRT = SimpleNamespace(
    BuilderFlag=SimpleNamespace(FP16="FP16", REFIT="REFIT"),
    ProfilingVerbosity=SimpleNamespace(DETAILED="DETAILED"),
    PreviewFeature=SimpleNamespace(PROFILE_SHARING_0806="SHARING"),
)


def made(options: BuildOptions) -> dict[str, Any]:
    builder = SimpleNamespace(create_builder_config=Config)
    return vars(_classic_config(TRT, builder, None, [], options))


def test_by_default_only_the_tactic_sources_and_the_contexts_are_not_tensorrts() -> None:
    assert made(BuildOptions(T86)) == {"flags": [], "features": [("SHARING", True)], "sources": 0}


@pytest.mark.parametrize("field", ["plain", "libraries"])
def test_tensorrts_own_tactic_sources(field: str) -> None:
    found = made(BuildOptions(T86, **{field: True}))  # type: ignore[arg-type]
    assert found == {"flags": [], "features": [("SHARING", True)]}


def test_a_plain_fp16_build_is_by_the_flag() -> None:
    assert made(BuildOptions(T86, "fp16", plain=True))["flags"] == ["FP16"]


def test_details_of_layers_cost_time_so_they_are_asked_for() -> None:
    assert made(BuildOptions(T86, detailed=True))["profiling_verbosity"] == "DETAILED"
