"""Users of a Unix socket, who need no token."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.transport.settings import Transport
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_server.config import LeaseConfig, ListenConfig, RuntimeConfig, SecurityConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.security.access import LIFETIME_SECONDS
from gradserve_testing import LocalServer
from tests.resources.clients.aging_server import num_held
from tests.security.serving import TOKENS, entry, replace_file
from tests.servers.clocks import SkippingClock
from tests.servers.connecting import carrier_of, connect_with, transport_of, without_retries
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS, eventually

FACES = ("blocking", "asyncio")
ME = os.getuid()
INFO = "/gradserve.v1.ServerService/GetServerInfo"
LARGE = np.arange(2_000_000, dtype=np.float32)
"""A tensor that travels in streams over gRPC."""


def entries(*users: int) -> str:
    return entry("me", {"*": "chief"}, users=users) + entry("worker", {"*": "worker"}, TOKENS["worker"])


def serving(folder: Path, *users: int, listen: str = "", parts: Parts | None = None, **sockets: Any) -> LocalServer:
    """Returns a server that knows some users at its Unix socket."""
    access = folder / "access.toml"
    access.write_text(entries(*users))
    config = ServerConfig(
        listen=ListenConfig(**sockets),
        leases=LeaseConfig(client_lease_seconds=2 * LIFETIME_SECONDS),
        runtime=RuntimeConfig(device="cpu", warm_up=False, drain_seconds=5),
        security=SecurityConfig(access=str(access)),
    )
    return LocalServer(config, parts, address=listen or f"unix:{folder}/s")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    with serving(tmp_path, ME) as local:
        yield local


@contextmanager
def client_of(face: str, address: str, **settings: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """Yields a client of either face, and what waits for an answer of it."""
    settings.setdefault("timeout", PATIENCE_SECONDS)
    if face == "blocking":
        with gradserve.connect(address, **settings) as client:
            yield client, lambda answer: answer
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def connected() -> gradserve.aio.Client:
        return gradserve.aio.connect(address, **settings)

    def wait(answer: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(answer, loop).result(PATIENCE_SECONDS)

    try:
        other = wait(connected())
        yield other, wait
        wait(other.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def key_of(address: str, token: str = "") -> str:
    """Returns the key of this process' user."""
    ticket = issue_ticket(address, token=token)
    with FrameClient.over_unix(ticket) as client:
        frame = client.hello(ticket.ticket)
        assert frame.header.code == 0
        return messages_pb2.Welcome.FromString(frame.message).user_key


def ask(address: str, shown: str) -> Any:
    """Makes a call over gRPC that shows something."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(INFO)
        return call(
            server_messages_pb2.GetServerInfoRequest().SerializeToString(), metadata=(("authorization", shown),)
        )


def refusal(address: str, shown: str) -> str:
    """Returns the words in which a call over gRPC that shows something is refused."""
    with pytest.raises(grpc.RpcError) as raised:
        ask(address, shown)
    error: Any = raised.value
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    return str(error.details())


def test_a_known_user_of_a_unix_socket_needs_no_token(server: LocalServer) -> None:
    with gradserve.connect(server.address) as me, gradserve.connect(server.address, token=TOKENS["worker"]) as worker:
        handle = me.put([1.0])
        assert me.server_info().transport.way == "shared_memory"
        me.conditional_accumulator("float32", (), shared_name="x")
        # The token counts, not the user.
        with pytest.raises(gradserve.PermissionDeniedError, match="'worker' has the role worker"):
            worker.delete_accumulator("x")
        with pytest.raises(gradserve.NotFoundError):
            worker.get(handle)
        assert me.get(handle) == [1.0]
    with (
        gradserve.connect(server.address, token=TOKENS["admin"]) as stranger,
        pytest.raises(gradserve.UnauthenticatedError, match="does not know this token"),
    ):
        stranger.put([1.0])


@pytest.mark.parametrize("face", FACES)
def test_calls_over_grpc_show_the_user(server: LocalServer, face: str) -> None:
    with client_of(face, server.address, transport="grpc") as (client, wait):
        handle = wait(client.put(LARGE))
        assert wait(client.server_info()).transport.way == "grpc"
    with client_of(face, server.address, transport="grpc") as (client, wait):
        assert np.array_equal(wait(client.get(handle, release=True)), LARGE)
    with client_of(face, server.address, transport="grpc") as (client, wait):
        wait(client.conditional_accumulator("float32", (), shared_name="x"))
        wait(client.delete_accumulator("x"))


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.parametrize("face", FACES)
def test_a_user_holds_the_lease(server: LocalServer, face: str, transport: str) -> None:
    with client_of(face, server.address, transport=transport) as (client, wait):
        wait(client.conditional_accumulator("float32", ()))
        eventually(lambda: num_held(server), (1).__eq__)
    assert server.inspect(lambda each: each.registry.factory.count.used) == 0


@pytest.mark.parametrize("face", FACES)
def test_the_user_goes_on_after_the_key_has_expired(tmp_path: Path, face: str) -> None:
    clock = SkippingClock()
    with serving(tmp_path, ME, parts=Parts(clock=clock)) as local:
        with client_of(face, local.address, transport="grpc") as (client, wait):
            handle = wait(client.put(LARGE))
            clock.skipped += LIFETIME_SECONDS / 2
            assert wait(client.get(handle)).shape == LARGE.shape
            clock.skipped += LIFETIME_SECONDS / 2
            assert wait(client.server_info()).version
        key = key_of(local.address)
        assert ask(local.address, f"Gradserve-User {key}")
        clock.skipped += LIFETIME_SECONDS
        assert "the key of this user has expired" in refusal(local.address, f"Gradserve-User {key}")


@pytest.mark.parametrize("face", FACES)
def test_the_user_goes_on_with_another_run_of_the_server(tmp_path: Path, face: str) -> None:
    with serving(tmp_path, ME) as first:
        client, wait = (using := client_of(face, first.address)).__enter__()
        wait(client.conditional_accumulator("float32", ()))
        eventually(lambda: num_held(first), (1).__eq__)
        key = key_of(first.address)
    with serving(tmp_path, ME) as second:
        assert "is of another run of the server" in refusal(second.address, f"Gradserve-User {key}")
        wait(client.conditional_accumulator("float32", ()))
        eventually(lambda: num_held(second), (1).__eq__)
        using.__exit__(None, None, None)


@pytest.mark.parametrize("face", FACES)
def test_a_user_who_is_taken_from_the_file_is_refused(tmp_path: Path, face: str) -> None:
    with serving(tmp_path, ME) as local, client_of(face, local.address, transport="grpc") as (client, wait):
        handle = wait(client.put([1.0]))
        replace_file(tmp_path / "access.toml", entries(ME + 1))
        local.inspect(lambda each: each.access.look())  # type: ignore[union-attr]
        with pytest.raises(gradserve.UnauthenticatedError, match=f"does not know the user {ME} of this connection"):
            wait(client.get(handle))
        replace_file(tmp_path / "access.toml", entries(ME))
        local.inspect(lambda each: each.access.look())  # type: ignore[union-attr]
        assert wait(client.get(handle)) == [1.0]


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_user_is_refused(tmp_path: Path, face: str) -> None:
    with serving(tmp_path, ME + 1) as local:
        with (
            client_of(face, local.address) as (stranger, wait),
            pytest.raises(gradserve.UnauthenticatedError, match=f"does not know the user {ME} of this connection"),
        ):
            wait(stranger.put([1.0]))
        settings = without_retries(PATIENCE_SECONDS, Transport.SHARED_MEMORY)
        with (
            connect_with(local.address, settings) as demanding,
            pytest.raises(gradserve.GradserveError, match=f"does not know the user {ME}"),
        ):
            demanding.put([1.0])


@pytest.mark.parametrize("face", FACES)
def test_without_a_socket_for_shared_memory_users_need_a_token(tmp_path: Path, face: str) -> None:
    words = (
        "connect with token=, or set the environment variable GRADSERVE_TOKEN; without a token, users are known only "
        r"where they share memory with the server \(shared_memory: the server has no socket for it\)"
    )
    with (
        serving(tmp_path, ME, shared_memory_socket="off") as local,
        client_of(face, local.address) as (client, wait),
        pytest.raises(gradserve.UnauthenticatedError, match=words),
    ):
        wait(client.put([1.0]))


def test_a_key_counts_at_unix_sockets_only(tmp_path: Path) -> None:
    with serving(tmp_path, ME) as local, serving(tmp_path, ME, listen="127.0.0.1:0") as remote:
        keys = local.inspect(lambda each: each.access._keys)  # type: ignore[union-attr]
        remote.inspect(lambda each: setattr(each.access, "_keys", keys))
        key = key_of(local.address)
        assert ask(local.address, f"Gradserve-User {key}")
        assert "counts at Unix sockets only" in refusal(remote.address, f"Gradserve-User {key}")
        assert "does not know this token" in refusal(local.address, f"Bearer {key}")
        with (
            gradserve.connect(remote.address) as elsewhere,
            pytest.raises(gradserve.UnauthenticatedError, match=r"GRADSERVE_TOKEN \[GS_\w+\]$"),
        ):
            elsewhere.put([1.0])


def test_who_shows_something_else_gets_no_key(server: LocalServer) -> None:
    assert key_of(server.address)
    assert key_of(server.address, TOKENS["worker"]) == ""
    with LocalServer(ServerConfig(runtime=RuntimeConfig(device="cpu", warm_up=False))) as open_to_all:
        assert key_of(open_to_all.address) == ""


def test_the_key_shows_nowhere(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with gradserve.connect(server.address, transport="grpc") as client:
        handle = client.put(LARGE)
        client.get(handle, release=True)
        with pytest.raises(gradserve.NotFoundError) as missing:
            client.get(handle)
        ((_, value),) = carrier_of(client)._shown.metadata
        shown += [repr(client), repr(transport_of(client)), str(missing.value), repr(missing.value)]
    key = value.partition(" ")[2]
    assert ask(server.address, value)
    wrong = key[:-8] + "AAAAAAA="
    shown += [refusal(server.address, f"Gradserve-User {wrong}"), caplog.text]
    for text in shown:
        assert key[:20] not in text
