"""The state that all calls of a client share."""

from __future__ import annotations

from gradserve.calls.accumulators.made import MadeAccumulators
from gradserve.calls.batch_norm.made import MadeLayers
from gradserve.calls.identity import RequestIds
from gradserve.calls.private_resources import PrivateResources
from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.calls.time_limits import TimeLimits


class ClientState:
    """The identity of a client, and the objects it has made."""

    def __init__(self, ids: RequestIds, times: TimeLimits) -> None:
        self._ids = ids
        self._timeout = times.call
        self._private = PrivateResources(ids, times)
        self._accumulators = MadeAccumulators(ids, self._private)
        self._layers = MadeLayers()
        self.raw_ops = RawOpsCalls(ids, self._timeout, self._accumulators)
