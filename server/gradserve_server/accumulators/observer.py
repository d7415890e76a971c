"""The notifications that an accumulator gives an observer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from gradserve_server.accumulators.gradient import Contribution, DifferentWorker
from gradserve_server.accumulators.rounds import Outcome, Round


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

    def on_refusal(self) -> None:
        """Called when a gradient was not valid, or there was no memory for it."""
        ...

    def waiting(self) -> AbstractContextManager[Wait]:
        """Returns a context that spans the wait of the current call for other workers."""
        ...

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """Called when a round has ended for a taker that required this number of gradients."""
        ...

    def on_difference(self, workers: Sequence[DifferentWorker]) -> None:
        """Called when other workers than before have other parameters than most; none if all are equal again."""
        ...

    def on_drop(self) -> None:
        """Called when the gradients of the current round have been dropped, because other values were loaded."""
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

    def on_refusal(self) -> None:
        """Ignores it."""

    def waiting(self) -> AbstractContextManager[Wait]:
        """Returns itself."""
        return nullcontext(self)

    def served(self, step: int) -> None:
        """Ignores it."""

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """Ignores it."""

    def on_difference(self, workers: Sequence[DifferentWorker]) -> None:
        """Ignores it."""

    def on_drop(self) -> None:
        """Ignores it."""

    def on_close(self) -> None:
        """Ignores it."""
