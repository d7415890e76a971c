"""The sockets that a client tries, by what the server says and the route to it."""

import pytest

from gradserve.transport.route import Route
from gradserve.transport.settings import Way
from gradserve.transport.sockets.choice import find_places
from gradserve_protocol.address import Address
from gradserve_protocol.memory.sealed import machine_id
from gradserve_protocol.v1.socket_messages_pb2 import SocketAddresses

NO_UNIX = "shared_memory: the server has no socket for it"
OTHER_MACHINE = "shared_memory: the server is on another machine"
LOOPBACK = "bulk: the server listens at 127.0.0.1:7, which far does not lead to"
BOTH = (Way.SHARED_MEMORY, Way.BULK)
PROXY = {"http_proxy": "http://proxy:3128"}


def addresses(*tcp: tuple[str, int], unix_path: str = "", machine: str = "") -> SocketAddresses:
    return SocketAddresses(
        tcp=[{"host": host, "port": port} for host, port in tcp], unix_path=unix_path, machine=machine
    )


@pytest.mark.parametrize(
    ("address", "sockets", "places", "reasons"),
    [
        ("far:1", addresses(("", 7)), ["far:7"], [NO_UNIX]),
        ("far:1", addresses(("other", 7), ("", 8)), ["far:8", "other:7"], [NO_UNIX]),
        ("[::1]:1", addresses(("", 7)), ["[::1]:7"], [NO_UNIX]),
        ("far:1", addresses(unix_path="/s"), ["unix:/s"], ["bulk: the server has no socket for it"]),
        ("far:1", addresses(("", 7), unix_path="/s", machine=machine_id()), ["unix:/s", "far:7"], []),
        ("far:1", addresses(("", 7), unix_path="/s", machine="x"), ["far:7"], [OTHER_MACHINE]),
        ("unix:/g", addresses(("", 7), unix_path="/s"), ["unix:/s", "localhost:7"], []),
        ("far:1", addresses(("127.0.0.1", 7), unix_path="/s"), ["unix:/s"], [LOOPBACK]),
        ("localhost:1", addresses(("127.0.0.1", 7), unix_path="/s"), ["unix:/s", "127.0.0.1:7"], []),
    ],
)
def test_places(address: str, sockets: SocketAddresses, places: list[str], reasons: list[str]) -> None:
    found = find_places(sockets, Route.to(Address.to_connect(address), {}), BOTH)
    assert ([str(each) for each in found.places], list(found.reasons)) == (places, reasons)


def test_no_bulk_through_a_proxy() -> None:
    found = find_places(addresses(("", 7)), Route.to(Address.to_connect("far:1"), PROXY), (Way.BULK,))
    assert not found.places
    assert found.reasons == ["bulk: connections go through the proxy of http_proxy=http://proxy:3128"]
