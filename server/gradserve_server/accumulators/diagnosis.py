"""Explains to calls why their waits failed."""

from collections.abc import Iterable

from gradserve.visible import visible
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.waiting import TakeQueue
from gradserve_server.errors import DeadlineExceededError

_MOST_NAMED = 64
_MOST_CHARACTERS = 800
"""The longest list of workers: a status has no room for more than two such lists."""


class Diagnosis:
    """Describes the current round of an accumulator.

    Many waits often end together, so what it says of the workers is made once for all until the round changes.
    """

    def __init__(self, name: str, rounds: Rounds, queue: TakeQueue) -> None:
        """Takes the name of the accumulator, its rounds, and the calls that wait."""
        self._name = name
        self._rounds = rounds
        self._queue = queue
        self._described: tuple[int, int] | None = None
        self._workers = ""

    def too_few(self, num_required: int, timeout: float | None) -> DeadlineExceededError:
        """Returns the error for a call that did not get the gradients that it required within `timeout` seconds."""
        return DeadlineExceededError(
            f"accumulator {self._name!r} did not get the {num_required} gradients required within "
            f"{timeout:g} s: {self.text()}"
        )

    def no_average(self, step: int | None, timeout: float | None) -> DeadlineExceededError:
        """Returns the error for a call that did not get the average of a step within `timeout` seconds."""
        wanted = "any average" if step is None else f"the average of step {step}"
        return DeadlineExceededError(
            f"{wanted} of accumulator {self._name!r} did not arrive within {timeout:g} s: {self.text()}"
        )

    def text(self) -> str:
        """Returns a sentence on the gradients in the round and on the missing workers, or the first of many."""
        rounds = self._rounds
        described = (rounds.current.number, rounds.num_accumulated)
        if described != self._described:
            self._described, self._workers = described, self._describe_workers()
        count = rounds.num_accumulated
        return (
            f"{count} {'gradient is' if count == 1 else 'gradients are'} in ({self._workers}), "
            f"global_step is {rounds.global_step}, {len(self._queue)} wait"
        )

    def _describe_workers(self) -> str:
        rounds = self._rounds
        present = _named(rounds.members.workers, len(rounds.members.workers)) or "none named"
        missing = _named(rounds.missing_workers, len(rounds.missing_workers))
        if not rounds.all_workers_known:
            missing = f"{missing}, others unknown" if missing else "unknown"
        return f"workers: {present}; missing from the previous round: {missing or 'none'}"


def _named(workers: Iterable[str], count: int) -> str:
    """Returns the first of some workers, separated by commas, and the number of the others."""
    named: list[str] = []
    room = _MOST_CHARACTERS
    for worker in map(visible, workers):
        room -= len(worker) + 2
        if len(named) == _MOST_NAMED or room < 0:
            return f"{', '.join(named)} and {count - len(named)} more"
        named.append(worker)
    return ", ".join(named)
