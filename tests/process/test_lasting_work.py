"""Work that goes on as long as a server: a fault in it is logged, and ends neither the work nor the server."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol import lasting
from gradserve_server.accumulators.round_hold import RoundHold
from gradserve_server.config import ListenConfig, RuntimeConfig, SecurityConfig, ServerConfig
from gradserve_server.observe.observed import Summary
from gradserve_server.resources.lifetimes import Expiry
from gradserve_server.rpc.listeners.grpc.calls import IdleConnections
from gradserve_server.rpc.listeners.grpc.endpoint import LastingEndpoint
from gradserve_server.rpc.listeners.sockets.listener import SocketListener
from gradserve_server.rpc.listeners.sockets.transfers import _Mover
from gradserve_server.runtime.event_loop import LoopWatch, ServiceClock, Turn
from gradserve_server.security.access import Access
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS, entry
from tests.servers.polling import PATIENCE_SECONDS

WORK = [
    (Expiry, "run"),
    (Summary, "run"),
    (Access, "follow"),
    (IdleConnections, "keep_room"),
    (LastingEndpoint, "_supervise"),
    (SocketListener, "_accept"),
    (RoundHold, "_write"),
    (LoopWatch, "_watch"),
]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "PAUSE_SECONDS", 0.0)


def config(folder: Path) -> ServerConfig:
    """A server with all work that goes on."""
    access = folder / "access.toml"
    access.write_text(entry("worker", {"*": "worker"}, TOKENS["worker"]))
    return ServerConfig(
        listen=ListenConfig(rounds_file=str(folder / "rounds"), http_listen="off"),
        runtime=RuntimeConfig(device="cpu", warm_up=False, event_loop_warning_seconds=1000.0),
        security=SecurityConfig(access=str(access)),
    )


@pytest.mark.parametrize(("owner", "method"), WORK, ids=lambda each: getattr(each, "__name__", each))
def test_it_begins_again(
    owner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done, again = getattr(owner, method), threading.Event()
    failures = iter([RecursionError("planted"), MemoryError("planted")])

    def fail_first(*arguments: Any) -> Any:
        if failure := next(failures, None):
            raise failure
        again.set()
        return done(*arguments)

    monkeypatch.setattr(owner, method, fail_first)
    with LocalServer(config(tmp_path)) as server:
        server.inspect(lambda running: running.round_hold.hold())  # type: ignore[union-attr]
        assert again.wait(PATIENCE_SECONDS)
        with gradserve.connect(server.address, token=TOKENS["worker"], timeout=PATIENCE_SECONDS) as client:
            client.server_info()
    records = [each for each in caplog.records if "planted" in str(each.exc_info)]
    assert records
    for record in records:  # of each socket one
        assert record.levelno == logging.ERROR
        assert "failed and starts again" in record.getMessage()


def test_payloads_move_on_after_a_fault_of_their_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turn, failed = _Mover._turn, threading.Event()

    def fail_once(mover: _Mover) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("planted")
        turn(mover)

    monkeypatch.setattr(_Mover, "_turn", fail_once)
    with LocalServer(ServerConfig(runtime=RuntimeConfig(device="cpu", warm_up=False))) as local:
        assert failed.wait(PATIENCE_SECONDS)
        with gradserve.connect(local.address, transport="bulk", timeout=PATIENCE_SECONDS) as client:
            value = np.ones(1_000_000, np.float32)
            np.testing.assert_array_equal(client.get(client.put(value)), value)
    assert "moving payloads failed and starts again" in caplog.text


def test_what_cannot_be_ended_keeps_nothing_else_that_has_expired() -> None:
    ended = []

    def fail(_turn: Turn) -> int:
        raise ValueError("planted")

    def end(_turn: Turn) -> int:
        ended.append("in turns")
        return 1

    async def end_all() -> int:
        ended.append("as a whole")
        return 1

    expiry = Expiry(ServiceClock(lambda: 0.0, 1.0), {"a": fail, "b": end}, {"c": end_all}, interval=0.0)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(expiry.run())
    assert raised.group_contains(ValueError, match="planted")
    assert ended == ["in turns", "as a whole"]
