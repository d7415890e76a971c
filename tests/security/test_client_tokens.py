"""Tokens in both clients: where they come from, and where they never show."""

import asyncio
import logging
from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve.transport.settings import ConnectionSettings, Token
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS
from tests.servers.polling import PATIENCE_SECONDS


def ask(face: str, address: str, token: str | None) -> str:
    """Returns the server's version as a client of either face learns it."""
    if face == "blocking":
        with gradserve.connect(address, token=token, timeout=PATIENCE_SECONDS) as client:
            return client.server_info().version

    async def ask() -> str:
        async with gradserve.aio.connect(address, token=token, timeout=PATIENCE_SECONDS) as client:
            return (await client.server_info()).version

    return asyncio.run(ask())


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_both_clients_show_their_token(guarded: LocalServer, face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gradserve.UnauthenticatedError, match="connect with token=, or set .* GRADSERVE_TOKEN"):
        ask(face, guarded.address, None)
    assert ask(face, guarded.address, TOKENS["worker"]) == gradserve.__version__
    monkeypatch.setenv("GRADSERVE_TOKEN", TOKENS["worker"])
    assert ask(face, guarded.address, None) == gradserve.__version__
    with pytest.raises(gradserve.PermissionDeniedError):
        ask(face, guarded.address, TOKENS["idle"])
    monkeypatch.setenv("GRADSERVE_TOKEN", "")
    with pytest.raises(gradserve.UnauthenticatedError):
        ask(face, guarded.address, None)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_demanded_way_without_a_token_is_no_fault_of_the_way(guarded: LocalServer, face: str) -> None:
    connect: Any = gradserve.connect if face == "blocking" else gradserve.aio.connect

    async def ask() -> None:
        client = connect(guarded.address, transport="bulk", timeout=PATIENCE_SECONDS)
        answer = client.put([1.0])
        if face != "blocking":
            await answer

    with pytest.raises(gradserve.UnauthenticatedError):
        asyncio.run(ask())


@pytest.mark.parametrize("token", ["", "a b", "a\n", "é", "x" * 1025, 5, b"secret"])
def test_what_cannot_be_a_token_is_refused_without_showing_it(token: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="visible ASCII characters without spaces") as raised:
        gradserve.connect("localhost", token=token)
    assert "secret" not in str(raised.value)


def test_the_token_shows_nowhere(guarded: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = TOKENS["worker"]
    settings = ConnectionSettings(token=Token(token))
    with gradserve.connect(guarded.address, token=token, timeout=PATIENCE_SECONDS) as client:
        client.get(client.put([1.0] * 1000))
        with pytest.raises(gradserve.PermissionDeniedError) as raised:
            client.delete_accumulator("x", container="team")
        shown = [repr(client), repr(settings), repr(settings.token), str(raised.value), repr(raised.value), caplog.text]
    wrong = token[:-1]
    with gradserve.connect(guarded.address, token=wrong) as client, pytest.raises(gradserve.UnauthenticatedError) as no:
        client.server_info()
    access = guarded.inspect(lambda server: repr(server.access.identify) + repr(server.access._policy))  # type: ignore[union-attr]
    shown += [str(no.value), repr(no.value), caplog.text, access]
    for text in shown:
        assert wrong not in text


@pytest.mark.parametrize(
    ("address", "warnings"),
    [("gradserve.example", 1), ("192.0.2.1:50051", 1), ("localhost", 0), ("[::1]:5", 0), ("unix:/tmp/x.sock", 0)],
)
def test_a_token_that_travels_unencrypted_gives_one_warning(
    address: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    gradserve.connect(address, token=TOKENS["worker"]).close()
    gradserve.connect(address).close()
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(found) == warnings
    assert all("travels unencrypted" in each and TOKENS["worker"] not in each for each in found)
