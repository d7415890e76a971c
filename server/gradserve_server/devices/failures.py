"""Failures of devices: memory that does not suffice at first, and GPUs that a process has lost."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from gradserve_server.devices.device import Device

_log = logging.getLogger(__name__)


class DeviceWatch:
    """Checks after each unexpected error whether the device is lost; away from the event loop, one check at a time.

    Some errors of CUDA, such as an access to memory that is not there, spoil the whole process: whatever it asks of the
    GPU from then on fails in the same way, and only another process can use it. A server in such a state has to stop.
    """

    def __init__(self, device: Device, on_loss: Callable[[str], object]) -> None:
        self._device = device
        self._on_loss = on_loss
        self._is_lost = False
        # A thread of its own, because those of ops may all be waiting for the device.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gradserve-device-watch")
        self._looking: Future[None] | None = None

    @property
    def is_looking(self) -> bool:
        """True while it checks the device."""
        return self._looking is not None and not self._looking.done()

    def suspect(self) -> None:
        """Starts a check, unless one is under way. Called on the event loop."""
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
        """Ends the thread, without waiting for a check."""
        self._threads.shutdown(wait=False, cancel_futures=True)


P = ParamSpec("P")
T = TypeVar("T")


class DeviceFullError(MemoryError):
    """A device's memory does not suffice, even after its cache has been freed."""


def with_all_memory(device: Device, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function. If the device's memory does not suffice, frees what it keeps for later and calls once more.

    The function must be repeatable.

    Raises:
        DeviceFullError: That did not help.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not device.is_full(error):
            raise
    # Here the error is gone, and with it the arrays of the first attempt.
    device.free_cached()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not device.is_full(error):
            raise
        raise DeviceFullError(str(error)) from None
