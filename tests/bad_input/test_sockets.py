"""Every bad request fails on a server's sockets as it does over gRPC, wherever its tensors are."""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest
from google.protobuf.message import Message

from gradserve_protocol.frames import FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.memory.sealed import make_region
from tests.bad_input import place_tables
from tests.bad_input.beside import move_contents
from tests.bad_input.place_tables import LIES, PAYLOAD_BYTES, Lie
from tests.bad_input.requests import EXHAUSTED, INVALID, Bad
from tests.bad_input.test_tables import MALFORMED_BYTES, TABLES
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.raw_calls import METHODS, Failure, RawCalls, failure_with

CODES = {code.value[0]: code for code in grpc.StatusCode}
ON_SOCKETS = {
    name: method
    for name, method in METHODS.items()
    if not (method.client_streaming or method.server_streaming or name in ("IssueTicket", "HoldClientLease"))
}


WAYS = ["bulk", "shared_memory"]
_REGION_BYTES = 1 << 20


def is_on_sockets(bad: Bad) -> bool:
    """Returns False for requests that fail over gRPC only: on a socket, results of any size travel with a reply."""
    return bad.method in ON_SOCKETS and not (bad.field == "placement.mode" and bad.code is EXHAUSTED)


def tells_of_contents(bad: Bad) -> bool:
    """Returns True if a tensor has more or fewer bytes than its shape says, which in a payload nobody can see."""
    return bad.field is not None and bad.field.endswith(".content")


BESIDE = {
    table: moved
    for table, entries in TABLES.items()
    if (
        moved := [
            (bad, request, payload)
            for bad in entries
            if is_on_sockets(bad) and not tells_of_contents(bad)
            for request, payload in [move_contents(bad.request)]
            if payload
        ]
    )
}
"""The requests of the tables that have tensors, with these in a payload."""


def halves(num_bytes: int, region: int) -> list[Segment]:
    half = num_bytes // 2
    return [Segment(start, half, region, start) for start in (0, half)]


class SocketCalls:
    """Makes calls that fail on a socket."""

    def __init__(self, client: FrameClient) -> None:
        self._client = client

    def fail(self, method: str, request: Message | bytes, payload: bytes = b"", *, num_segments: int = 1) -> Failure:
        """Makes a call that must fail, with a payload; returns how it did."""
        return self._fail(method, request, payload, halves(len(payload), 0) if num_segments == 2 else ())

    def _fail(
        self, method: str, request: Message | bytes, payload: bytes = b"", segments: Sequence[Segment] = ()
    ) -> Failure:
        name = METHODS[method].full_name.encode()
        message = request if isinstance(request, bytes) else request.SerializeToString()
        header = FrameHeader(
            FrameKind.CALL,
            name_bytes=len(name),
            message_bytes=len(message),
            payload_bytes=len(payload),
            size=len(segments),
        )
        self._client.send(header, name + pack_segments(segments) + message + payload)
        frame = self._client.receive()
        assert frame.header.code, f"{method} was expected to fail"
        status = frame.status
        assert frame.header.code == status.code
        return failure_with(CODES[status.code], status)


class RegionCalls(SocketCalls):
    """Makes calls whose payload is in a region of the client."""

    def __init__(self, client: FrameClient) -> None:
        super().__init__(client)
        self._memory = self._hand_over(client)

    def fail(self, method: str, request: Message | bytes, payload: bytes = b"", *, num_segments: int = 1) -> Failure:
        self._memory[: len(payload)] = payload
        whole = [Segment(0, len(payload), 1, 0)] if payload else ()
        return self._fail(method, request, segments=halves(len(payload), 1) if num_segments == 2 else whole)

    @staticmethod
    def _hand_over(client: FrameClient) -> mmap.mmap:
        descriptor, memory = make_region(_REGION_BYTES, read_only_for_others=False)
        try:
            client.send(FrameHeader(FrameKind.REGION, number=1, size=_REGION_BYTES), descriptors=[descriptor])
        finally:
            os.close(descriptor)
        assert client.receive().header.code == 0
        return memory


@pytest.fixture(scope="module")
def over_grpc(raw: RawCalls) -> Callable[[Bad], Failure]:
    """Returns how a request fails over gRPC, where each is made once."""
    failures: dict[int, Failure] = {}

    def fail(bad: Bad) -> Failure:
        if id(bad) not in failures:
            failures[id(bad)] = raw.fail(bad.method, bad.request)
        return failures[id(bad)]

    return fail


@pytest.fixture(params=WAYS)
def sockets(request: pytest.FixtureRequest, server_address: str) -> Iterator[SocketCalls]:
    ticket = issue_ticket(server_address)
    with FrameClient.over_tcp(ticket) if request.param == "bulk" else FrameClient.over_unix(ticket) as client:
        assert client.hello(ticket.ticket).header.code == 0
        yield SocketCalls(client) if request.param == "bulk" else RegionCalls(client)


@pytest.mark.sampled(every=4)
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("table", list(TABLES))
def test_bad_requests_fail_alike_and_change_nothing(
    over_grpc: Callable[[Bad], Failure], sockets: SocketCalls, table: str
) -> None:
    for bad in TABLES[table]:
        if is_on_sockets(bad):
            failure = sockets.fail(bad.method, bad.request)
            bad.check(failure)
            assert failure == over_grpc(bad)


@pytest.mark.sampled(every=3)
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("table", list(BESIDE))
def test_tensors_beside_the_message_change_nothing_about_that(
    over_grpc: Callable[[Bad], Failure], sockets: SocketCalls, table: str
) -> None:
    for bad, request, payload in BESIDE[table]:
        failure = sockets.fail(bad.method, request, payload)
        bad.check(failure)
        assert failure == over_grpc(bad)


def lie_id(value: object) -> str | None:
    return f"{value.name}-{value.bad.method}" if isinstance(value, Lie) else None


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("lie", LIES, ids=lie_id)
def test_tensors_that_are_not_where_they_say(sockets: SocketCalls, lie: Lie) -> None:
    lie.bad.check(sockets.fail(lie.bad.method, lie.bad.request, bytes(PAYLOAD_BYTES)))


@pytest.mark.usefixtures("unchanged")
def test_a_tensor_in_two_segments(sockets: SocketCalls) -> None:
    bad = place_tables.store(
        "expected 100 bytes within one segment of the payload, got an offset of 0 where the segment ends at 64",
        0,
        place_tables.at(0, [25]),
    )
    bad.check(sockets.fail(bad.method, bad.request, bytes(PAYLOAD_BYTES), num_segments=2))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("lie", LIES, ids=lie_id)
def test_over_grpc_there_is_no_payload(raw: RawCalls, lie: Lie) -> None:
    failure = raw.fail(lie.bad.method, lie.bad.request)
    assert failure.code is INVALID
    assert failure.field is not None
    assert failure.field.endswith(".payload_offset")


@pytest.mark.sampled
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("method", sorted(ON_SOCKETS))
def test_bytes_that_are_no_message(raw: RawCalls, sockets: SocketCalls, method: str) -> None:
    for message in MALFORMED_BYTES.values():
        assert sockets.fail(method, message) == raw.fail(method, message)
