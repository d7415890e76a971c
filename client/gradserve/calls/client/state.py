"""The state that all calls of a client share."""

from __future__ import annotations

import uuid
from typing import Self

from gradserve.calls.accumulators.kept import DEFAULT_KEPT_BYTES, KeptMemory
from gradserve.calls.accumulators.made import MadeAccumulators
from gradserve.calls.batch_norm.made import MadeLayers
from gradserve.calls.identity import RequestIds
from gradserve.calls.private_resources import PrivateResources
from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.calls.time_limits import TimeLimits


class ClientState:
    """The identity of a client, and the objects it has made."""

    def __init__(self, ids: RequestIds, times: TimeLimits, kept_bytes: int = DEFAULT_KEPT_BYTES) -> None:
        """Takes the client's request ids and time limits, and the most bytes of gradients that it keeps."""
        self._ids = ids
        self._timeout = times.call
        self._closing = times.closing
        self._private = PrivateResources(ids, times)
        self._accumulators = MadeAccumulators(ids, self._private, KeptMemory(kept_bytes))
        self._layers = MadeLayers()
        self.raw_ops = RawOpsCalls(ids, self._timeout, self._accumulators)

    @classmethod
    def of_new_client(cls, times: TimeLimits, kept_bytes: int = DEFAULT_KEPT_BYTES) -> Self:
        """Returns the state of a client that the server has never heard of."""
        return cls(RequestIds(uuid.uuid4().hex), times, kept_bytes)
