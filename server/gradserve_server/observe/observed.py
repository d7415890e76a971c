"""Everything that is counted while the server runs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradserve_server.accumulators.observer import AccumulatorObserver
from gradserve_server.observe.calls import Calls
from gradserve_server.observe.rounds.histories import Histories
from gradserve_server.observe.traffic import WireTraffic
from gradserve_server.resources.registry import ResourceKey

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True)
class Observed:
    """Everything that is counted while the server runs.

    Attributes:
        calls: Counts and times of calls.
        histories: What happens to accumulators.
        traffic: Bytes by way.
        tracer: What makes spans; None if there are none.
    """

    calls: Calls = field(default_factory=Calls)
    histories: Histories = field(default_factory=Histories)
    traffic: WireTraffic = field(default_factory=WireTraffic)
    tracer: "Tracer | None" = None

    def observe(self, key: ResourceKey) -> AccumulatorObserver:
        """Returns what learns about an accumulator that has just been made."""
        history = self.histories.begin(key)
        if self.tracer is None:
            return history
        from gradserve_server.observe.tracing.rounds import TracedRounds  # not without OpenTelemetry

        return TracedRounds(key, history, self.tracer)
