"""Engines for the tests on a GPU: each net is built once, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_nets as nets
import pytest
from gpu_engines import Built, Busy, Loaded, Reference, References, pack
from on_gpu import TARGET

import pipeline


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The artifact of a net, by its name in `nets`. Do not change it."""
    folder = tmp_path_factory.mktemp("engines")

    def get(name: str) -> Path:
        assert TARGET is not None
        place = folder / name.lower()
        return place if place.is_dir() else pack(getattr(nets, name), place, TARGET)

    return get


@pytest.fixture
def loaded(built: Built) -> Iterator[Loaded]:
    """Loads a net's engine; closes it after the test."""
    engines: list[pipeline.Engine] = []

    def get(name: str, **how: int) -> pipeline.Engine:
        engines.append(pipeline.load(built(name), **how))
        return engines[-1]

    yield get
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def reference(built: Built) -> References:
    """ONNX Runtime's outputs of a net."""
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            known[name] = Reference(built(name))
        return known[name]

    return get


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Keeps streams busy, so that missing synchronisation gives wrong results."""
    work = Busy()
    yield work
    work.close()
