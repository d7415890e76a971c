"""A device is looked at after a fault, once at a time; its loss is told once."""

import asyncio
import threading

import pytest

from gradserve_server.devices.device import DeviceWatch
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.separate_device import SeparateDevice


class SlowDevice(SeparateDevice):
    """A device that is looked at only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[str] = []
        self.may_be_looked_at = threading.Event()

    def why_lost(self) -> str | None:
        self.looks.append(threading.current_thread().name)
        self.may_be_looked_at.wait(PATIENCE_SECONDS)
        return super().why_lost()


async def test_a_loss_is_told_once_on_the_event_loop() -> None:
    device, told = SlowDevice(), asyncio.Queue[tuple[str, str]]()
    device.failure = "an illegal memory access"
    watch = DeviceWatch(device, lambda why: told.put_nowait((why, threading.current_thread().name)))
    for _ in range(3):
        watch.suspect()
    device.may_be_looked_at.set()
    assert await told.get() == (
        "this process cannot use separate:0 any more: an illegal memory access",
        threading.current_thread().name,
    )
    watch.suspect()
    watch.close()
    assert len(device.looks) == 1
    assert told.empty()


async def test_a_device_that_works_is_looked_at_after_each_fault(caplog: pytest.LogCaptureFixture) -> None:
    device, told = SlowDevice(), list[str]()
    device.may_be_looked_at.set()
    watch = DeviceWatch(device, told.append)
    for count in range(1, 4):
        watch.suspect()
        while watch.is_looking:
            await asyncio.sleep(0)
        assert len(device.looks) == count
    watch.close()
    assert (told, caplog.messages) == ([], [])
