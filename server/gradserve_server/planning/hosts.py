"""Which gradients go over the links as one: those of the workers of a host, if that has an aggregator."""

from dataclasses import dataclass, field

from gradserve_server.planning.deployment import Deployment


@dataclass(eq=False)
class Group:
    """Workers whose gradients travel as one, and get one average.

    Attributes:
        step: The step of the gradients.
        workers: The workers.
    """

    step: int
    workers: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Batch:
    """What an aggregator has of one step.

    Attributes:
        count: The gradients that have come.
        waiting: Those that wait for others; None if none does.
    """

    count: int = 0
    waiting: Group | None = None


class Hosts:
    """The aggregators of all hosts: each passes gradients on when all of its workers have come, or after the grace.

    A gradient that comes after the others have gone is passed on by itself.
    """

    def __init__(self, deployment: Deployment) -> None:
        """Takes the number of workers on a host."""
        self._num_workers = deployment.num_workers
        self._per_host = deployment.workers_per_host
        self._batches: dict[tuple[int, int], _Batch] = {}

    def add(self, worker: int, step: int) -> tuple[Group, bool, bool]:
        """Adds a gradient; returns its group, whether it is the first of it, and whether the group is complete."""
        host = worker // self._per_host
        batch = self._batches.setdefault((host, step), _Batch())
        batch.count += 1
        is_first = batch.waiting is None
        group = batch.waiting = batch.waiting or Group(step)
        group.workers.append(worker)
        is_complete = batch.count == min(self._per_host, self._num_workers - host * self._per_host)
        if is_complete:
            del self._batches[host, step]
        return group, is_first, is_complete

    def let_go(self, group: Group) -> bool:
        """Passes a group on whose grace is over; returns False if it has gone already."""
        batch = self._batches.get((group.workers[0] // self._per_host, group.step))
        if batch is None or batch.waiting is not group:
            return False
        batch.waiting = None
        return True
