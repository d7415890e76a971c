"""What all calls of a client have in common."""

from __future__ import annotations

from gradserve.calls.accumulators.made import MadeAccumulators
from gradserve.calls.batch_norm.made import MadeLayers
from gradserve.calls.exchange import check_timeout
from gradserve.calls.identity import RequestIds
from gradserve.calls.private_resources import PrivateResources
from gradserve.calls.raw_ops import RawOpsCalls


class ClientState:
    """The identity of a client, and what it has made."""

    def __init__(self, ids: RequestIds, timeout: float) -> None:
        self._ids = ids
        self._timeout = check_timeout(timeout)
        self._private = PrivateResources(ids)
        self._accumulators = MadeAccumulators(ids, self._private)
        self._layers = MadeLayers()
        self.raw_ops = RawOpsCalls(ids, self._timeout, self._accumulators)
