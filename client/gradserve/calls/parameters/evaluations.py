"""The metrics of updates, the reports on versions, and the loop of an evaluator."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, SupportsFloat

from gradserve.calls.accumulators.contributions import OUTCOMES, Contribution, ContributionWire
from gradserve.calls.exchange import Operation, Work
from gradserve.calls.parameters.fields import fields_named
from gradserve.calls.parameters.spec import evaluation_of, metrics_of
from gradserve.conversion.plain import INT64, as_integer, as_mapping, as_number, plain_fields
from gradserve.parameter_records import Evaluation, ReportResult, Version
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.errors import DeadlineExceededError, GradserveError, InvalidArgumentError, OutOfRangeError
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2

_METRICS = Argument("metrics")
_LOOK_SECONDS = 0.5
"""The pause of an evaluator that waits for a version before it asks again whether it is to stop."""


def as_metrics(metrics: Any) -> dict[str, float]:
    """Returns metrics as they are sent: numbers by name.

    Raises:
        InvalidArgumentError: They are something else.
    """
    return {
        name: as_number(value, Argument(f"metrics[{described(name)}]"))
        for name, value in as_mapping(metrics, _METRICS).items()
    }


class EvaluationsWire(ContributionWire):
    """The calls about what was measured of versions."""

    def report(
        self, metrics: Mapping[str, SupportsFloat], how: Contribution, request_id: int | None
    ) -> Operation[ReportResult]:
        """Stores what the caller has measured of the version of a step."""
        call = self._call(request_id)
        plain = {"step": how.local_step, "weight": how.weight, "worker_id": self._worker_id(how)}
        fields = plain_fields(messages_pb2.ReportEvaluationRequest, plain)
        request = messages_pb2.ReportEvaluationRequest(**fields, metrics=as_metrics(metrics))
        self._address(request, call)
        try:
            with fields_named():
                reply: messages_pb2.ReportEvaluationResponse = yield self._unary("ReportEvaluation", request)
        except GradserveError as error:
            self._identify(error, call)
            raise
        found = reply.evaluation
        return ReportResult(
            OUTCOMES[reply.outcome], found.step, metrics_of(found.metrics), found.num_reports, reply.duplicate
        )

    def evaluations(self, since: int | None = None) -> Operation[list[Evaluation]]:
        """Returns what was measured of versions of later steps, by step; None for all that is kept."""
        found: list[Evaluation] = []
        if since is not None:
            since = as_integer(since, Argument("since"))
        while True:
            request = messages_pb2.ListEvaluationsRequest(parameters=self._checked_ref(), since=since)
            reply: messages_pb2.ListEvaluationsResponse = yield self._unary("ListEvaluations", request)
            found += map(evaluation_of, reply.evaluations)
            if not (reply.has_more and reply.evaluations):
                return found
            since = reply.evaluations[-1].step


class EvaluatedSteps(NamedTuple):
    """The steps that an evaluator measures: multiples of `every`, and the last one.

    Attributes:
        every: The distance between two steps.
        until: The last step; None for no end.
    """

    every: int
    until: int | None

    @classmethod
    def of(cls, every: Any, until: Any) -> "EvaluatedSteps":
        """Checks the arguments of a call.

        Raises:
            InvalidArgumentError: One of them is not an integer in its range.
        """
        last = None if until is None else as_integer(until, Argument("until"), range(INT64.stop))
        return cls(as_integer(every, Argument("every"), range(1, INT64.stop)), last)

    def after(self, step: int | None) -> int | None:
        """Returns the next step after one, the first one for None; None if there is none."""
        if step is None:
            return 0
        following = (step // self.every + 1) * self.every
        if self.until is None:
            return following
        return min(following, self.until) if step < self.until else None


Read = Callable[[int | None, float], Operation[Version]]
"""Reads the version of a step, for which it waits for so many seconds; None for the newest."""
Evaluate = Callable[[Version], Mapping[str, SupportsFloat]]


def evaluate(
    wire: EvaluationsWire,
    read: Read,
    measure: Evaluate,
    steps: EvaluatedSteps,
    how: Contribution,
    stop: Callable[[], bool] | None,
) -> Operation[int]:
    """Measures versions and reports what it finds; returns how many it has measured.

    Args:
        wire: Reports.
        read: Reads versions.
        measure: Measures one.
        steps: The steps of the versions.
        how: The weight and the sender of all reports.
        stop: Returns True to end the loop; None for never.
    """
    for name, function in (("fn", measure), ("stop", stop)):
        if function is not None and not callable(function):
            raise Argument(name).error("a function", function)
    known = yield from wire.evaluations()
    done = [each.step for each in known if how.worker_id in each.worker_ids]
    due, count = steps.after(max(done, default=None)), 0
    while due is not None and not (stop is not None and stop()):
        try:
            version = yield from read(due, math.inf if stop is None else _LOOK_SECONDS)
        except DeadlineExceededError:
            continue
        except OutOfRangeError:
            version = yield from read(None, 0.0)  # it came too late for that one
        if steps.until is not None and version.step > steps.until:
            break
        metrics = yield Work(partial(_measured, measure, version))
        yield from wire.report(metrics, how._replace(local_step=version.step), None)
        due, count = steps.after(version.step), count + 1
    return count


def _measured(measure: Evaluate, version: Version) -> dict[str, float]:
    found = measure(version)
    if not isinstance(found, Mapping) or not found:
        raise InvalidArgumentError(
            f"expected fn to return metrics by name, at least one, got {described(found)}", field="fn"
        )
    return as_metrics(found)
