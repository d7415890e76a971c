"""The event loop of a server."""

import asyncio
import sys

import pytest

import gradserve
from gradserve_server.runtime.event_loop import new_event_loop
from gradserve_testing import LocalServer


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop is not made for Windows")
def test_uvloop_where_it_is_installed() -> None:
    import uvloop

    loop = new_event_loop()
    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_asyncio_serves_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with LocalServer() as server:
        assert type(server.inspect(lambda _: asyncio.get_running_loop())).__module__.startswith("asyncio.")
        for transport in ("bulk", "grpc"):
            with gradserve.connect(server.address, transport=transport) as client:
                accumulator = client.conditional_accumulator("float32")
                accumulator.apply_grad(3)
                assert accumulator.take_grad(1) == 3
                accumulator.delete()
