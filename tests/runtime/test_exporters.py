"""What Prometheus and OpenTelemetry read of engines, without a GPU.

The GPU and TensorRT are pretended (`fake_cuda`, `fake_tensorrt`). The engines and both libraries
are real.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_cuda import PretendedCuda
from fake_tensorrt import B, Pretend, W, make_engine
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import pipeline
from pipeline import InputError
from pipeline.runtime.engine import Engine
from pipeline.runtime.exporters import INSTRUMENTS

F32 = np.float32
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "metrics.md").read_text()
WIDE, NARROW = "p0", "p1"  # the profiles; NARROW has w up to 16 and its opt is 3


def run(engine: Engine, b: int, w: int) -> None:
    engine(x=np.zeros((b, w), F32), z=np.zeros(w, F32))


def exported(engines: dict[str, Engine]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus reads: the values by name and labels."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(pipeline.prometheus_collector(engines))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def two_engines(cuda: PretendedCuda) -> dict[str, Engine]:
    engines = {"raft": make_engine(cuda), "vit": make_engine(cuda)}
    for w in (3, 4, 64):
        run(engines["raft"], 2, w)
    run(engines["vit"], 8, 0)
    with pytest.raises(InputError):
        run(engines["vit"], 9, 1)
    return engines


def test_prometheus_reads_it(pretend: Pretend) -> None:
    engines = two_engines(pretend(0))
    found = exported(engines)

    def value(name: str, **labels: str) -> float:
        return found[f"pipeline_engine_{name}", frozenset(labels.items())]

    assert value("calls_total", engine="raft", profile=NARROW) == 2
    assert value("calls_total", engine="raft", profile=WIDE) == 1
    assert value("errors_total", engine="vit", error_type="input") == 1
    assert value("errors_total", engine="vit", error_type="out_of_memory") == 0
    assert value("size_bucket", engine="raft", dim="w", le="2") == 0
    assert value("size_bucket", engine="raft", dim="w", le="4") == 2
    assert value("size_bucket", engine="raft", dim="w", le="32") == 2
    assert value("size_bucket", engine="raft", dim="w", le="64") == 3
    assert value("size_bucket", engine="raft", dim="w", le="+Inf") == 3
    assert value("size_sum", engine="raft", dim="w") == 71
    assert value("size_count", engine="raft", dim="b") == 3
    for name, engine in engines.items():
        for kind, number in engine.metrics()["memory"].items():
            assert value("memory_usage_bytes", engine=name, memory_type=kind) == number
        assert value("gpu_time_seconds_total", engine=name) == 0
    run(engines["vit"], 8, 0)
    del engines["raft"]
    found = exported(engines)
    assert value("calls_total", engine="vit", profile=NARROW) == 2
    assert not any(("engine", "raft") in labels for _, labels in found)


def test_the_names_are_prometheus_and_opentelemetrys(pretend: Pretend) -> None:
    """Both conventions: units in names, ``_total`` for counters, no two names that are one."""
    names = {name for name, _ in exported(two_engines(pretend(0)))}
    for one in INSTRUMENTS:
        name = f"pipeline_engine_{one.name}".replace(".", "_")
        name += {"s": "_seconds", "By": "_bytes"}.get(one.unit, "") + "_total" * one.grows
        names.remove(name)
        assert re.fullmatch(r"[a-z]+(\.[a-z]+)*", one.name) and not one.text.endswith(".")
        assert f"| `{name}` | `pipeline.engine.{one.name}` |" in PAGE
    assert names == {f"pipeline_engine_size_{part}" for part in ("bucket", "sum", "count")}


def test_opentelemetry_reads_it(pretend: Pretend) -> None:
    engines = two_engines(pretend(0))
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    pipeline.opentelemetry_metrics(engines, provider.get_meter("a test"))

    def read() -> dict[str, Any]:
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

    def points(name: str) -> dict[tuple[str, ...], float]:
        data = read()[f"pipeline.engine.{name}"].data
        return {tuple(map(str, p.attributes.values())): p.value for p in data.data_points}

    assert points("calls") == {
        ("raft", WIDE): 1, ("raft", NARROW): 2, ("vit", WIDE): 0, ("vit", NARROW): 1,
    }  # fmt: skip
    assert points("errors")["vit", "input"] == 1
    assert points("size.sum")["raft", "w"] == 71
    assert points("memory.usage")["raft", "weights"] == 4
    run(engines["raft"], 2, 64)
    assert points("calls")["raft", WIDE] == 2
    found = read()
    calls, memory = found["pipeline.engine.calls"], found["pipeline.engine.memory.usage"]
    assert (calls.unit, calls.data.is_monotonic) == ("{call}", True)
    assert (memory.unit, memory.data.is_monotonic) == ("By", False)
    assert found["pipeline.engine.gpu.time"].unit == "s"
    (first, *_) = found["pipeline.engine.errors"].data.data_points
    assert list(first.attributes) == ["pipeline.engine", "error.type"]
    provider.shutdown()


@pytest.mark.parametrize(
    ("library", "name"),
    [("prometheus_client.core", "prometheus_collector"),
     ("opentelemetry.metrics", "opentelemetry_metrics")],
)  # fmt: skip
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, library: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    arguments = ({},) if name.startswith("p") else ({}, Mock())
    with pytest.raises(InputError, match=r"is missing .*pip install 'trt-pipeline\[metrics\]'"):
        getattr(pipeline, name)(*arguments)


def test_endless_sizes_give_no_more_time_series(pretend: Pretend) -> None:
    engine = make_engine(pretend(0))
    before = exported({"m": engine}).keys()
    for b, w in itertools.product(range(B[2] + 1), range(W[2] + 1)):
        run(engine, b, w)
    assert exported({"m": engine}).keys() == before
