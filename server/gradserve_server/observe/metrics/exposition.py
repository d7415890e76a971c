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
from gradserve_server.observe.observed import Observed
from gradserve_server.observe.status.server import ServerFacts


class Exposition:
    """The metrics of a server, in the text format that a scraper asks for. Used on the event loop only."""

    def __init__(self, observed: Observed, facts: ServerFacts) -> None:
        """Takes what is counted, and what is known of the server."""
        self._registry = CollectorRegistry()
        self._registry.register(_Server(observed, facts))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics and their content type: OpenMetrics or Prometheus text, as the Accept header asks."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Server(Collector):
    def __init__(self, observed: Observed, facts: ServerFacts) -> None:
        self._observed = observed
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Returns all families."""
        observed = self._observed
        yield InfoMetricFamily("gradserve", "The version of the server.", {"version": self._facts.version})
        yield from call_families(observed.calls)
        yield from traffic_families(observed.traffic)
        yield from gradient_families(observed.histories.totals)
        yield from accumulator_families(observed.histories)
        yield from self._memory_families()
        yield from self._resource_families()
        if self._facts.upstream:
            yield from upstream_families(self._facts.upstream, self._facts.passed_on())
        yield GaugeMetricFamily(
            "gradserve_kernels_ready",
            "1 once the kernels of the ops are loaded or compiled, otherwise 0.",
            float(self._facts.ops_prepared()),
        )

    def _memory_families(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("gradserve_memory_bytes", "Memory in use, by purpose.", labels=("purpose",))
        limit = GaugeMetricFamily(
            "gradserve_memory_limit_bytes", "The limit of memory, for purposes that have one.", labels=("purpose",)
        )
        for each in self._facts.memory():
            used.add_metric((each.purpose,), each.num_bytes)
            if each.max_bytes:
                limit.add_metric((each.purpose,), each.max_bytes)
        yield from (used, limit)

    def _resource_families(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            "gradserve_resources",
            "How many there are of each kind: handles, accumulators, waiting calls, and so on.",
            labels=("kind",),
        )
        limit = GaugeMetricFamily("gradserve_resource_limit", "How many there may be.", labels=("kind",))
        for kind, (count, most) in self._facts.resources().items():
            used.add_metric((kind,), count)
            if most:
                limit.add_metric((kind,), most)
        yield from (used, limit)
