"""Metrics for Prometheus. Only this module imports prometheus_client, and only the HTTP port imports this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gradserve_protocol.server_status import WeightStatus
from gradserve_server.observe.calls import Histogram, MethodCalls, Way
from gradserve_server.observe.rounds import Totals
from gradserve_server.observe.status.source import (
    MOST_ACCUMULATORS,
    MOST_PARAMETERS,
    AccumulatorFigures,
    DiskFigures,
    Figures,
    ParametersFigures,
)
from gradserve_server.storage.backup_schedule import BackupFigures

_CALL_LABELS = ("grpc_type", "grpc_service", "grpc_method")
_OPEN_METRICS = "application/openmetrics-text"


class Exposition:
    """Writes a server's metrics in the text format that a scraper asks for. Used in one thread only."""

    def __init__(self) -> None:
        self._server = _Server()
        self._registry = CollectorRegistry()
        self._registry.register(self._server)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._texts: dict[str, bytes] = {}

    def text(self, figures: Figures, accept: str) -> tuple[bytes, str]:
        """Returns the metrics as text, and its content type: OpenMetrics if the Accept header asks for it."""
        asks = any(each.partition(";")[0].strip().casefold() == _OPEN_METRICS for each in accept.split(","))
        # The header itself never reaches the library, whose parser trusts it.
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
        yield from _call_families(figures.calls)
        yield from _traffic_families(figures.traffic)
        yield from _gradient_families(figures.totals)
        yield from _accumulator_families(figures.accumulators)
        yield from _update_families(figures.update_totals, figures.applying)
        yield from _parameters_families(figures.parameters)
        yield from _memory_families(figures)
        yield from _resource_families(figures)
        if figures.upstream:
            yield from _upstream_families(figures.upstream, figures.passed_on)
        if figures.backups is not None:
            yield from _backup_families(figures.backups)
        if figures.disk is not None:
            yield from _disk_families(figures.disk)
        yield GaugeMetricFamily(
            "gradserve_kernels_ready",
            "0 while kernels are being loaded or compiled, as calls have asked for them, otherwise 1.",
            float(figures.ops_prepared),
        )


def _call_families(calls: Iterable[MethodCalls]) -> Iterator[Metric]:
    """Returns the families of calls, with the names that Prometheus's gRPC interceptors use."""
    started = CounterMetricFamily("grpc_server_started", "Calls that have begun.", labels=_CALL_LABELS)
    handled = CounterMetricFamily(
        "grpc_server_handled", "Calls that have ended, by status code.", labels=(*_CALL_LABELS, "grpc_code")
    )
    working = HistogramMetricFamily(
        "grpc_server_handling_seconds",
        "Seconds that calls took, without those in which they waited for other workers.",
        labels=_CALL_LABELS,
    )
    waiting = HistogramMetricFamily(
        "gradserve_call_waiting_seconds",
        "Seconds that calls waited for other workers, of those that did.",
        labels=_CALL_LABELS,
    )
    for each in calls:
        labels = (each.kind, each.service, each.method)
        started.add_metric(labels, each.started)
        for code, count in each.handled.items():
            handled.add_metric((*labels, code), count)
        if each.started:
            _add(working, each.working, labels)
        if each.waiting.count:
            _add(waiting, each.waiting, labels)
    yield from (started, handled, working, waiting)


def _traffic_families(traffic: Mapping[str, Way]) -> Iterator[Metric]:
    """Returns the families of bytes and calls by transport."""
    num_bytes = CounterMetricFamily(
        "gradserve_transferred_bytes",
        "Bytes of requests (received) and replies (sent), by way: grpc, bulk or shared_memory.",
        labels=("way", "direction"),
    )
    calls = CounterMetricFamily("gradserve_way_calls", "Calls, by way.", labels=("way",))
    for name, way in traffic.items():
        num_bytes.add_metric((name, "received"), way.received)
        num_bytes.add_metric((name, "sent"), way.sent)
        calls.add_metric((name,), way.calls)
    yield from (num_bytes, calls)


def _gradient_families(totals: Totals) -> Iterator[Metric]:
    """Returns the families of gradients and rounds, over all accumulators."""
    gradients = CounterMetricFamily(
        "gradserve_gradients", "Gradients, by outcome: accepted, stale, duplicate or refused.", labels=("outcome",)
    )
    for outcome in ("accepted", "stale", "duplicate", "refused"):
        gradients.add_metric((outcome,), getattr(totals, outcome))
    num_bytes = CounterMetricFamily(
        "gradserve_gradient_bytes",
        "Bytes of gradients, by outcome: accepted, which is goodput, or stale, which is work for nothing.",
        labels=("outcome",),
    )
    num_bytes.add_metric(("accepted",), totals.accepted_bytes)
    num_bytes.add_metric(("stale",), totals.stale_bytes)
    not_finite = CounterMetricFamily(
        "gradserve_not_finite_gradients", "Refused gradients with infinite values or NaN.", totals.not_finite
    )
    yield from (gradients, num_bytes, not_finite)
    yield from _round_families(totals)


def _round_families(totals: Totals) -> Iterator[Metric]:
    yield from _histograms(
        ("gradserve_round_seconds", totals.rounds, "Seconds from the first gradient of a round to its end."),
        (
            "gradserve_round_gathering_seconds",
            totals.gathering,
            "Seconds from the first gradient of a round to its last: how long it waited for workers.",
        ),
        ("gradserve_gradient_staleness_steps", totals.staleness, "How many steps stale gradients were late."),
    )
    yield _waited_for(
        "gradserve_round_waited_for_worker_seconds",
        "Seconds that rounds had all gradients but the last, by the worker that sent it.",
        totals,
    )


def _histograms(*described: tuple[str, Histogram, str]) -> Iterator[Metric]:
    for name, histogram, text in described:
        family = HistogramMetricFamily(name, text)
        _add(family, histogram, ())
        yield family


def _waited_for(name: str, text: str, totals: Totals) -> Metric:
    waited = CounterMetricFamily(name, text, labels=("worker",))
    for worker, seconds in totals.waited_for.items():
        waited.add_metric((worker,), seconds)
    return waited


def _update_families(totals: Totals, applying: Histogram) -> Iterator[Metric]:
    """Returns the families of updates and rounds, over all parameters."""
    updates = CounterMetricFamily(
        "gradserve_parameters_updates",
        "Updates of parameters, by outcome: accepted, stale, duplicate or refused.",
        labels=("outcome",),
    )
    for outcome in ("accepted", "stale", "duplicate", "refused"):
        updates.add_metric((outcome,), getattr(totals, outcome))
    num_bytes = CounterMetricFamily(
        "gradserve_parameters_update_bytes",
        "Bytes of updates, by outcome: accepted, or stale, which is work for nothing.",
        labels=("outcome",),
    )
    num_bytes.add_metric(("accepted",), totals.accepted_bytes)
    num_bytes.add_metric(("stale",), totals.stale_bytes)
    not_finite = CounterMetricFamily(
        "gradserve_parameters_not_finite_updates", "Refused updates with infinite values or NaN.", totals.not_finite
    )
    yield from (updates, num_bytes, not_finite)
    yield from _histograms(
        (
            "gradserve_parameters_round_seconds",
            totals.rounds,
            "Seconds from the first update of a round of parameters to its end.",
        ),
        (
            "gradserve_parameters_round_gathering_seconds",
            totals.gathering,
            "Seconds from the first update of a round of parameters to its last.",
        ),
        ("gradserve_parameters_apply_seconds", applying, "Seconds that optimizers took to make a version."),
        (
            "gradserve_parameters_update_staleness_steps",
            totals.staleness,
            "How many versions had been made since the one from which an update was computed; stale updates included.",
        ),
    )
    yield _waited_for(
        "gradserve_parameters_round_waited_for_worker_seconds",
        "Seconds that rounds of parameters had all updates but the last, by the worker that sent it.",
        totals,
    )


def _parameters_families(parameters: Sequence[ParametersFigures]) -> Iterator[Metric]:
    """Returns the families of single parameters, only of those whose rounds began or ended last."""
    labels = ("container", "parameters")
    of_which = f"of the {MOST_PARAMETERS} parameters whose rounds began or ended last"
    rounds = CounterMetricFamily(
        "gradserve_parameters_rounds",
        f"Rounds of parameters, by the reason of their end, {of_which}.",
        labels=(*labels, "reason"),
    )
    refused = CounterMetricFamily(
        "gradserve_parameters_refused_weight",
        "Weight of updates that did not count, by reason, since the parameters were created.",
        labels=(*labels, "reason"),
    )
    for each in parameters:
        names = (each.container, each.name)
        for reason, count in each.num_ended.items():
            rounds.add_metric((*names, reason), count)
        for reason, weight in each.weights.refused.items():
            refused.add_metric((*names, reason), weight)
    yield from (rounds, refused)
    for counter, text, weigh in _WEIGHTS:
        family = CounterMetricFamily(counter, text, labels=labels)
        for each in parameters:
            family.add_metric((each.container, each.name), weigh(each.weights))
        yield family
    for name, text, value_of in _PARAMETERS_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for each in parameters:
            value = value_of(each)
            if value is not None:
                gauge.add_metric((each.container, each.name), value)
        yield gauge
    for name, text, metrics_of in _METRICS:
        gauge = GaugeMetricFamily(name, f"{text} {of_which}.", labels=(*labels, "metric"))
        for each in parameters:
            for metric, value in metrics_of(each).items():
                gauge.add_metric((each.container, each.name, metric), value)
        yield gauge


_METRICS: Sequence[tuple[str, str, Callable[[ParametersFigures], Mapping[str, float]]]] = (
    (
        "gradserve_parameters_round_metric",
        "The mean of what workers have measured in the latest round, by the name that they give it,",
        lambda each: each.metrics,
    ),
    (
        "gradserve_parameters_evaluation_metric",
        "What was measured of the newest version of which somebody has reported, by name,",
        lambda each: each.evaluation,
    ),
)


_WEIGHTS: Sequence[tuple[str, str, Callable[[WeightStatus], float]]] = (
    (
        "gradserve_parameters_accepted_weight",
        "Weight of accepted updates since the parameters were created: applied + dropped + pending.",
        lambda weights: weights.accepted,
    ),
    ("gradserve_parameters_applied_weight", "Weight of updates in versions.", lambda weights: weights.applied),
    (
        "gradserve_parameters_dropped_weight",
        "Weight of accepted updates that were dropped when other values were loaded.",
        lambda weights: weights.dropped,
    ),
)
_PARAMETERS_GAUGES: Sequence[tuple[str, str, Callable[[ParametersFigures], float | None]]] = (
    (
        "gradserve_parameters_pending_weight",
        "Weight of the updates in the current round.",
        lambda each: each.weights.pending,
    ),
    ("gradserve_parameters_step", "The step of the newest version.", lambda each: each.step),
    ("gradserve_parameters_learning_rate", "The learning rate, after the schedule.", lambda each: each.learning_rate),
    ("gradserve_parameters_open_round_updates", "Updates in the current round.", lambda each: each.num_updates),
    ("gradserve_parameters_required_updates", "Updates that a round needs.", lambda each: each.num_required),
    (
        "gradserve_parameters_waiting_calls",
        "Calls of push_pull, read and wait that wait for a version.",
        lambda each: each.num_waiting,
    ),
    (
        "gradserve_parameters_bytes",
        "Memory of versions, the optimizer's state and updates.",
        lambda each: each.num_bytes,
    ),
    (
        "gradserve_parameters_participation_ratio",
        "The share of live workers whose update counted in the latest round, if it is known.",
        lambda each: each.participation,
    ),
    (
        "gradserve_parameters_last_round_age_seconds",
        "Seconds since the last round ended, if one has.",
        lambda each: each.last_round_age,
    ),
    (
        "gradserve_parameters_open_round_age_seconds",
        "Seconds since the first update of the current round; 0 while it has none.",
        lambda each: each.open_round_age,
    ),
    (
        "gradserve_parameters_median_round_seconds",
        "Median time from the first update of the last 20 rounds to their ends, if one has ended.",
        lambda each: each.median_round_seconds if each.last_round_age is not None else None,
    ),
)


def _accumulator_families(accumulators: Iterable[AccumulatorFigures]) -> Iterator[Metric]:
    """Returns the families of single accumulators, only of those whose rounds began or ended last."""
    labels = ("container", "accumulator")
    rounds = CounterMetricFamily(
        "gradserve_accumulator_rounds",
        f"Rounds of an accumulator, of the {MOST_ACCUMULATORS} whose rounds began or ended last.",
        labels=labels,
    )
    stale = CounterMetricFamily("gradserve_accumulator_stale_gradients", "Its stale gradients.", labels=labels)
    ended = GaugeMetricFamily(
        "gradserve_accumulator_last_round_age_seconds", "Seconds since its last round ended, if one has.", labels=labels
    )
    arrived = GaugeMetricFamily(
        "gradserve_accumulator_open_round_age_seconds",
        "Seconds since the first gradient of its current round; 0 while it has none.",
        labels=labels,
    )
    median = GaugeMetricFamily(
        "gradserve_accumulator_median_round_seconds",
        "Median time from the first gradient of its last 20 rounds to their ends, if one has ended.",
        labels=labels,
    )
    different = GaugeMetricFamily(
        "gradserve_accumulator_different_workers",
        "Workers whose parameters are not those of most workers of a round.",
        labels=labels,
    )
    compared = GaugeMetricFamily(
        "gradserve_accumulator_compared_workers",
        "Workers whose parameters the latest comparison has compared; 0 if there was none.",
        labels=labels,
    )
    for each in accumulators:
        names = (each.container, each.name)
        rounds.add_metric(names, each.num_rounds)
        stale.add_metric(names, each.stale)
        if each.last_round_age is not None:
            ended.add_metric(names, each.last_round_age)
            median.add_metric(names, each.median_round_seconds)
        arrived.add_metric(names, each.open_round_age)
        different.add_metric(names, each.num_different)
        compared.add_metric(names, each.num_compared)
    yield from (rounds, stale, ended, arrived, median, different, compared)


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


def _backup_families(backups: BackupFigures) -> Iterator[Metric]:
    """Returns the families of a server that takes backups of its state directory."""
    taken = CounterMetricFamily("gradserve_backups", "Backups, by outcome: taken or failed.", labels=("outcome",))
    taken.add_metric(("taken",), backups.num_taken)
    taken.add_metric(("failed",), backups.num_failed)
    yield taken
    for name, text, value in (
        (
            "gradserve_newest_backup_timestamp_seconds",
            "When the newest backup was begun, in seconds since 1970; 0 if there is none.",
            backups.newest or 0.0,
        ),
        ("gradserve_backup_interval_seconds", "The time between two backups.", backups.interval_seconds),
        ("gradserve_newest_backup_bytes", "The values in the newest backup since the start.", backups.num_bytes),
        ("gradserve_newest_backup_seconds", "The time that it took.", backups.seconds),
    ):
        yield GaugeMetricFamily(name, text, value)


def _disk_families(disk: DiskFigures) -> Iterator[Metric]:
    """Returns the families of a server with a state directory."""
    yield GaugeMetricFamily(
        "gradserve_state_disk_free_bytes", "What the server can still write to the disk of its state.", disk.free
    )
    yield GaugeMetricFamily("gradserve_state_disk_bytes", "The size of the disk of its state.", disk.total)


def _upstream_families(address: str, counts: Mapping[str, int]) -> Iterator[Metric]:
    """Returns the families of an aggregator, which forwards gradients to the server at an address."""
    yield InfoMetricFamily(
        "gradserve_upstream", "The server that an aggregator forwards gradients and updates to.", {"address": address}
    )
    yield CounterMetricFamily(
        "gradserve_upstream_gradients", "Gradients and updates received for what is upstream.", counts["gradients"]
    )
    sent = CounterMetricFamily(
        "gradserve_upstream_sent", "Forwarded sums of several, and single ones.", labels=("kind",)
    )
    sent.add_metric(("sum",), counts["sums"])
    sent.add_metric(("alone",), counts["alone"])
    yield sent
    yield CounterMetricFamily(
        "gradserve_upstream_reads", "Averages and versions returned to readers here.", counts["reads"]
    )
    yield CounterMetricFamily(
        "gradserve_upstream_downloads", "Averages and versions that were fetched for them.", counts["downloads"]
    )


def _add(family: HistogramMetricFamily, histogram: Histogram, labels: tuple[str, ...]) -> None:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
