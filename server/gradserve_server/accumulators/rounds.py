"""Rounds: their members, steps and outcomes, the rule by which one ends, the gate that holds them, their observers."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from gradserve_server.accumulators.gradient import Contribution, DifferentWorker
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError, ServiceError


class Wording(NamedTuple):
    """The words of messages for a resource that works in rounds, for what comes in, and for what comes out."""

    kind: str = "accumulator"
    item: str = "gradient"
    result: str = "average"


OF_ACCUMULATORS = Wording()
NOT_FINITE = "GS_NOT_FINITE"
"""The code of the error about a gradient with infinite values or NaN."""


@dataclass(eq=False)
class Round:
    """The time between two takes. Calls keep references to their rounds, so a round has none to its members.

    Attributes:
        number: The number of the round. Steps may repeat if they are set back; numbers do not.
        step: The global_step that the round led to; None while it is open, and if it was dropped.
        is_dropped: Whether it has ended without an average, and its gradients do not count.
    """

    number: int = 0
    step: int | None = None
    is_dropped: bool = False


@dataclass
class Members:
    """The contributions of a round. They are counted, not kept.

    Attributes:
        count: Their number.
        total_weight: The sum of their weights, in order of arrival.
        num_nameless: The number of those without a worker_id.
        workers: The ids of their workers, each once, in order of arrival, without empty ones.
        held: In a sharded accumulator, the contributions themselves, in order of arrival.
        epoch: There, the epoch of the first of them; None before that.
        digests: The digests of the parameters of workers at the step of the round, in order of arrival.
    """

    count: int = 0
    total_weight: float = 0.0
    num_nameless: int = 0
    workers: dict[str, None] = field(default_factory=dict)
    held: list[Contribution] = field(default_factory=list)
    epoch: int | None = None
    digests: dict[str, bytes] = field(default_factory=dict)

    def add(self, contribution: Contribution) -> None:
        """Adds a contribution."""
        senders = contribution.workers
        self.count += len(senders)
        self.total_weight += contribution.weight
        for worker_id in senders:
            if worker_id:
                self.workers[worker_id] = None
            else:
                self.num_nameless += 1
        if contribution.part:
            self.held.append(contribution)


KEPT_ROUNDS = 20
"""The last rounds of an accumulator that are kept for its status."""


@dataclass(frozen=True, slots=True)
class SeenRound:
    """A round that has ended, for the status of a later run of the server.

    Attributes:
        step: The global_step that it led to.
        ended: When it ended, in seconds since 1970.
        seconds: How long it took, from its first gradient on.
        num_required: The number of gradients that it needed.
        workers: The ids of its gradients' senders in order of arrival; "" for a sender without an id.
        after: When these gradients arrived, in seconds after the first.
    """

    step: int
    ended: float
    seconds: float
    num_required: int
    workers: tuple[str, ...]
    after: tuple[float, ...]


class Comparison:
    """Compares the parameters of the workers of a round by digests.

    The digest of most workers is taken for the right one; among digests of equally many, the first that came of a
    worker that was right before.

    Attributes:
        step: The step of the latest comparison, a round with two digests or more; None before the first.
        num_workers: The number of workers that it compared.
        different: Its workers with another digest than most.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.num_workers = 0
        self.different: tuple[DifferentWorker, ...] = ()
        self._different_since: dict[str, int] = {}
        """For each of these, the step of the first of the comparisons in which it has always been different."""
        self._equal_at: dict[str, int] = {}
        """The latest step at which each worker of the latest comparison had the digest of most."""

    def compared(self, digests: Mapping[str, bytes]) -> tuple[DifferentWorker, ...]:
        """Returns the workers of a round whose digests are not that of most."""
        if len(digests) < 2:
            return ()
        counts = Counter(digests.values())
        wrong_before = {each.worker_id for each in self.different}
        in_order = sorted(digests, key=lambda worker_id: worker_id in wrong_before)
        most = max([digests[worker_id] for worker_id in in_order], key=counts.__getitem__)
        return tuple(
            [
                DifferentWorker(worker_id, self._equal_at.get(worker_id))
                for worker_id, digest in digests.items()
                if digest != most
            ]
        )

    def end_round(self, step: int, digests: Mapping[str, bytes]) -> None:
        """Notes what a round of a step has shown."""
        if len(digests) < 2:
            return
        self.step, self.num_workers = step, len(digests)
        self.different = self.compared(digests)
        since = self._different_since
        others = {each.worker_id for each in self.different}
        self._different_since = {each.worker_id: since.get(each.worker_id, step) for each in self.different}
        before = self._equal_at
        self._equal_at = {
            worker_id: step if worker_id not in others else before[worker_id]
            for worker_id in digests
            if worker_id not in others or worker_id in before
        }

    @property
    def equal_at(self) -> Mapping[str, int]:
        """The latest step at which each worker of the latest comparison had the digest of most."""
        return self._equal_at

    @property
    def different_since(self) -> Mapping[str, int]:
        """For each worker in `different`, the step of the first of the comparisons in which it always was."""
        return self._different_since

    def restore(
        self, different: Iterable[DifferentWorker], equal_at: Mapping[str, int], different_since: Mapping[str, int]
    ) -> None:
        """Goes on from the state that an earlier run of the server left.

        Args:
            different: See there.
            equal_at: See there.
            different_since: See there; without workers that differ since the latest comparison or a forgotten one.
        """
        self.different, self._equal_at = tuple(different), dict(equal_at)
        others = [each.worker_id for each in self.different]
        # Whoever does not differ was equal at the step of the latest comparison, and there always is somebody.
        self.step = next((step for worker_id, step in equal_at.items() if worker_id not in others), None)
        self.num_workers = len(self._equal_at.keys() | set(others))
        if self.step is not None:
            self._different_since = {each: different_since.get(each, self.step) for each in others}


class Rounds:
    """Decides which contributions are stale, which are in a round, and which step a round leads to.

    Uses no arithmetic on gradients, no waiting and no clock. Several servers of one accumulator would have to agree on
    this state alone.
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.epoch = 0
        """Increases whenever the step is set: within an epoch, steps only increase."""
        self.current = Round()
        self.members = Members()
        """The members of the current round."""
        self.all_workers_known = False
        """True if every member of the previous round had a worker_id."""
        self._missing: dict[str, None] = {}
        self.comparison = Comparison()
        """Compares the parameters of the workers."""

    @property
    def num_accumulated(self) -> int:
        """The number of contributions accepted since the last take."""
        return self.members.count

    def is_stale(self, contribution: Contribution) -> bool:
        """Returns True if a contribution is of an earlier step than the current one. Later steps are accepted."""
        return contribution.local_step < self.global_step and not contribution.was_accepted

    def admit(self, contribution: Contribution) -> Round:
        """Adds a contribution to the current round; returns the round."""
        self.members.add(contribution)
        if self.members.epoch is None:
            self.members.epoch = self.epoch
        if contribution.local_step == self.global_step and (digests := contribution.digests):
            self.members.digests |= digests
        for worker_id in contribution.workers:
            self._missing.pop(worker_id, None)
        return self.current

    @property
    def next_step(self) -> int:
        """The step that the current round leads to."""
        # The greatest int64 is followed by the least, as in TensorFlow's own counter.
        return (self.global_step + 1 + (1 << 63)) % (1 << 64) - (1 << 63)

    def close(self) -> Round:
        """Ends the current round and begins the next; returns the ended round, with its step."""
        closed = self.current
        self.comparison.end_round(self.global_step, self.members.digests)
        if self.next_step < self.global_step:
            self.epoch += 1
        self.global_step = self.next_step
        closed.step = self.global_step
        self._begin_round()
        return closed

    def drop(self) -> None:
        """Begins the next round at the same step; the contributions of the current one do not count."""
        self.current.is_dropped = True
        self._begin_round()

    def _begin_round(self) -> None:
        members = self.members
        self.all_workers_known = not members.num_nameless
        self.current, self.members = Round(self.current.number + 1), Members()
        self._missing = members.workers

    def set_global_step(self, step: int) -> None:
        """Sets the step, which begins an epoch; contributions in the round stay in it."""
        self.global_step = step
        self.epoch += 1
        self.members.digests.clear()  # they are of another step

    def expect(self, worker_ids: Iterable[str]) -> None:
        """Sets the missing workers, as an earlier run of the server left them."""
        self._missing = dict.fromkeys(worker_ids)

    @property
    def missing_workers(self) -> Collection[str]:
        """The workers with an id that are in the previous round but not in the current one."""
        return self._missing.keys()


class Outcome(Enum):
    """The outcome of a gradient."""

    ACCEPTED = "ACCEPTED"
    """The gradient is in the round."""
    STALE = "STALE"
    """The gradient was computed at an earlier step than the current one, and dropped."""
    ALREADY_COUNTED = "ALREADY_COUNTED"
    """The round already has a gradient of the same worker; this one was dropped."""


@dataclass(frozen=True)
class Applied:
    """The outcome of a gradient, and the accumulator's state after it.

    Attributes:
        outcome: Whether it counts.
        round: The round that has a gradient of its worker; None if it was stale.
        global_step: The step after it.
        num_accumulated: The number of gradients in the round after it.
    """

    outcome: Outcome
    round: Round | None
    global_step: int
    num_accumulated: int

    def still_counts(self) -> bool:
        """Returns True if a round has a gradient of its worker, and was not dropped since."""
        return self.round is not None and not self.round.is_dropped


@dataclass(frozen=True)
class Pushed(Applied):
    """The outcome of an update of parameters.

    Attributes:
        staleness: The number of versions made since the one from which it was computed.
        weight: The weight that counts; 0 if it was dropped.
    """

    staleness: int = 0
    weight: float = 0.0


@dataclass(frozen=True)
class AccumulatorState:
    """The state of an accumulator at one moment; see AccumulatorInfo in the protos."""

    global_step: int
    epoch: int
    num_accumulated: int
    num_waiting: int
    num_bytes: int
    worker_ids: tuple[str, ...]
    kept_steps: tuple[int, ...]
    different_workers: tuple[DifferentWorker, ...] = ()


_RETRY_SECONDS = 0.5


class RoundGate:
    """The gate of all accumulators of a server: while it is shut, rounds end but none begins.

    Attributes:
        is_shut: Whether rounds are held.
    """

    def __init__(self) -> None:
        """Begins open."""
        self.is_shut = False

    def check(self, num_accumulated: int) -> None:
        """Checks that a gradient may join a round.

        Args:
            num_accumulated: The number of gradients in the round.

        Raises:
            ResourceExhaustedError: The gradient would begin a round. The same call may be sent again.
        """
        if self.is_shut and not num_accumulated:
            raise ResourceExhaustedError(
                "this server holds new rounds, as its cluster is about to change its size: send the gradient again",
                retry_after=_RETRY_SECONDS,
                code="GS_ROUNDS_HELD",
            )


@dataclass(frozen=True, slots=True)
class ClosingRule:
    """Ends a round that has enough gradients.

    Each waiting call brings its rule, and the round ends for the first call in the queue once that call's rule is met.
    It is asked after every change of a round, under the lock of the accumulator, so it decides at once and by its
    arguments alone.

    Attributes:
        num_required: The number of gradients that are enough.

    Raises:
        InvalidArgumentError: It is not positive.
    """

    num_required: int

    def __post_init__(self) -> None:
        if self.num_required <= 0:
            raise InvalidArgumentError(  # TensorFlow's message
                f"Argument num_required must be positive, but was {self.num_required}", field="num_required"
            )

    def is_met(self, members: Members) -> bool:
        """Returns True if a round with these members can end."""
        return members.count >= self.num_required


class Wait(Protocol):
    """A call that waits for other workers."""

    def served(self, step: int) -> None:
        """Called when the call gets the average that led to a step."""
        ...


class AccumulatorObserver(Protocol):
    """Notified after each event of one accumulator. Neither waits nor raises."""

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        """Called when a gradient has been accepted or dropped."""
        ...

    def on_repeat(self) -> None:
        """Called when a repeated call gets the answer of the first."""
        ...

    def on_refusal(self, error: ServiceError) -> None:
        """Called when a gradient was not valid, or there was no memory for it."""
        ...

    def waiting(self) -> AbstractContextManager[Wait]:
        """Returns a context that spans the wait of the current call for other workers."""
        ...

    def about_to_end(self, step: int, num_required: int) -> SeenRound | None:
        """Returns what a durable accumulator keeps of the current round, before it ends; None for nothing."""
        ...

    def on_restore(self, seen: Sequence[SeenRound]) -> None:
        """Called with what an earlier run of the server has kept of the last rounds, the oldest first."""
        ...

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """Called when a round has ended for a taker that required this number of gradients."""
        ...

    def on_comparison(self, comparison: Comparison) -> None:
        """Called when a round has compared the parameters of workers."""
        ...

    def on_drop(self) -> None:
        """Called when the gradients of the round were dropped: the step was set, or other values were loaded."""
        ...

    def on_close(self) -> None:
        """Called when the accumulator is deleted or the server shuts down."""
        ...


class Unobserved:
    """An `AccumulatorObserver` and `Wait` that ignores everything."""

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        """Ignores it."""

    def on_repeat(self) -> None:
        """Ignores it."""

    def on_refusal(self, error: ServiceError) -> None:
        """Ignores it."""

    def waiting(self) -> AbstractContextManager[Wait]:
        """Returns itself."""
        return nullcontext(self)

    def served(self, step: int) -> None:
        """Ignores it."""

    def about_to_end(self, step: int, num_required: int) -> SeenRound | None:
        """Keeps nothing."""
        return None

    def on_restore(self, seen: Sequence[SeenRound]) -> None:
        """Ignores it."""

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """Ignores it."""

    def on_comparison(self, comparison: Comparison) -> None:
        """Ignores it."""

    def on_drop(self) -> None:
        """Ignores it."""

    def on_close(self) -> None:
        """Ignores it."""
