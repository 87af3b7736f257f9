"""Exports engines' numbers to Prometheus and OpenTelemetry, by their own libraries.

Both read `Engine.metrics` when they collect, so they cost a call nothing. The names follow
OpenTelemetry's rules; Prometheus' names follow from them by the rules of its specification.

Source: OpenTelemetry semantic conventions (metrics, naming) and its Prometheus compatibility page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from pipeline.errors import InputError
from pipeline.runtime.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from pipeline.runtime.engine import Engine

_PREFIX = "pipeline.engine"
_ENGINE = "pipeline.engine"  # the attribute with an engine's name
_DIM = "pipeline.dim"
_SUFFIXES = {"s": "_seconds", "By": "_bytes"}  # Prometheus' names of units


@dataclass(frozen=True)
class Instrument:
    """A number of an engine, in OpenTelemetry's words.

    Args:
        unit: in UCUM's code.
        attribute: the name of the attribute that tells several values apart; empty for one value.
        values: the values by that attribute.
        grows: whether the number never falls.
    """

    name: str
    unit: str
    text: str
    attribute: str
    values: Callable[[Metrics], Mapping[str, float]]
    grows: bool = True


INSTRUMENTS = (
    Instrument(
        "calls", "{call}", "Calls whose run was enqueued", "pipeline.profile", lambda m: m["calls"]
    ),
    Instrument(
        "graph.calls", "{call}", "Calls that used a captured CUDA graph", "",
        lambda m: {"": m["graph_calls"]},
    ),
    Instrument(
        "errors", "{error}", "Calls and captures that raised an error", "error.type",
        lambda m: m["errors"],
    ),
    Instrument(
        "memory.retries", "{retry}",
        "Times that spare GPU memory was freed because memory was short", "",
        lambda m: {"": m["memory_retries"]},
    ),
    Instrument(
        "memory.usage", "By", "GPU memory that the engine holds", "pipeline.memory.type",
        lambda m: m["memory"], grows=False,
    ),
    Instrument(
        "graphs", "{graph}", "Captured CUDA graphs", "", lambda m: {"": m["captured"]}, grows=False
    ),
    Instrument(
        "timed.calls", "{call}", "Calls that were timed on the GPU", "",
        lambda m: {"": m["time"]["calls"]},
    ),
    Instrument(
        "queue.time", "s", "Time from a timed call's start to its run's start on the GPU", "",
        lambda m: {"": m["time"]["queue_seconds"]},
    ),
    Instrument(
        "gpu.time", "s", "Time of timed calls' runs on the GPU", "",
        lambda m: {"": m["time"]["gpu_seconds"]},
    ),
)  # fmt: skip
_SIZES = Instrument(
    "size.sum", "1", "Sum of a dim's sizes in all calls", _DIM,
    lambda m: {dim: size["sum"] for dim, size in m["sizes"].items()},
)  # fmt: skip


def prometheus_collector(engines: Mapping[str, Engine]) -> Collector:
    """A collector for `prometheus_client`, which reads the engines at each scrape.

    Register one collector for all engines of a registry: ``REGISTRY.register(collector)``.

    Args:
        engines: the engines by the value of the label ``engine``, such as the artifact's name. The
            collector reads the dict again at each scrape, so you may change it.

    Raises:
        InputError: prometheus_client is missing.
    """
    try:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise _missing("prometheus_client", error) from error

    class EngineCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            read = {name: engine.metrics() for name, engine in dict(engines).items()}
            for one in INSTRUMENTS:
                kind = CounterMetricFamily if one.grows else GaugeMetricFamily
                attributes = [_ENGINE, *([one.attribute] if one.attribute else [])]
                family = kind(_prometheus(one), one.text, labels=[*map(_label, attributes)])
                for name, metrics in read.items():
                    for value, number in one.values(metrics).items():
                        family.add_metric([name, *([value] if one.attribute else [])], number)
                yield family
            text = "Sizes of the dims in calls"
            histogram = HistogramMetricFamily(
                f"{_PREFIX}.size".replace(".", "_"), text, labels=[_label(_ENGINE), _label(_DIM)]
            )
            for name, metrics in read.items():
                for dim, size in metrics["sizes"].items():
                    bounds = [*map(str, size["buckets"]), "+Inf"]
                    counts = list(accumulate(size["buckets"].values()))
                    cumulative = list(zip(bounds, [*counts, counts[-1]], strict=True))
                    histogram.add_metric([name, dim], cumulative, size["sum"])
            yield histogram

    return EngineCollector()


def opentelemetry_metrics(engines: Mapping[str, Engine], meter: Meter) -> None:
    """Adds observable instruments for the engines to a meter of `opentelemetry`.

    OpenTelemetry has no observable histogram. So of the sizes it gets the sums only: divide them by
    the calls for the mean.

    Args:
        engines: the engines by the value of the attribute ``pipeline.engine``, such as the
            artifact's name. The dict is read again at each collection, so you may change it.
        meter: such as ``opentelemetry.metrics.get_meter("my_app")``. Add engines to it once.

    Raises:
        InputError: opentelemetry-api is missing.
    """
    try:
        from opentelemetry.metrics import Observation
    except ImportError as error:
        raise _missing("opentelemetry-api", error) from error

    def observe(one: Instrument, _: CallbackOptions) -> Iterable[Observation]:
        for name, engine in dict(engines).items():
            for value, number in one.values(engine.metrics()).items():
                more = {one.attribute: value} if one.attribute else {}
                yield Observation(number, {_ENGINE: name, **more})

    for one in (*INSTRUMENTS, _SIZES):
        create = (
            meter.create_observable_counter
            if one.grows
            else meter.create_observable_up_down_counter
        )
        create(f"{_PREFIX}.{one.name}", [partial(observe, one)], one.unit, one.text)


def _prometheus(one: Instrument) -> str:
    """An instrument's name in Prometheus; its library adds ``_total`` to counters."""
    return f"{_PREFIX}.{one.name}".replace(".", "_") + _SUFFIXES.get(one.unit, "")


def _label(attribute: str) -> str:
    """An attribute's name in Prometheus, without the package's prefix."""
    return attribute.removeprefix("pipeline.").replace(".", "_")


def _missing(library: str, error: ImportError) -> InputError:
    return InputError(f"{library} is missing ({error}); pip install 'trt-pipeline[metrics]'")
