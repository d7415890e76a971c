"""The log names what holds the event loop."""

import logging
import re
import time

import pytest

from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.runtime.event_loop import LoopWatch
from gradserve_testing import LocalServer
from tests.servers.polling import eventually, eventually_async

LONGEST = 0.05


def hold_the_loop() -> None:
    time.sleep(4 * LONGEST)


async def test_a_turn_that_takes_too_long_is_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(LONGEST)
    watch.start()

    async def held() -> str:
        hold_the_loop()
        return caplog.text

    text = await eventually_async(held, lambda text: "hold_the_loop" in text)
    watch.stop()
    found = re.search(r"the event loop was busy for (\S+) s \((\S+) s of processor time\) in (.*hold_the_loop.*)", text)
    assert found is not None
    busy, processor_time, functions = found.groups()
    assert float(busy) > max(LONGEST, float(processor_time))
    assert "test_loop_watch.hold_the_loop:" in functions


def test_a_server_watches_its_own_if_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    watching = RuntimeConfig(warm_up=False, event_loop_warning_seconds=LONGEST)
    with caplog.at_level(logging.WARNING), LocalServer(ServerConfig(runtime=watching)) as local:

        def held() -> bool:
            local.inspect(lambda _: time.sleep(4 * LONGEST))
            return "LocalServer.inspect" in caplog.text

        eventually(held)
    assert "the event loop was busy for" in caplog.text
