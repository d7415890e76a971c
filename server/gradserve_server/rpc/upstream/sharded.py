"""Resources that are sharded over the servers upstream: what their home has said, and calls there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from google.protobuf.message import Message

from gradserve.calls.accumulators.sharding.shard import Parts, Uncounted
from gradserve.calls.accumulators.sharding.staging import USES_PER_LEASE
from gradserve.calls.combinators import aimed_call, replied, with_beside
from gradserve.calls.exchange import Operation, Pause, Reply, Unary, Whole
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.messages import decode_duration
from gradserve_protocol.v1 import accumulator_pb2, lease_pb2, parameters_pb2
from gradserve_server.devices.compute import Compute
from gradserve_server.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink


class UpstreamSharded(ABC):
    """An accumulator or parameters with a shard on each server upstream.

    Attributes:
        SERVICE: The name of the service of such resources.
    """

    SERVICE: ClassVar[str]

    def __init__(
        self,
        info: accumulator_pb2.AccumulatorInfo | parameters_pb2.ParametersInfo,
        ref: accumulator_pb2.AccumulatorRef | parameters_pb2.ParametersRef,
        parts: Parts,
        link: UpstreamLink,
        compute: Compute,
        *,
        kind: str,
    ) -> None:
        """Takes the description by the home, and its reference; the parts of the servers, and the connection to them.

        Raises:
            InvalidArgumentError: The resource is sharded over other servers.
        """
        cluster = link.cluster
        if info.spec.num_shards != cluster.size:
            verb = "is" if kind == "accumulator" else "are"
            raise InvalidArgumentError(
                f"{kind} {ref.container}/{ref.name!r} {verb} sharded over {info.spec.num_shards} servers, and "
                f"{cluster.size} are upstream of this one",
                field=f"{kind}.name",
            )
        self._link = link
        self._compute = compute
        self._cluster = cluster
        self._home = cluster.home_of(ref.container, ref.name)
        self._incarnation = ref.incarnation
        self._epoch = info.epoch
        self._parts = parts
        self._uncounted = Uncounted()
        self._lifetime = lease_pb2.Lifetime()
        self._idle_lease = decode_duration(info, "idle_lease")
        if self._idle_lease is not None:
            self._lifetime.idle_lease.CopyFrom(info.idle_lease)

    @property
    def _others(self) -> list[int]:
        return [target for target in self._parts.servers if target != self._home]

    @abstractmethod
    def _use(self, target: int) -> Operation[object]:
        """Uses the shard of a server other than the home, which renews its lease."""

    def _call(self, method: str, request: Message, wait: float = 0.0) -> Unary:
        """Returns a call at the home."""
        return aimed_call(self._home, Unary(self.SERVICE, method, request, wait))

    def _asked(self, method: str, request: Any, wait: float) -> Operation[Reply]:
        """Makes a call at the home; while it waits there, uses what other servers have, as that is in use, too."""
        call = replied(Whole(self._call(method, request, wait)))
        if self._idle_lease is None or not wait:
            return call
        return with_beside(call, self._using_others(self._idle_lease / USES_PER_LEASE))

    def _using_others(self, pause: float) -> Operation[None]:
        while True:
            yield Pause(pause)
            for target in self._others:
                with suppress(GradserveError):  # it has no lease while it cannot be reached, and a new one after that
                    yield from self._use(target)
