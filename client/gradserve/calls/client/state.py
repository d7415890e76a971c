"""The state that all calls of a client share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Self

from gradserve.calls.accumulators.cache import AccumulatorCache
from gradserve.calls.accumulators.kept import DEFAULT_KEPT_BYTES, KeptMemory
from gradserve.calls.batch_norm.creation import LiveLayers
from gradserve.calls.exchange import TimeLimits
from gradserve.calls.identity import RequestIds
from gradserve.calls.lease import ClientLease
from gradserve.calls.parameters.creation import ParametersCache
from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.calls.server import Cluster


class ClientState:
    """The identity of a client, and the objects it has made."""

    def __init__(
        self,
        ids: RequestIds,
        times: TimeLimits,
        kept_bytes: int = DEFAULT_KEPT_BYTES,
        cluster: Cluster | None = None,
    ) -> None:
        """Takes the client's request ids and time limits, the most bytes of gradients that it keeps, and its servers.

        Without a cluster, there is one server.
        """
        cluster = cluster or Cluster()
        self._ids = ids
        self._timeout = times.call
        self._closing = times.closing
        self._leases = [ClientLease(ids.client_id, ids.calls_id, times) for _ in range(cluster.size)]
        self._lease = self._leases[0]
        kept = KeptMemory(kept_bytes)
        self._accumulators = AccumulatorCache(ids, cluster, self._leases, kept)
        self._parameters = ParametersCache(ids, cluster, self._leases, kept, self._accumulators.watches)
        self._layers = LiveLayers()
        self.raw_ops = RawOpsCalls(ids, self._timeout, self._accumulators)

    @classmethod
    def of_new_client(
        cls,
        times: TimeLimits,
        kept_bytes: int = DEFAULT_KEPT_BYTES,
        addresses: Sequence[str] = ("",),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> Self:
        """Returns the state of a client that its servers have never heard of. `clock` is monotonic, in seconds."""
        return cls(RequestIds(uuid.uuid4().hex, clock), times, kept_bytes, Cluster(addresses))
