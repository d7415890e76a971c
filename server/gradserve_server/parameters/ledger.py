"""The ledger of parameters: which updates count with which weight, when rounds end, and by which rules."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gradserve_server.accumulators.gradient import Contribution, Gradient, Metrics
from gradserve_server.accumulators.identity import CallMemory, RequestId, owner_of
from gradserve_server.accumulators.incoming import check_weight
from gradserve_server.accumulators.ledger import Answer, Event, GradientAnswered, Ledger, OtherChange, RoundEnded, Taken
from gradserve_server.accumulators.rounds import Applied, Outcome, Pushed, Round
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.closing import Closer, Reason
from gradserve_server.parameters.metrics import Evaluation, Evaluations, Report, mean_metrics, metrics_bytes
from gradserve_server.parameters.record import Refusal, RoundUpdate
from gradserve_server.parameters.spec import ParametersSpec, Rules

_REFUSALS = {Outcome.STALE: "stale", Outcome.ALREADY_COUNTED: "already counted"}
LOADED = "loaded"
"""The reason in `WeightLedger.refused` for updates that were accepted, and dropped when other values were loaded."""
_MOST_REFUSALS = 1000
_MEASUREMENT_BYTES, _DISTANCE_BYTES, _TERM_BYTES = 200, 150, 32
"""The measured memory of a measurement, of each distance in it, and of each term of that."""
_LOOKS_PER_LEASE = 4


@dataclass(frozen=True, slots=True)
class UpdateAnswered(GradientAnswered):
    """The decision on an update. The weight of its contribution is the one that counts.

    Attributes:
        at: The time; see `UpdateLedger.now`.
        weight_asked: The weight that its sender asked for; of a sum, the sum of these.
        staleness: The number of versions made since the one from which it was computed.
        num_bytes: The size of its values; of a sum, the size of each update.
    """

    at: float = 0.0
    weight_asked: float = 1.0
    staleness: int = 0
    num_bytes: int = 0

    @property
    def updates(self) -> list["SingleUpdate"]:
        """The update, or all updates of a sum."""
        contribution = self.contribution
        if not contribution.sum_of:
            one = contribution
            return [SingleUpdate(self.call, one.worker_id, self.weight_asked, one.weight, one.metrics)]
        return [
            SingleUpdate(each.call, each.worker_id, each.weight, each.weight * contribution.discount, each.metrics)
            for each in contribution.sum_of
        ]


class SingleUpdate(NamedTuple):
    """An update that came by itself or in a sum: its call, its worker, the weights asked for and given, and metrics."""

    call: RequestId | None
    worker_id: str
    weight_asked: float
    weight: float
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class StepTaken(RoundEnded):
    """The end of the current round.

    Attributes:
        at: The time; see `UpdateLedger.now`.
        reason: Why it ended.
        end_time: The nanoseconds since 1970.
        apply_seconds: The time that the optimizer took in the previous round.
    """

    at: float = 0.0
    reason: Reason = "required"
    end_time: int = 0
    apply_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RulesChanged(OtherChange):
    """Other rules, from the next round on.

    Attributes:
        call: The id of the call that brought them, if it has one.
        rules: The rules.
        at: The time; see `UpdateLedger.now`.
    """

    call: RequestId | None
    rules: Rules
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationReported(OtherChange):
    """The report of somebody who has measured a version.

    Attributes:
        call: The id of the call that brought it, if it has one.
        step: See `Report`, as for all that follow.
        metrics: The metrics.
        weight: The weight in the means.
        worker_id: The sender.
    """

    call: RequestId | None
    step: int
    metrics: Metrics
    weight: float
    worker_id: str

    @property
    def report(self) -> Report:
        """The report."""
        return Report(self.step, self.metrics, self.weight, self.worker_id)


@dataclass(frozen=True, slots=True)
class VersionLoaded(RoundEnded):
    """A saved version has become the newest one. The updates of the round were dropped, as stale.

    Attributes:
        at: The time; see `UpdateLedger.now`.
        step: Its step.
        rules: The rules from now on.
    """

    at: float = 0.0
    step: int = 0
    rules: Rules | None = None


@dataclass(frozen=True, slots=True)
class Participation:
    """The live workers at the end of a round: those in it, and others of the two rounds before with a live client.

    Attributes:
        num_counted: The number of workers with an update in the round.
        num_live: The number of live workers.
    """

    num_counted: int
    num_live: int


@dataclass
class WeightLedger:
    """The whereabouts of the weight of all updates: accepted = applied + pending + dropped.

    Attributes:
        accepted: The weight of all updates that counted when they came.
        applied: That of those that are in versions.
        pending: That of those in the current round.
        refused: The weight that was asked for by updates that did not count, by reason. "loaded" is that of updates
            that were accepted, and dropped when other values were loaded.
    """

    accepted: float = 0.0
    applied: float = 0.0
    pending: float = 0.0
    refused: dict[str, float] = field(default_factory=dict)

    @property
    def dropped(self) -> float:
        """The weight of updates that were accepted, and dropped when other values were loaded."""
        return self.refused.get(LOADED, 0.0)

    def refuse(self, reason: str, weight: float) -> None:
        """Counts a weight that does not count."""
        self.refused[reason] = self.refused.get(reason, 0.0) + weight


class UpdateLedger(Ledger):
    """Decides which updates count, with which weight, and when a round ends; and remembers the decisions.

    Attributes:
        closer: Decides when a round ends.
        round_rules: The rules of the current round.
        next_rules: Those of the next one.
        updates: The updates of the current round, in order of arrival.
        refusals: The latest updates that were refused meanwhile.
        weights: Where all weights went.
        ended: The decision that ended the latest round; None before the first.
        participation: The share of workers in that round; None before the first, and if no worker in it has an id.
        metrics: The means of the metrics of that round; empty before the first one of this run of the server.
        evaluations: What was measured of versions.
    """

    def __init__(
        self,
        calls: CallMemory[Answer],
        spec: ParametersSpec,
        clock: Callable[[], float] = lambda: 0.0,
        wall_clock: Callable[[], int] = lambda: 0,
        lease_seconds: float = 0.0,
        has_worker: Callable[[str], bool] = lambda _client_id: False,
    ) -> None:
        """Begins with an empty round.

        Args:
            calls: An empty memory of calls.
            spec: The properties of the parameters.
            clock: The seconds of any clock, for the end of rounds.
            wall_clock: The nanoseconds since 1970, for their records.
            lease_seconds: The seconds of silence after which a client without a lease is no longer there.
            has_worker: Returns True if a worker has a lease, by the client in the ids of its calls.
        """
        super().__init__(calls)
        self._spec = spec
        self._clock = clock
        self.closer = Closer(spec.rules.rounds, 0.0)
        self._offset = clock()
        """The time of the clock minus that of the closer."""
        self.round_rules = self.next_rules = spec.rules
        self.updates: list[RoundUpdate] = []
        self.refusals: deque[Refusal] = deque(maxlen=_MOST_REFUSALS)
        self.weights = WeightLedger()
        self.ended: StepTaken | None = None
        self.participation: Participation | None = None
        self.metrics: Mapping[str, float] = {}
        self.evaluations = Evaluations(spec.keep_rounds + 1)
        self._metrics_bytes = self._measured_bytes = 0
        self.reason: Reason = "required"
        """Why the next round ends, as the closer has decided."""
        self.apply_seconds = 0.0
        """The time that the optimizer took in the latest round."""
        self.wall_clock = wall_clock
        """The nanoseconds since 1970."""
        self._lease_seconds = lease_seconds
        self._has_worker = has_worker
        self._clients: dict[str, str] = {}
        """The client of each worker of the latest rounds."""

    @property
    def now(self) -> float:
        """The seconds for which the parameters have been served, by this run of the server and earlier ones.

        They never decrease, as replayed events must find the closer at the times at which they came.
        """
        now = self._clock() - self._offset
        if now < self.closer.latest:
            self.resume()
            return self.closer.latest
        return now

    def judge(
        self,
        call: RequestId | None,
        contribution: Contribution,
        gradient: Gradient,
        *,
        one_per_worker: bool,
        awaits_average: bool,
    ) -> UpdateAnswered:
        """Returns the decision on an update, as of now.

        Raises:
            InvalidArgumentError: It was computed from a version that does not exist; or its weight is too small
                once it counts less for its staleness.
        """
        step = self.rounds.global_step
        staleness = step - contribution.local_step
        if contribution.local_step < 0:
            raise InvalidArgumentError(
                f"expected a local_step of at least 0, the step of the first version, got {contribution.local_step}",
                field="local_step",
            )
        if staleness < 0:
            raise InvalidArgumentError(
                f"expected a local_step of at most {step}, the step of the newest version, got "
                f"{contribution.local_step}",
                field="local_step",
            )
        outcome = Outcome.ACCEPTED
        if self._spec.staleness.is_stale(staleness) and (not contribution.was_accepted or self._spec.num_shards):
            outcome = Outcome.STALE
        elif one_per_worker and not self._has_new_workers(contribution):
            outcome = Outcome.ALREADY_COUNTED
        counted = contribution
        if outcome is Outcome.ACCEPTED:
            # One that was accepted and lost with its server may be too stale by now. (Not of sharded parameters: their
            # servers forget updates that are too stale.)
            factor = self._spec.staleness.factor(min(staleness, self._spec.staleness.max))
            if factor < 1.0:
                counted = contribution.discounted(factor)
                for index, each in enumerate(counted.sum_of):
                    check_weight(self._spec.updates, each.weight * factor, f"sum_of[{index}].weight")
                check_weight(self._spec.updates, counted.weight, "weight")
        return UpdateAnswered(
            call,
            counted,
            outcome,
            awaits_average,
            at=self.now,
            weight_asked=contribution.weight,
            staleness=staleness,
            num_bytes=gradient.nbytes if not contribution.sum_of else self._size_of_each(gradient),
        )

    def _size_of_each(self, total: Gradient) -> int:
        """Returns the size of each update of a sum, as its worker has sent it."""
        components = self._spec.by_name
        return sum([value.size * components[name].dtype.itemsize for name, value in total.dense.items()])

    def ending(self, call: RequestId | None) -> StepTaken:
        """Returns the decision to end the round, as of now."""
        self.ended = StepTaken(
            at=self.now, reason=self.reason, end_time=self.wall_clock(), apply_seconds=self.apply_seconds
        )
        num_counted = len(self.closer.came)
        num_live = num_counted + sum(map(self.is_alive, self.closer.missing))
        self.participation = Participation(num_counted, num_live) if num_counted else None
        return self.ended

    def applied(self) -> None:
        """Notes that the optimizer has made the version of the round that is about to end."""
        assert self.ended is not None, "the round is about to end"
        self.apply_seconds = max(self.now - self.ended.at, 0.0)

    def answer(self, event: GradientAnswered) -> Applied:
        """Applies the decision on an update; returns the answer to its call."""
        assert isinstance(event, UpdateAnswered)
        applied = super().answer(event)
        if event.outcome is not Outcome.ACCEPTED:
            reason = _REFUSALS[event.outcome]
            for each in event.updates:
                self.weights.refuse(reason, each.weight_asked)
                self.refusals.append(Refusal(each.worker_id, each.weight_asked, reason))
            return applied
        for each in event.updates:
            self.weights.accepted += each.weight
            self.weights.pending += each.weight
            plain = (each.worker_id, each.weight_asked, each.weight, event.staleness, event.num_bytes)
            self.updates.append(RoundUpdate(*plain, metrics=each.metrics))
            self._metrics_bytes += metrics_bytes(each.metrics)
            if each.call is not None and each.worker_id:
                self._clients[each.worker_id] = each.call.client_id
        self._measured_bytes += _measured_bytes(event.contribution)
        self.closer.admit(event.at, event.contribution.workers, self.rounds.members.count)
        return applied

    def _applied(self, event: GradientAnswered, joined: Round | None) -> Pushed:
        assert isinstance(event, UpdateAnswered)
        plain = super()._applied(event, joined)
        weight = event.contribution.weight if event.outcome is Outcome.ACCEPTED else 0.0
        return Pushed(**vars(plain), staleness=event.staleness, weight=weight)

    def _answers(self, event: GradientAnswered, applied: Applied) -> Iterable[tuple[RequestId | None, Applied]]:
        """Returns the calls that an event answers; those of a sum each get their own weight."""
        assert isinstance(event, UpdateAnswered)
        assert isinstance(applied, Pushed)
        yield event.call, applied
        if event.contribution.sum_of:
            is_counted = event.outcome is Outcome.ACCEPTED
            for each in event.updates:
                yield each.call, replace(applied, weight=each.weight if is_counted else 0.0)

    def end_round(self, event: RoundEnded) -> Round:
        """Ends the round; returns it."""
        pending = self.weights.pending
        if isinstance(event, VersionLoaded):
            if self.rounds.current.number:  # the first values begin no interval
                self.closer.drop(event.at)
            if pending:
                self.weights.refuse(LOADED, pending)
            if event.rules is not None:
                self.next_rules = event.rules
                self.closer.change(event.rules.rounds)
        else:
            assert isinstance(event, StepTaken)
            self.weights.applied += pending
            self.metrics = {}
            if self._metrics_bytes:
                self.metrics = mean_metrics([(each.weight, each.metrics) for each in self.updates])
            self.closer.end(event.at, event.apply_seconds)
        self.weights.pending = 0.0
        ended = super().end_round(event)
        if isinstance(event, VersionLoaded):
            self.rounds.global_step = event.step
            ended.step = event.step
        self.updates, self._metrics_bytes, self._measured_bytes = [], 0, 0
        self.round_rules = self.next_rules
        self.refusals.clear()
        known = {*self.rounds.missing_workers, *self.rounds.members.workers}
        if len(self._clients) > 4 * len(known) + 64:
            self._clients = {worker: client for worker, client in self._clients.items() if worker in known}
        return ended

    def change_rules(self, event: RulesChanged) -> None:
        """Sets the rules of the next round; those of a round that has no updates yet change at once."""
        self.calls.remember(event.call, Taken(self.rounds.current))
        self.next_rules = event.rules
        self.closer.change(event.rules.rounds)
        if not self.updates:
            self.round_rules = event.rules

    def add_report(self, event: EvaluationReported) -> Evaluation:
        """Adds what somebody has measured of a version; returns the evaluation of that."""
        self.calls.remember(event.call, Taken(self.rounds.current))
        return self.evaluations.add(event.report)

    @property
    def num_named(self) -> int:
        """The number of workers whose ids are kept, and of updates without one, which are kept for the record."""
        return super().num_named + self.rounds.members.num_nameless

    @property
    def other_bytes(self) -> int:
        """The memory of metrics and measurements of the round, and of evaluations."""
        return self._metrics_bytes + self._measured_bytes + self.evaluations.num_bytes

    def other_bytes_of(self, contribution: Contribution) -> int:
        """Returns the memory of the metrics of an update, or of all updates of a sum, and of measurements."""
        of_sum = sum([metrics_bytes(each.metrics) for each in contribution.sum_of])
        return metrics_bytes(contribution.metrics) + of_sum + _measured_bytes(contribution)

    def num_new(self, contribution: Contribution) -> int:
        """Returns by how much `num_named` grows if an update is accepted."""
        return super().num_new(contribution) + sum([not worker_id for worker_id in contribution.workers])

    def replay(self, event: Event) -> None:
        """Applies an event, without an answer."""
        if isinstance(event, RulesChanged):
            self.change_rules(event)
        elif isinstance(event, EvaluationReported):
            self.add_report(event)
        else:
            super().replay(event)

    def is_alive(self, worker_id: str) -> bool:
        """Returns True if the client of a worker of the latest rounds is there: it has a lease, or was heard of."""
        client = self._clients.get(worker_id)
        if client is None:
            return False
        return self._has_worker(owner_of(client)) or self.calls.is_heard_of(client, self._lease_seconds)

    def next_look(self, until: float) -> float:
        """Returns the time to ask the closer again, at the latest `until`: leases of expected workers end unnoticed."""
        if self.closer.rules.expected != "alive" or not self._lease_seconds:
            return until
        return min(until, self.now + self._lease_seconds / _LOOKS_PER_LEASE)

    def resume(self) -> None:
        """Goes on with the clock, after all events of an earlier run have been applied: no time has passed."""
        self._offset = self._clock() - self.closer.latest

    def restore_updates(self, updates: Iterable[RoundUpdate]) -> None:
        """Sets the updates of the round, as an earlier run of the server left them."""
        self.updates = list(updates)
        self._metrics_bytes = sum([metrics_bytes(each.metrics) for each in self.updates])
        self._measured_bytes = sum(map(_measured_bytes, self.rounds.members.held))

    @property
    def clients(self) -> Mapping[str, str]:
        """The client of each worker of the latest rounds."""
        return self._clients

    def know_clients(self, clients: Mapping[str, str]) -> None:
        """Sets the clients of workers, as an earlier run of the server left them."""
        self._clients = dict(clients)


def _measured_bytes(contribution: Contribution) -> int:
    measured = contribution.measured
    distances = [terms for each in measured for terms in each.squared_distances.values()]
    num_terms = sum(map(len, distances))
    return _MEASUREMENT_BYTES * len(measured) + _DISTANCE_BYTES * len(distances) + _TERM_BYTES * num_terms
