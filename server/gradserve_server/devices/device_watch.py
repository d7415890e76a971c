"""Finds out whether a device was lost, after something has failed."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gradserve_server.devices.device import Device

_log = logging.getLogger(__name__)


class DeviceWatch:
    """Looks at a device after each unexpected error, away from the event loop; one look at a time.

    Some errors of CUDA, such as an access to memory that is not there, spoil the whole process: whatever it asks of the
    GPU from then on fails in the same way, and only another process can use it. A server in such a state has to stop.
    """

    def __init__(self, device: Device, on_loss: Callable[[str], object]) -> None:
        """Takes the device, and what is called on the event loop, once, if it is lost: with the reason, in words."""
        self._device = device
        self._on_loss = on_loss
        self._is_lost = False
        # Of its own: those of ops may all be waiting for the device.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gradserve-device-watch")
        self._looking: Future[None] | None = None

    @property
    def is_looking(self) -> bool:
        """True while it looks at the device."""
        return self._looking is not None and not self._looking.done()

    def suspect(self) -> None:
        """Begins to look, unless that has begun. Called on the event loop."""
        if not self._is_lost and not self.is_looking:
            self._looking = self._threads.submit(self._look, asyncio.get_running_loop())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            why = self._device.why_lost()
        except Exception:
            _log.exception("looking at %s failed", self._device.name)
            return
        if why is not None:
            self._is_lost = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_loss, f"this process cannot use {self._device.name} any more: {why}")

    def close(self) -> None:
        """Ends the thread, without waiting for a look."""
        self._threads.shutdown(wait=False, cancel_futures=True)
