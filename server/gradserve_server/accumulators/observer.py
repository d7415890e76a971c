"""What an accumulator tells whoever watches it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.rounds import Outcome, Round


class Wait(Protocol):
    """A call that waits for other workers."""

    def served(self, step: int) -> None:
        """It gets the average that led to a step."""
        ...


class AccumulatorObserver(Protocol):
    """Learns what happens to one accumulator, after it has happened. Neither waits nor raises."""

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        """A gradient of so many bytes has been accepted or dropped."""
        ...

    def on_repeat(self) -> None:
        """A call has come again, and got the answer of the first."""
        ...

    def on_refusal(self) -> None:
        """A gradient was not valid, or there was no room for it."""
        ...

    def waiting(self) -> AbstractContextManager[Wait]:
        """Returns what is entered while the current call waits for other workers."""
        ...

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """A round has ended, for a taker that needed so many gradients."""
        ...

    def on_close(self) -> None:
        """The accumulator was deleted, or the server shuts down."""
        ...


class Unobserved:
    """An `AccumulatorObserver`, and a `Wait`, that notes nothing."""

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        """See `AccumulatorObserver`."""

    def on_repeat(self) -> None:
        """See `AccumulatorObserver`."""

    def on_refusal(self) -> None:
        """See `AccumulatorObserver`."""

    def waiting(self) -> AbstractContextManager[Wait]:
        """See `AccumulatorObserver`."""
        return nullcontext(self)

    def served(self, step: int) -> None:
        """See `Wait`."""

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """See `AccumulatorObserver`."""

    def on_close(self) -> None:
        """See `AccumulatorObserver`."""
