"""Everything that is counted while the server runs."""

from dataclasses import dataclass, field

from gradserve_server.observe.calls import Calls
from gradserve_server.observe.rounds.histories import Histories
from gradserve_server.observe.traffic import WireTraffic


@dataclass(frozen=True)
class Observed:
    """Everything that is counted while the server runs.

    Attributes:
        calls: Counts and times of calls.
        histories: What happens to accumulators.
        traffic: Bytes by way.
    """

    calls: Calls = field(default_factory=Calls)
    histories: Histories = field(default_factory=Histories)
    traffic: WireTraffic = field(default_factory=WireTraffic)
