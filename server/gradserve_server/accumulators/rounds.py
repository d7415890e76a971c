"""Decides which contributions form a round: no arithmetic, no waiting, no clock."""

from dataclasses import dataclass, field

from gradserve_server.accumulators.gradient import Contribution


@dataclass(eq=False)
class Round:
    """The contributions accepted between two takes.

    Attributes:
        number: Counts the rounds of the accumulator. Steps may come twice, when they are set back.
        members: In order of arrival.
        step: The global_step the round led to; None while it is open.
    """

    number: int = 0
    members: list[Contribution] = field(default_factory=list)
    step: int | None = None
    _workers: dict[str, None] = field(default_factory=dict)

    @property
    def total_weight(self) -> float:
        """The sum of the members' weights."""
        return float(sum(member.weight for member in self.members))

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Who is in, each once, in order of arrival; those without an id left out."""
        return tuple(self._workers)

    def has_worker(self, worker_id: str) -> bool:
        """Tells whether a gradient of this worker is in; never of those without an id."""
        return worker_id in self._workers

    def add(self, contribution: Contribution) -> None:
        """Adds a member."""
        self.members.append(contribution)
        if contribution.worker_id:
            self._workers[contribution.worker_id] = None


class Rounds:
    """Decides what is stale, who is in a round and which step a round leads to.

    This is the whole state that several servers would have to agree on.
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.current = Round()
        self._previous_workers: tuple[str, ...] = ()
        self.all_workers_known = False
        """Every member of the previous round had a worker_id."""

    @property
    def num_accumulated(self) -> int:
        """Contributions accepted since the last take."""
        return len(self.current.members)

    def is_stale(self, contribution: Contribution) -> bool:
        """Tells whether a contribution is too old. Later steps than the current one are welcome."""
        return contribution.local_step < self.global_step

    def admit(self, contribution: Contribution) -> Round:
        """Takes a contribution into the current round; returns the round."""
        self.current.add(contribution)
        return self.current

    def close(self) -> Round:
        """Ends the current round and begins the next; returns the ended one, with its step."""
        closed = self.current
        # The greatest int64 is followed by the least, as in TensorFlow's own counter.
        self.global_step = (self.global_step + 1 + (1 << 63)) % (1 << 64) - (1 << 63)
        closed.step = self.global_step
        self._previous_workers = closed.worker_ids
        self.all_workers_known = all(member.worker_id for member in closed.members)
        self.current = Round(closed.number + 1)
        return closed

    def set_global_step(self, step: int) -> None:
        """Sets the step; what is in the round stays."""
        self.global_step = step

    def missing_workers(self) -> tuple[str, ...]:
        """Returns the workers of the previous round that are not in the current one, those that had an id."""
        present = set(self.current.worker_ids)
        return tuple(worker for worker in self._previous_workers if worker not in present)
