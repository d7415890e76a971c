"""A call of a method whose name is not UTF-8 ends gRPC's server for asyncio, and not ours."""

import asyncio
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from gradserve_protocol.address import Address
from gradserve_server.rpc.health.check import check_health
from gradserve_server.rpc.listeners.grpc.endpoint import Endpoint
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_http2 import GOAWAY, HELLO, call, kinds_of, send

FATAL = HELLO + call(b"/gradserve.v1.\xff\xfe/Method", b"")
LISTEN: dict[str, Callable[[Path], str]] = {
    "IPv4": lambda _: "127.0.0.1:0",
    "all of a host": lambda _: "localhost:0",
    "Unix socket": lambda folder: f"unix:{folder}/socket",
}


def send_fatal(address: str) -> None:
    """Sends it, and waits until gRPC's server says that it ends."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        place: str | tuple[str, int] = address.removeprefix("unix:")
    else:
        host, _, port = address.rpartition(":")
        connection = socket.socket()
        place = (host, int(port))
    with connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(place)
        connection.sendall(FATAL)
        received = b""
        while GOAWAY not in kinds_of(received):
            received += connection.recv(1 << 16)


@pytest.mark.parametrize("kind", LISTEN)
def test_the_server_serves_on(tmp_path: Path, kind: str) -> None:
    with ServerProcess(tmp_path, "--warm-up", "false", listen=(LISTEN[kind](tmp_path),)) as process:
        with gradserve.connect(process.address, timeout=PATIENCE_SECONDS) as client, ThreadPoolExecutor(1) as threads:
            acc = client.conditional_accumulator("float32", (2,), "w")
            waiting = threads.submit(acc.take_grad, 3)
            eventually(lambda: acc.info().num_waiting == 1)
            for number in range(3):
                eventually(lambda: check_health(process.address, 1.0), lambda status: status == "SERVING")
                send_fatal(process.address)
                # What is there stays, and who calls comes over another connection.
                with gradserve.connect(process.address, timeout=PATIENCE_SECONDS) as other:
                    same = other.conditional_accumulator("float32", (2,), "w")
                    assert same.num_accumulated() == number
                    same.apply_grad([3, number])
            assert np.array_equal(waiting.result(PATIENCE_SECONDS), [3, 1])
            assert acc.info().global_step == 1
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert "Traceback" not in process.log
    assert process.log.count("WARNING") == process.log.count("gRPC's server ended") == 1


def test_a_server_that_stops_stops(tmp_path: Path) -> None:
    """Such calls at the moment of the stop do not keep it from ending well."""
    with ServerProcess(tmp_path, "--warm-up", "false") as process, ThreadPoolExecutor(1) as threads:

        def keep_sending() -> None:
            while process.process.poll() is None:
                with suppress(OSError):
                    send(process.address, FATAL)

        sending = threads.submit(keep_sending)
        eventually(lambda: "gRPC's server ended" in process.log)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        sending.result(PATIENCE_SECONDS)
    assert "Traceback" not in process.log


@pytest.mark.parametrize("turns", range(4))
def test_a_start_that_is_cancelled_leaves_an_endpoint_that_stops(turns: int, caplog: pytest.LogCaptureFixture) -> None:
    """A stop may find the next endpoint at any step of its start, after `turns` of the event loop."""

    async def run() -> None:
        endpoint = Endpoint([], [], [], ["127.0.0.1"])
        endpoint.bind([Address.to_listen("127.0.0.1:0")])
        starting = asyncio.create_task(endpoint.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await endpoint.stop(0)

    asyncio.run(run())
    assert not caplog.messages
