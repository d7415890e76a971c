"""Metadata of calls on sockets: behind the method's name, as docs/sockets.md specifies."""

import logging
from collections.abc import Iterator, Mapping

import pytest

import gradserve
from gradserve_protocol.frames import MAX_NAME_BYTES, FrameHeader, FrameKind, Metadata, name_with, split_name
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_server.observe.calls import current_call
from gradserve_testing import LocalServer
from tests.servers.frames import FrameClient, issue_ticket


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ((), b"a.B"),
        ((("traceparent", "00-1-2-01"),), b"a.B\ntraceparent:00-1-2-01"),
        ((("a", "1: 2"), ("b", "")), b"a.B\na:1: 2\nb:"),
    ],
)
def test_the_form(metadata: Metadata, name: bytes) -> None:
    assert name_with(b"a.B", metadata) == name
    assert split_name(name) == (b"a.B", dict(metadata))


def test_what_has_no_room_is_left_out() -> None:
    name = name_with(b"a.B", (("traceparent", "00-1-2-01"), ("tracestate", "x" * MAX_NAME_BYTES)))
    assert split_name(name) == (b"a.B", {"traceparent": "00-1-2-01"})


@pytest.mark.parametrize("junk", [b"\n", b"\n\n\n", b"\nno colon", b"\n\xff:\xff", b"\n:"])
def test_what_is_no_metadata_is_ignored(junk: bytes) -> None:
    method, metadata = split_name(b"a.B" + junk)
    assert method == b"a.B"
    assert not any(metadata)


@pytest.fixture
def client(server: LocalServer) -> Iterator[FrameClient]:
    ticket = issue_ticket(server.address)
    with FrameClient.over_tcp(ticket) as connected:
        assert messages_pb2.Welcome.FromString(connected.hello(ticket.ticket).message).takes_metadata
        yield connected


class _RequestIds(logging.Handler):
    """Notes the request ids of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.by_message: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        call = current_call()
        self.by_message[record.getMessage()] = "" if call is None else call.request_id


@pytest.fixture
def request_ids(caplog: pytest.LogCaptureFixture) -> Iterator[Mapping[str, str]]:
    """The request ids of the lines about calls, by message."""
    caplog.set_level(logging.INFO, logger="gradserve_server.calls")
    handler, log = _RequestIds(), logging.getLogger("gradserve_server.calls")
    log.addHandler(handler)
    yield handler.by_message
    log.removeHandler(handler)


@pytest.mark.parametrize("metadata", ["x-request-id:run-7", "traceparent:00-zz-1-01\nx-request-id:run-7"])
def test_a_call_with_metadata(client: FrameClient, request_ids: Mapping[str, str], name: str, metadata: str) -> None:
    request = accumulator_messages_pb2.GetAccumulatorRequest(accumulator=accumulator_pb2.AccumulatorRef(name=name))
    client.call(f"AccumulatorService.GetAccumulator\n{metadata}", request)
    assert "no accumulator" in client.receive().status.message
    assert [given for message, given in request_ids.items() if name in message] == ["run-7"]


def test_an_unknown_method_with_metadata(client: FrameClient) -> None:
    client.call("NoSuch\nx-request-id:1", messages_pb2.Hello())
    assert client.receive().status.message == (
        f"no method 'gradserve.v1.NoSuch' on this socket of gradserve {gradserve.__version__}"
    )


def test_a_name_that_is_too_long_breaks_the_rules(client: FrameClient) -> None:
    name = b"x" * (MAX_NAME_BYTES + 1)
    client.send(FrameHeader(FrameKind.CALL, name_bytes=len(name)), name)
    assert "1024" in client.receive().status.message
