"""Addresses: one way to write them, for clients, servers and the command line; errors say what was given."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import gradserve
import gradserve.aio
from gradserve_protocol.address import Address
from gradserve_server.commands.cli import cli
from tests.servers.connecting import connect_with, no_server, without_retries
from tests.servers.polling import PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("text", "expected", "target"),
    [
        ("localhost:50051", Address("localhost", 50051), "dns:///localhost:50051"),
        ("localhost", Address("localhost", 50051), "dns:///localhost:50051"),
        ("127.0.0.1", Address("127.0.0.1", 50051), "dns:///127.0.0.1:50051"),
        ("gradserve.example.org.:1", Address("gradserve.example.org.", 1), "dns:///gradserve.example.org.:1"),
        ("my_server-1:65535", Address("my_server-1", 65535), "dns:///my_server-1:65535"),
        ("dns:53", Address("dns", 53), "dns:///dns:53"),
        ("[::1]:5", Address("::1", 5), "dns:///[::1]:5"),
        ("[::1]", Address("::1", 50051), "dns:///[::1]:50051"),
        ("[fe80::1%eth0]:5", Address("fe80::1%eth0", 5), "dns:///[fe80::1%25eth0]:5"),
        (" \tlocalhost:5\n", Address("localhost", 5), "dns:///localhost:5"),
        ("unix:/run/s", Address(path="/run/s"), "unix:/run/s"),
        ("unix:///run/s", Address(path="/run/s"), "unix:/run/s"),
        ("unix:s", Address(path="s"), "unix:s"),
        ("UNIX:/run/s", Address(path="/run/s"), "unix:/run/s"),
        ("unix:/a b#c?d%20ü", Address(path="/a b#c?d%20ü"), "unix:/a%20b%23c%3Fd%2520%C3%BC"),
        ("unix:/" + "x" * 100, Address(path="/" + "x" * 100), "unix:/" + "x" * 100),
    ],
)
def test_what_an_address_means(text: str, expected: Address, target: str) -> None:
    for address in (Address.to_connect(text), Address.to_listen(text)):
        assert address == expected
        assert address.target == target
        assert Address.to_listen(str(address)) == address


def test_a_server_of_this_process_is_only_to_connect_to() -> None:
    address = Address.to_connect(" in-process:ab12")
    assert (address, address.target, str(address)) == (Address(name="ab12"), "in-process:ab12", "in-process:ab12")
    with pytest.raises(gradserve.InvalidArgumentError, match="got 'in-process:ab12'"):
        Address.to_listen("in-process:ab12")


REFUSED: list[tuple[Any, str]] = [
    (b"localhost:1", "got b'localhost:1'; examples are "),
    (50051, "got 50051; examples are "),
    ("", "got ''; examples are "),
    (" \n", "got ' \\n'; examples are "),
    ("127.0.0.1:99999", "got '127.0.0.1:99999'; a port is a number from 1 to 65535"),
    ("127.0.0.1:-1", "a port is a number"),
    ("127.0.0.1:", "a port is a number"),
    ("127.0.0.1:http", "a port is a number"),
    ("127.0.0.1:+1", "a port is a number"),
    ("127.0.0.1:1_0", "a port is a number"),
    ("127.0.0.1:٣", "a port is a number"),
    ("127.0.0.1:1/", "a port is a number"),
    ("50051", "the host is missing; for a port of this machine, write 'localhost:50051'"),
    (":50051", "the host is missing; 'localhost' is this machine"),
    ("*:50051", "a server on '0.0.0.0' listens everywhere"),
    ("256.1.1.1:1", "'256.1.1.1' is neither the name of a host nor an IP address"),
    ("127.1:1", "'127.1' is neither"),
    ("a b:1", "'a b' is neither"),
    ("a..b:1", "'a..b' is neither"),
    ("-a:1", "'-a' is neither"),
    ("münchen:1", "'münchen' is neither"),
    ("a" * 64 + ":1", "is neither"),
    ("::1", "put an IPv6 address in brackets, as in '[::1]:50051'"),
    ("::1:50051", "put an IPv6 address in brackets"),
    ("ipv4:127.0.0.1:1", "there is more than one colon"),
    ("localhost:1 localhost:2", "there is more than one colon"),
    ("[localhost]:1", "brackets enclose an IPv6 address"),
    ("[::1", "brackets enclose an IPv6 address"),
    ("[::1]50051", "brackets enclose an IPv6 address"),
    ("http://localhost:1", "leave out 'http://' and write 'localhost:1'"),
    ("http://localhost:1/path", "leave out 'http://' and write 'localhost:1'"),
    ("grpc://localhost", "leave out 'grpc://' and write 'localhost'"),
    ("https://localhost:1", "write 'localhost:1'; tls=gradserve.TLS(...) encrypts connections"),
    ("dns:///localhost:1", "leave out 'dns://'"),
    ("/run/s", "write a Unix socket as 'unix:/run/s'"),
    ("./s", "write a Unix socket as 'unix:./s'"),
    ("unix:", "that is not the path of a Unix socket"),
    ("unix:///", "that is not the path of a Unix socket"),
    ("unix:/run/", "that is not the path of a Unix socket"),
    ("unix:/a\0b", "that is not the path of a Unix socket"),
    ("unix://run/s", "write unix:///PATH, from the root, or 'unix:run/s'"),
    ("unix:/" + "x" * 101, "the path of a Unix socket must have at most 101 bytes"),
    ("unix:/" + "ü" * 51, "the path of a Unix socket must have at most 101 bytes"),
    ("unix-abstract:gradserve", "abstract sockets are not supported"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda each: repr(each)[:40])
def test_what_is_no_address_is_refused_where_it_is_given(given: Any, message: str) -> None:
    for parse in (gradserve.connect, gradserve.aio.connect, Address.to_listen):
        with pytest.raises(gradserve.InvalidArgumentError) as raised:
            parse(given)
        assert str(raised.value).startswith(f"expected an address, HOST:PORT or unix:PATH, got {given!r}; ")
        assert message in str(raised.value)
        assert raised.value.field == "address"


def test_port_0_is_for_servers() -> None:
    assert Address.to_listen("localhost:0") == Address("localhost", 0)
    for connect in (gradserve.connect, gradserve.aio.connect):
        with pytest.raises(gradserve.InvalidArgumentError, match="got 'localhost:0'; port 0 is for a server"):
            connect("localhost:0")


@pytest.mark.parametrize("command", [["serve", "--listen"], ["health"], ["info"], ["demo", "--address"]])
def test_the_command_line_refuses_in_one_line(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "http://localhost:1"])
    assert done.exit_code == 2
    assert done.output.endswith("got 'http://localhost:1'; leave out 'http://' and write 'localhost:1'\n")
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1


def test_a_client_says_what_it_is_connected_to(server_address: str) -> None:
    with gradserve.connect(f" {server_address}\n", timeout=PATIENCE_SECONDS) as client:
        assert client.address == server_address
        client.server_info()
    with gradserve.connect("localhost") as client:
        assert client.address == "localhost:50051"


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port that is taken, but that nobody listens at."""
    with no_server() as address:
        yield address


@pytest.mark.parametrize("kind", ["port", "path", "name"])
def test_an_error_asks_for_the_server_that_is_not_there(nobody: str, kind: str, tmp_path: Any) -> None:
    address = {"port": nobody, "path": f"unix:{tmp_path}/socket", "name": "gradserve.invalid:50051"}[kind]
    question = f"is gradserve serve running at {address}?"
    with connect_with(address, without_retries(30)) as client:
        for call in (client.server_info, lambda: client.put([1.0])):
            with pytest.raises(gradserve.UnavailableError) as raised:
                call()
            assert question in str(raised.value)

    async def ask() -> None:
        async with gradserve.aio.connect(address, timeout=PATIENCE_SECONDS) as client:
            await client.server_info()

    with pytest.raises(gradserve.UnavailableError) as raised:
        asyncio.run(ask())
    assert question in str(raised.value)
    for command in ("health", "info"):
        assert question in CliRunner().invoke(cli, [command, address]).output
