"""The state of one thread that uses a GPU."""

import time
from typing import Any

from gradserve_server.devices.cuda.copies import ThreadCopies
from gradserve_server.devices.cuda.counts import Counts
from gradserve_server.devices.device import Array

_POLLING_SECONDS = 50e-6
"""For so long a thread asks again and again whether its work is done, which takes a core. Then it sleeps: waking up
takes some tens of microseconds, as much as a small kernel."""


class DeviceThread:
    """A thread's state on a device; `depth` counts its nested blocks that make the device current."""

    def __init__(self, stream: Any, finished: Any, copies: ThreadCopies, counts: Counts) -> None:
        self.stream = stream
        self.copies = copies
        self.counts = counts
        self.depth = 0
        self.scratch: Array | None = None
        self.tickets: Array | None = None
        self.held: list[object] = []
        """What must stay until the stream is done."""
        self._finished = finished

    def wait(self) -> None:
        """Returns when everything in the stream is done."""
        self._finished.record(self.stream)
        begin = now = time.perf_counter()
        while not self._finished.done:
            if now - begin >= _POLLING_SECONDS:
                self._finished.synchronize()
                now = time.perf_counter()
                break
            now = time.perf_counter()
        self.counts.wait_seconds += now - begin
        self.held.clear()
