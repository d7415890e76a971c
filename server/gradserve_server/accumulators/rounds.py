"""Decides which contributions form a round: without arithmetic, waiting or a clock."""

from dataclasses import dataclass, field

from gradserve_server.accumulators.gradient import Contribution


@dataclass(eq=False)
class Round:
    """The contributions accepted between two takes.

    Attributes:
        number: The number of the round. Steps may repeat if they are set back; numbers do not.
        members: The contributions, in order of arrival.
        step: The global_step that the round led to; None while it is open.
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
        """The ids of the members' workers, each once, in order of arrival, without empty ones."""
        return tuple(self._workers)

    def has_worker(self, worker_id: str) -> bool:
        """Returns True if the round has a gradient of this worker; False for an empty id."""
        return worker_id in self._workers

    def add(self, contribution: Contribution) -> None:
        """Adds a member."""
        self.members.append(contribution)
        if contribution.worker_id:
            self._workers[contribution.worker_id] = None


class Rounds:
    """Decides which contributions are stale, which are in a round, and which step a round leads to.

    Several servers of one accumulator would have to agree on this state, and on nothing else.
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.current = Round()
        self._previous_workers: tuple[str, ...] = ()
        self.all_workers_known = False
        """Whether every member of the previous round had a worker_id."""

    @property
    def num_accumulated(self) -> int:
        """The number of contributions accepted since the last take."""
        return len(self.current.members)

    def is_stale(self, contribution: Contribution) -> bool:
        """Returns True if a contribution is of an earlier step than the current one. Later steps are accepted."""
        return contribution.local_step < self.global_step

    def admit(self, contribution: Contribution) -> Round:
        """Adds a contribution to the current round; returns the round."""
        self.current.add(contribution)
        return self.current

    def close(self) -> Round:
        """Ends the current round and begins the next; returns the ended round, with its step."""
        closed = self.current
        # The greatest int64 is followed by the least, as in TensorFlow's own counter.
        self.global_step = (self.global_step + 1 + (1 << 63)) % (1 << 64) - (1 << 63)
        closed.step = self.global_step
        self._previous_workers = closed.worker_ids
        self.all_workers_known = all(member.worker_id for member in closed.members)
        self.current = Round(closed.number + 1)
        return closed

    def set_global_step(self, step: int) -> None:
        """Sets the step; contributions in the round stay in it."""
        self.global_step = step

    def missing_workers(self) -> tuple[str, ...]:
        """Returns the workers with an id that are in the previous round but not in the current one."""
        present = set(self.current.worker_ids)
        return tuple(worker for worker in self._previous_workers if worker not in present)
