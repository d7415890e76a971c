"""LeaseService of an aggregator: the servers upstream know which of its workers are there."""

import asyncio

from gradserve.calls.exchange import TimeLimits
from gradserve.calls.lease import ClientLease
from gradserve_protocol.v1 import lease_messages_pb2 as messages_pb2
from gradserve_server.errors import ServiceError
from gradserve_server.resources.lifetimes import ClientLeases
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.leases.service import LeaseServicer
from gradserve_server.rpc.upstream.link import UpstreamLink


class AggregatingLeases(LeaseServicer):
    """Holds and ends the leases of clients here, and those of workers upstream, too.

    What a client owns is here. Its updates go upstream under an id of its own, and under that id it has a lease at each
    server there: any of them may be the home of the parameters.
    """

    def __init__(self, clients: ClientLeases, link: UpstreamLink) -> None:
        super().__init__(clients)
        self._link = link

    async def HoldClientLease(
        self, request: messages_pb2.HoldClientLeaseRequest, call: Call
    ) -> messages_pb2.HoldClientLeaseResponse:
        if not request.worker_client_id:
            return await super().HoldClientLease(request, call)
        client_id, calls_id = call.identity.own(request.client_id), call.identity.own(request.worker_client_id)
        leases = [ClientLease(client_id, calls_id, TimeLimits()) for _ in range(self._link.cluster.size)]
        holding = [asyncio.create_task(self._hold(target, lease)) for target, lease in enumerate(leases)]
        try:
            response = await super().HoldClientLease(request, call)
        finally:
            for each in holding:
                each.cancel()
            await asyncio.wait(holding)
        if not response.replaced:
            await asyncio.gather(*map(self._end, range(len(leases)), leases))
        return response

    async def _hold(self, target: int, lease: ClientLease) -> None:
        await self._link.run_at(target, lease.hold_for_worker())

    async def _end(self, target: int, lease: ClientLease) -> None:
        try:
            await self._link.run_at(target, lease.end())
        except ServiceError:
            return  # it runs out
