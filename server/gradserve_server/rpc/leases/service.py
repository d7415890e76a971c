"""LeaseService: clients hold a lease, and end it."""

from gradserve_protocol.v1 import lease_messages_pb2 as messages_pb2
from gradserve_server.resources.lifetimes import ClientLeases
from gradserve_server.rpc.boundary.chain import Call


class LeaseServicer:
    """Holds and ends the leases of clients. The protos say what each method does."""

    def __init__(self, clients: ClientLeases) -> None:
        self._clients = clients

    async def HoldClientLease(
        self, request: messages_pb2.HoldClientLeaseRequest, call: Call
    ) -> messages_pb2.HoldClientLeaseResponse:
        own = call.identity.own
        replaced = await self._clients.hold(own(request.client_id), own(request.worker_client_id))
        return messages_pb2.HoldClientLeaseResponse(replaced=replaced)

    async def EndClientLease(
        self, request: messages_pb2.EndClientLeaseRequest, call: Call
    ) -> messages_pb2.EndClientLeaseResponse:
        return messages_pb2.EndClientLeaseResponse(
            num_deleted=await self._clients.end(call.identity.own(request.client_id))
        )
