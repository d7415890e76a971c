"""Metrics: what workers measure, its means over the updates of a round, and over the reports on a version."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from sys import getsizeof

from gradserve_server.accumulators.gradient import Metrics
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_METRICS
from gradserve_server.storage.journal import Record

_METRIC_BYTES = 96
"""The measured memory of a metric beside its name."""
_EVALUATION_BYTES = 512
_REPORT_BYTES = 64
"""The measured memory of an evaluation, and of each of its reports beside the id of the worker."""


def metrics_bytes(metrics: Metrics) -> int:
    """Returns the memory of metrics."""
    return sum([_METRIC_BYTES + getsizeof(name) for name, _ in metrics])


def mean_metrics(weighted: Iterable[tuple[float, Metrics]]) -> dict[str, float]:
    """Returns the weighted mean of each metric over those that have it; NaN if one of its values is.

    Of at most `MAX_METRICS` names, the first that come: the means are shown where many names would be too much.

    Args:
        weighted: The weight and the metrics of each update.
    """
    sums: dict[str, list[float]] = {}
    for weight, metrics in weighted:
        for name, value in metrics:
            if (found := sums.get(name)) is not None:
                found[0] += weight * value
                found[1] += weight
            elif len(sums) < MAX_METRICS:
                sums[name] = [weight * value, weight]
    return {name: total / weight for name, (total, weight) in sums.items()}


def metrics_record(metrics: Metrics) -> dict[str, float]:
    """Converts metrics to a record; the reverse of `metrics_of`."""
    return dict(metrics)


def metrics_of(record: Mapping[str, float]) -> Metrics:
    """Converts a record to metrics.

    Raises:
        DAMAGES: It is no such record.
    """
    return tuple([(name, float(value)) for name, value in record.items()])


@dataclass(frozen=True, slots=True)
class Report:
    """The measurements that somebody has made of a version.

    Attributes:
        step: The step of the version.
        metrics: The metrics; at least one.
        weight: The weight in the means; positive and finite.
        worker_id: Its sender, who counts once for each version; empty for nobody in particular.
    """

    step: int
    metrics: Metrics
    weight: float = 1.0
    worker_id: str = ""


@dataclass(slots=True, eq=False)
class Evaluation:
    """All that was measured of one version.

    Attributes:
        step: Its step.
        sums: By metric, the sum of its values times their weights, and the sum of these weights.
        weight: The sum of the weights of all reports.
        worker_ids: The workers that have reported, in order of arrival, without empty ids.
        num_reports: The number of reports.
    """

    step: int
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    weight: float = 0.0
    worker_ids: dict[str, None] = field(default_factory=dict)
    num_reports: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The weighted mean of each metric."""
        return {name: total / weight for name, (total, weight) in self.sums.items()}

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return _EVALUATION_BYTES + _names_bytes(self.sums) + _workers_bytes(self.worker_ids)

    def growth(self, report: Report) -> int:
        """Returns the memory that a report adds."""
        names = _names_bytes([name for name, _ in report.metrics if name not in self.sums])
        return names + _workers_bytes([report.worker_id] if report.worker_id else [])

    def add(self, report: Report) -> None:
        """Adds a report."""
        for name, value in report.metrics:
            total, weight = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + report.weight * value, weight + report.weight)
        self.weight += report.weight
        self.num_reports += 1
        if report.worker_id:
            self.worker_ids[report.worker_id] = None


def _names_bytes(names: Iterable[str]) -> int:
    return sum([_METRIC_BYTES + getsizeof(each) for each in names])


def _workers_bytes(worker_ids: Iterable[str]) -> int:
    return sum([_REPORT_BYTES + getsizeof(each) for each in worker_ids])


class Evaluations:
    """The evaluations of versions, by step; those of the oldest versions go when there are too many.

    The same reports in the same order give the same evaluations, so they can be replayed.

    Attributes:
        num_bytes: The memory that they take.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_step: dict[int, Evaluation] = {}
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Evaluation]:
        """Yields all evaluations by step."""
        return iter(self._by_step.values())

    def __len__(self) -> int:
        return len(self._by_step)

    def of(self, step: int) -> Evaluation | None:
        """Returns that of a step; None if there is none."""
        return self._by_step.get(step)

    def latest(self, count: int) -> list[Evaluation]:
        """Returns those of the latest steps, by step."""
        return list(self._by_step.values())[-count:]

    def has_counted(self, report: Report) -> bool:
        """Returns True if the worker of a report has reported on the version before."""
        found = self._by_step.get(report.step)
        return found is not None and report.worker_id in found.worker_ids

    def growth(self, report: Report) -> int:
        """Returns the memory that a report needs.

        Raises:
            InvalidArgumentError: All reports on its version would have too many names.
        """
        found = self._by_step.get(report.step)
        if found is None:
            return _EVALUATION_BYTES + Evaluation(report.step).growth(report)
        count = len(found.sums.keys() | {name for name, _ in report.metrics})
        if count > MAX_METRICS:
            raise InvalidArgumentError(
                f"expected at most {MAX_METRICS} names in all reports on step {report.step}, got {count}",
                field="metrics",
            )
        return found.growth(report)

    def add(self, report: Report) -> Evaluation:
        """Adds a report; returns the evaluation of its version."""
        found = self._by_step.get(report.step)
        if found is not None:
            self.num_bytes += found.growth(report)
            found.add(report)
            return found
        found = Evaluation(report.step)
        found.add(report)
        self._insert(found)
        return found

    def restore(self, evaluations: Iterable[Evaluation]) -> None:
        """Adds evaluations that an earlier run of the server left."""
        for each in evaluations:
            self._insert(each)

    def _insert(self, evaluation: Evaluation) -> None:
        by_step = self._by_step
        is_last = not by_step or evaluation.step > next(reversed(by_step))
        by_step[evaluation.step] = evaluation
        self.num_bytes += evaluation.num_bytes
        if not is_last:
            self._by_step = by_step = dict(sorted(by_step.items()))
        while len(by_step) > self._capacity:
            self.num_bytes -= by_step.pop(next(iter(by_step))).num_bytes


def evaluation_record(evaluation: Evaluation) -> Record:
    """Converts an evaluation to a record; the reverse of `evaluation_of`."""
    return {
        "step": evaluation.step,
        "sums": {name: list(sums) for name, sums in evaluation.sums.items()},
        "weight": evaluation.weight,
        "worker_ids": list(evaluation.worker_ids),
        "num_reports": evaluation.num_reports,
    }


def evaluation_of(record: Record) -> Evaluation:
    """Converts a record to an evaluation.

    Raises:
        DAMAGES: It is no such record.
    """
    sums = {name: (float(total), float(weight)) for name, (total, weight) in record["sums"].items()}
    workers = dict.fromkeys(record["worker_ids"])
    return Evaluation(int(record["step"]), sums, float(record["weight"]), workers, int(record["num_reports"]))


def canonical(metrics: Mapping[str, float]) -> Metrics:
    """Returns metrics in the order of their names, with one NaN for all: records keep no other bits of one."""
    return tuple([(name, math.nan if math.isnan(value) else float(value)) for name, value in sorted(metrics.items())])
