"""The rounds and evaluations of an accumulator or of parameters, as a server tells them to `gradserve export`."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import click

from gradserve_protocol.server_status import AccumulatorStatus, ArrivalStatus, RoundStatus
from gradserve_server.commands.parameters import opened
from gradserve_server.commands.servers import ACCUMULATORS, one_of, status_about

if TYPE_CHECKING:
    import gradserve
    from gradserve.parameter_records import RoundRecord, RoundUpdate

    Connect: TypeAlias = Callable[[], AbstractContextManager[gradserve.Client]]

_SAME_SECONDS = 60.0
"""Two rounds with one step that ended less than this apart, by the clocks of two machines, are one round."""


@dataclass(frozen=True)
class Subject:
    """The accumulator or the parameters that are exported.

    Attributes:
        kind: "accumulator" or "parameters".
        container: The container.
        name: The name.
        incarnation: The id that distinguishes it from a later one of the same name.
    """

    kind: str
    container: str
    name: str
    incarnation: str

    @property
    def title(self) -> str:
        """The kind and the full name, for messages."""
        return f"{self.kind} {self.container}/{self.name}"

    @property
    def run_id(self) -> str:
        """The same 16 hexadecimal digits for every export of this incarnation."""
        text = "\0".join((self.kind, self.container, self.name, self.incarnation))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Gradient:
    """A gradient or an update that was in time for its round. What the server does not know, or no longer, is None.

    Attributes:
        worker_id: The sender's id; empty for none.
        after: Seconds after the first gradient of the round.
        waited: Seconds that the round had all gradients but this one, which came last.
        weight: The weight that counted.
        staleness: The number of versions made since the one from which it was computed.
        norm: Its L2 norm.
        cosine: The cosine of the angle to the reduced update.
        num_bytes: Its size.
        dropped: Whether the reduction left it out.
        metrics: What its worker has measured, by name.
    """

    worker_id: str
    after: float | None = None
    waited: float | None = None
    weight: float | None = None
    staleness: int | None = None
    norm: float | None = None
    cosine: float | None = None
    num_bytes: int | None = None
    dropped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LateGradient:
    """A gradient that was refused while a round was open.

    Attributes:
        worker_id: The sender's id; empty for none.
        reason: "stale" or "already counted".
    """

    worker_id: str
    reason: str


@dataclass(frozen=True)
class Round:
    """A round that has ended. What the server does not know, or no longer, is None.

    Attributes:
        step: The step that it led to.
        ended: When it ended, in seconds since 1970.
        seconds: From its first gradient to its end.
        step_seconds: From the end of the round before to its end.
        apply_seconds: Seconds that the optimizer took.
        num_counted: The number of gradients in it.
        num_required: The number of gradients that it needed.
        reason: Why a round of parameters ended; empty for accumulators.
        learning_rate: The learning rate that counted.
        metrics: The means of what workers have measured, by name.
        gradients: Its gradients.
        late: The gradients that were refused while it was open.
        missing: The workers of the round before that are not in this one.
    """

    step: int
    ended: float
    seconds: float | None = None
    step_seconds: float | None = None
    apply_seconds: float | None = None
    num_counted: int = 0
    num_required: int | None = None
    reason: str = ""
    learning_rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    gradients: tuple[Gradient, ...] = ()
    late: tuple[LateGradient, ...] = ()
    missing: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a version of parameters.

    Attributes:
        step: The step of the version.
        metrics: The means of all reports so far, by name.
    """

    step: int
    metrics: Mapping[str, float]

    def equals(self, other: "Evaluation | None") -> bool:
        """Returns whether another one has the same metrics; NaN equals NaN."""
        return other is not None and repr(sorted(self.metrics.items())) == repr(sorted(other.metrics.items()))


@dataclass(frozen=True)
class Mark:
    """The last round of an export.

    Attributes:
        step: Its step.
        ended: When it ended, in seconds since 1970.
    """

    step: int
    ended: float


@dataclass(frozen=True)
class Look:
    """The rounds and evaluations that a server keeps.

    Attributes:
        subject: What they are of.
        rounds: The rounds, oldest first.
        evaluations: The evaluations, by step.
    """

    subject: Subject
    rounds: tuple[Round, ...]
    evaluations: tuple[Evaluation, ...] = ()

    def after(self, last: Mark | None) -> tuple[Sequence[Round], int]:
        """Returns the rounds after one, and the number of rounds between that are no longer kept.

        The step of an accumulator can be set back. Then steps come twice; the times of their rounds tell them apart.

        Args:
            last: The round; None for the beginning.
        """
        if last is None:
            return self.rounds, 0
        same = [at for at, each in enumerate(self.rounds) if each.step == last.step]
        nearest = min(same, key=lambda at: abs(self.rounds[at].ended - last.ended), default=None)
        if nearest is not None and abs(self.rounds[nearest].ended - last.ended) < _SAME_SECONDS:
            return self.rounds[nearest + 1 :], 0
        later = [each for each in self.rounds if each.ended > last.ended]
        return later, max(later[0].step - last.step - 1, 0) if later else 0


class Source:
    """Looks at the rounds of an accumulator or of parameters, again and again.

    Asks for records only if something has changed: that counts as a use, and would keep idle parameters alive.
    """

    def __init__(self, kind: str, container: str, name: str, *, with_workers: bool = True) -> None:
        """Takes the name of the resource.

        Args:
            kind: `ACCUMULATORS` or `PARAMETERS`.
            container: The container.
            name: The name.
            with_workers: Whether rounds have gradients, each with its worker.
        """
        self._kind = kind
        self._container = container
        self._name = name
        self._with_workers = with_workers
        self._latest: tuple[object, Look] | None = None

    @property
    def title(self) -> str:
        """The kind and the full name, for messages."""
        return f"{one_of(self._kind)} {self._container}/{self._name}"

    def home(self, num_servers: int) -> int:
        """Returns the index of the server that has it, of several in their order."""
        if num_servers == 1:
            return 0
        from gradserve_protocol.placement import home_of  # not before silence_grpc: it imports gRPC

        return home_of(self._container, self._name, num_servers)

    def look(self, client: "gradserve.Client", connect: "Connect", since: int) -> Look | None:
        """Returns what the server keeps now; None if there is no such thing.

        Args:
            client: A client of its home.
            connect: Connects to all servers, which is needed for sharded parameters.
            since: The last step of which nothing needs to be known.

        Raises:
            GradserveError: The server does not answer.
            click.ClickException: The parameters are private to a client.
        """
        found = self._accumulator(client) if self._kind == ACCUMULATORS else self._parameters(client, connect, since)
        if found is None or self._with_workers:
            return found
        return replace(found, rounds=tuple(replace(each, gradients=()) for each in found.rounds))

    def _accumulator(self, client: "gradserve.Client") -> Look | None:
        before = self._incarnation(client)
        status = status_about(client, self._container, self._name)
        seen = next((each for each in status.accumulators if each.name == self._name), None)
        started = time.time() - status.uptime
        if before is None or seen is None or self._incarnation(client) != before:
            return None
        subject = Subject(one_of(self._kind), self._container, self._name, before)
        return Look(subject, rounds_of_accumulator(seen, started))

    def _incarnation(self, client: "gradserve.Client") -> str | None:
        found = (each.incarnation for each in client.list_accumulators(self._container) if each.name == self._name)
        return next(found, None)

    def _parameters(self, client: "gradserve.Client", connect: "Connect", since: int) -> Look | None:
        import gradserve

        info = next((each for each in client.list_parameters(self._container) if each.name == self._name), None)
        if info is None:
            return None
        if info.is_private:
            raise click.ClickException(f"{self.title} are private to a client, and have no records for others")
        status = status_about(client, self._container, self._name)
        seen = next((each for each in status.parameters if each.name == self._name), None)
        state = (info.incarnation, info.step, repr(seen.evaluations) if seen else "")
        if self._latest is not None and self._latest[0] == state:
            return self._latest[1]
        try:
            with connect() if info.num_shards else nullcontext(client) as whole:
                look = self._records(client, opened(whole, info), info.incarnation, since)
        except gradserve.NotFoundError:
            return None
        self._latest = (state, look) if look is not None else None
        return look

    def _records(
        self, client: "gradserve.Client", found: "gradserve.Parameters", incarnation: str, since: int
    ) -> Look | None:
        records = found.rounds(max(since - 1, 0))  # with the one before, for step_seconds
        evaluations = tuple(Evaluation(each.step, each.metrics) for each in found.evaluations())
        status = status_about(client, self._container, self._name)  # after the records: it has the times of all of them
        recent = next((each.rounds for each in status.parameters if each.name == self._name), ())
        if found.info().incarnation != incarnation:
            return None
        subject = Subject(one_of(self._kind), self._container, self._name, incarnation)
        return Look(subject, rounds_of_parameters(records, recent), evaluations)


def rounds_of_accumulator(status: AccumulatorStatus, started: float) -> tuple[Round, ...]:
    """Returns the rounds of an accumulator that have ended.

    A gradient that was too late counts as late in the round that was open when it arrived.

    Args:
        status: The status.
        started: When the server started, in seconds since 1970.
    """
    ended = [each for each in status.rounds if each.ended]
    arrivals = [(each.began + late.after, late) for each in ended for late in each.arrivals if late.stale]
    late: dict[int, list[LateGradient]] = defaultdict(list)
    for arrived, each in sorted(arrivals, key=lambda arrival: arrival[0]):
        at = next((at for at, round_ in enumerate(ended) if round_.ended >= arrived), None)
        if at is not None:
            late[at].append(LateGradient(each.worker_id, "stale"))
    rounds = [
        Round(
            step=each.step,
            ended=started + each.ended,
            seconds=each.ended - each.began,
            num_counted=sum(not arrival.stale for arrival in each.arrivals),
            num_required=each.num_required,
            gradients=_arrived(each),
            late=tuple(late[at]),
            missing=each.missing,
        )
        for at, each in enumerate(ended)
    ]
    return _with_step_seconds(rounds)


def rounds_of_parameters(records: "Sequence[RoundRecord]", recent: Sequence[RoundStatus]) -> tuple[Round, ...]:
    """Returns the rounds of parameters.

    Args:
        records: Their records.
        recent: The latest of these rounds, in which the times of updates are known.
    """
    timed = {each.step: each for each in recent if each.ended}
    return _with_step_seconds([_of_record(each, timed.get(each.step)) for each in records])


def _of_record(record: "RoundRecord", timed: RoundStatus | None) -> Round:
    arrivals: dict[str, list[Gradient]] = defaultdict(list)
    for each in _arrived(timed) if timed is not None else ():
        arrivals[each.worker_id].append(each)
    return Round(
        step=record.step,
        ended=record.end_time,
        seconds=timed.ended - timed.began if timed is not None else None,
        apply_seconds=timed.apply_seconds if timed is not None else None,
        num_counted=len(record.updates),
        num_required=timed.num_required if timed is not None else None,
        reason=record.reason,
        learning_rate=record.lr,
        metrics=record.metrics,
        gradients=tuple(_of_update(each, arrivals[each.worker_id]) for each in record.updates),
        late=tuple(LateGradient(each.worker_id, each.reason) for each in record.refusals),
        missing=timed.missing if timed is not None else None,
    )


def _of_update(update: "RoundUpdate", arrivals: list[Gradient]) -> Gradient:
    arrived = arrivals.pop(0) if arrivals else None
    return Gradient(
        worker_id=update.worker_id,
        after=arrived.after if arrived is not None else None,
        waited=arrived.waited if arrived is not None else None,
        weight=update.weight,
        staleness=update.staleness,
        norm=update.norm,
        cosine=update.cosine,
        num_bytes=update.num_bytes,
        dropped=update.dropped,
        metrics=update.metrics,
    )


def _arrived(described: RoundStatus) -> tuple[Gradient, ...]:
    in_time = [each for each in described.arrivals if not each.stale]
    return tuple(Gradient(each.worker_id, each.after, _waited(in_time, at)) for at, each in enumerate(in_time))


def _waited(arrivals: Sequence[ArrivalStatus], at: int) -> float | None:
    is_last = 0 < at == len(arrivals) - 1
    return arrivals[at].after - arrivals[at - 1].after if is_last else None


def _with_step_seconds(rounds: Sequence[Round]) -> tuple[Round, ...]:
    timed = [replace(each, step_seconds=each.ended - before.ended) for before, each in pairwise(rounds)]
    return (*rounds[:1], *timed)
