"""Every bad request fails on a server's sockets as it does over gRPC."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from gradserve.wire.frames import FrameHeader, FrameKind
from tests.bad_input.requests import EXHAUSTED
from tests.bad_input.test_tables import MALFORMED_BYTES, TABLES
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.raw_calls import METHODS, Failure, RawCalls

CODES = {code.value[0]: code for code in grpc.StatusCode}
ON_SOCKETS = {
    name: method
    for name, method in METHODS.items()
    if not (method.client_streaming or method.server_streaming or name in ("IssueTicket", "HoldClientLease"))
}


class SocketCalls:
    """Makes calls that fail on a socket."""

    def __init__(self, client: FrameClient) -> None:
        self._client = client

    def fail(self, method: str, request: Message | bytes) -> Failure:
        """Makes a call that must fail; returns how it did."""
        name = METHODS[method].full_name.encode()
        message = request if isinstance(request, bytes) else request.SerializeToString()
        header = FrameHeader(FrameKind.CALL, name_bytes=len(name), message_bytes=len(message))
        self._client.send(header, name + message)
        frame = self._client.receive()
        assert frame.header.code, f"{method} was expected to fail"
        status = frame.status
        assert frame.header.code == status.code
        field = None
        for detail in status.details:
            violation = error_details_pb2.BadRequest()
            assert detail.Unpack(violation)
            (only,) = violation.field_violations
            assert only.description == status.message
            field = only.field
        return Failure(CODES[status.code], status.message, field)


@pytest.fixture(params=["bulk", "shared_memory"])
def sockets(request: pytest.FixtureRequest, server_address: str) -> Iterator[SocketCalls]:
    ticket = issue_ticket(server_address)
    with FrameClient.over_tcp(ticket) if request.param == "bulk" else FrameClient.over_unix(ticket) as client:
        assert client.hello(ticket.ticket).header.code == 0
        yield SocketCalls(client)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("table", list(TABLES))
def test_bad_requests_fail_alike_and_change_nothing(raw: RawCalls, sockets: SocketCalls, table: str) -> None:
    for bad in TABLES[table]:
        if bad.method not in ON_SOCKETS or (bad.field == "placement.mode" and bad.code is EXHAUSTED):
            continue  # results of any size travel with a reply
        failure = sockets.fail(bad.method, bad.request)
        bad.check(failure)
        assert failure == raw.fail(bad.method, bad.request)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("method", sorted(ON_SOCKETS))
def test_bytes_that_are_no_message(raw: RawCalls, sockets: SocketCalls, method: str) -> None:
    for message in MALFORMED_BYTES.values():
        assert sockets.fail(method, message) == raw.fail(method, message)
