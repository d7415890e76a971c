"""The rounds of all parameters: beside what is known of any round, why it ended, and how stale its updates were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.observe.calls import ROUND_SECONDS, STEPS, Histogram
from gradserve_server.observe.rounds import Histories, History, RoundRecord
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.resources.registry import ResourceKey


class UpdateHistory(History):
    """The history of parameters, which it observes as an `AccumulatorObserver`. Gradients are updates.

    Attributes:
        reasons: The number of rounds that have ended since the server started, by the reason of their end.
        staleness: How many versions had been made since the one from which each update of the current round was
            computed.
        ledger: The ledger of the parameters, read-only.
    """

    __slots__ = ("_applying", "ledger", "reasons", "staleness")

    _LOG_LINE = (
        "parameters %s: %d updates led to step %d after %.6f s; the last one was from %r; ended by: %s; applied in "
        "%.6f s"
    )

    def __init__(self, key: ResourceKey, histories: Histories, applying: Histogram, ledger: UpdateLedger) -> None:
        """`applying` counts the times that optimizers took."""
        super().__init__(key, histories.totals, histories)
        self._applying = applying
        self.ledger = ledger
        self.reasons: Counter[str] = Counter()
        self.staleness: list[int] = []

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        super().on_answer(contribution, outcome, num_bytes)
        if outcome is Outcome.ACCEPTED:
            staleness = self.ledger.rounds.global_step - contribution.local_step
            for _ in range(contribution.num_gradients):
                self._totals.staleness.observe(staleness)
                self.staleness.append(staleness)
            del self.staleness[len(self.times) - 1 : -1]  # of very many arrivals, only the latest is kept

    def on_drop(self) -> None:
        super().on_drop()
        self.staleness.clear()

    def _recorded(self, record: RoundRecord) -> RoundRecord:
        ended, seconds, staleness = self.ledger.ended, self.ledger.apply_seconds, tuple(self.staleness)
        assert ended is not None, "the round has ended"
        self.reasons[ended.reason] += 1
        self._applying.observe(seconds)
        self.staleness.clear()
        return replace(record, reason=ended.reason, apply_seconds=seconds, staleness=staleness)


@dataclass(frozen=True)
class UpdateHistories:
    """The histories of all parameters. Used on the event loop only.

    Attributes:
        rounds: The histories, and the counts over all of them. Its staleness is that of all updates, also of those that
            count.
        applying: Seconds that the optimizer took in each round.
    """

    rounds: Histories = field(default_factory=Histories)
    applying: Histogram = field(default_factory=lambda: Histogram(ROUND_SECONDS))

    def __post_init__(self) -> None:
        self.rounds.totals.staleness = Histogram((0.0, *STEPS))  # most updates are not stale at all

    def begin(self, key: ResourceKey, ledger: UpdateLedger) -> UpdateHistory:
        """Returns a new history for parameters that have just been created."""
        return self.rounds.add(UpdateHistory(key, self.rounds, self.applying, ledger))

    def latest(self) -> Iterator[UpdateHistory]:
        """Returns the histories of parameters with updates, those whose round ended (or began, if first) last first."""
        for history in self.rounds.latest():
            assert isinstance(history, UpdateHistory)
            yield history

    def of(self, key: ResourceKey) -> UpdateHistory | None:
        """Returns the history of parameters, None if there are none of this name."""
        history = self.rounds.of(key)
        assert history is None or isinstance(history, UpdateHistory)
        return history
