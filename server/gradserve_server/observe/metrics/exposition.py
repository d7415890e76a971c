"""The metrics of a server as text."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gradserve_server.observe.metrics.families import (
    accumulator_families,
    call_families,
    gradient_families,
    traffic_families,
    upstream_families,
)
from gradserve_server.observe.status.figures import Figures

_OPEN_METRICS = "application/openmetrics-text"


class Exposition:
    """The metrics of a server, in the text format that a scraper asks for. Used in one thread only."""

    def __init__(self) -> None:
        self._server = _Server()
        self._registry = CollectorRegistry()
        self._registry.register(self._server)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._texts: dict[str, bytes] = {}

    def text(self, figures: Figures, accept: str) -> tuple[bytes, str]:
        """Returns figures and their content type: OpenMetrics or Prometheus text, as the Accept header asks."""
        asks = any(each.partition(";")[0].strip().casefold() == _OPEN_METRICS for each in accept.split(","))
        # In words of its own: the library's reader of this header trusts it.
        encode, content_type = choose_encoder(f"{_OPEN_METRICS}; version=1.0.0" if asks else "")
        if self._server.figures is not figures:
            self._server.figures = figures
            self._texts.clear()
        text = self._texts.get(content_type)
        if text is None:
            text = self._texts[content_type] = encode(self._registry)
        return text, content_type


class _Server(Collector):
    def __init__(self) -> None:
        self.figures: Figures | None = None

    def collect(self) -> Iterator[Metric]:
        """Returns all families."""
        figures = self.figures
        if figures is None:
            return
        yield InfoMetricFamily("gradserve", "The version of the server.", {"version": figures.version})
        yield from call_families(figures.calls)
        yield from traffic_families(figures.traffic)
        yield from gradient_families(figures.totals)
        yield from accumulator_families(figures.accumulators)
        yield from _memory_families(figures)
        yield from _resource_families(figures)
        if figures.upstream:
            yield from upstream_families(figures.upstream, figures.passed_on)
        yield GaugeMetricFamily(
            "gradserve_kernels_ready",
            "0 while the kernels of the ops are being loaded or compiled, otherwise 1.",
            float(figures.ops_prepared),
        )


def _memory_families(figures: Figures) -> Iterator[Metric]:
    used = GaugeMetricFamily("gradserve_memory_bytes", "Memory in use, by purpose.", labels=("purpose",))
    limit = GaugeMetricFamily(
        "gradserve_memory_limit_bytes", "The limit of memory, for purposes that have one.", labels=("purpose",)
    )
    for each in figures.memory:
        used.add_metric((each.purpose,), each.num_bytes)
        if each.max_bytes:
            limit.add_metric((each.purpose,), each.max_bytes)
    yield from (used, limit)


def _resource_families(figures: Figures) -> Iterator[Metric]:
    used = GaugeMetricFamily(
        "gradserve_resources",
        "How many there are of each kind: handles, accumulators, waiting calls, and so on.",
        labels=("kind",),
    )
    limit = GaugeMetricFamily("gradserve_resource_limit", "How many there may be.", labels=("kind",))
    for kind, (count, most) in figures.resources.items():
        used.add_metric((kind,), count)
        if most:
            limit.add_metric((kind,), most)
    yield from (used, limit)
