"""Two network devices (TUN) between which a thread passes packets on with a delay, so that TCP itself sees the delay.

A relay of connections (`relay`) ends TCP on either side of it: to TCP, its links are short.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

MTU = 9000
"""Jumbo frames: with 1500 bytes, a thread in Python forwards less than 1 Gbit/s."""
_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_AT_ONCE = 64


class NoPacketsError(Exception):
    """The machine does not let a process be a network device; the message says why."""


@contextlib.contextmanager
def delaying_devices(names: tuple[str, str], delay: float) -> Iterator[None]:
    """Makes two devices, until the end of the block: what one sends arrives at the other `delay` seconds later.

    Raises:
        NoPacketsError: This process cannot make such devices.
    """
    with contextlib.ExitStack() as stack:
        numbers = []
        for name in names:
            try:
                number = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                stack.callback(os.close, number)
                fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
            except OSError as error:
                raise NoPacketsError(f"no TUN device: {error.strerror}") from None
            numbers.append(number)
        stop_read, stop_write = os.pipe()
        stack.callback(os.close, stop_read)
        threads = [
            threading.Thread(target=_pass_on, args=(source, target, delay, stop_read), name="delaying-packets")
            for source, target in (numbers, reversed(numbers))
        ]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            os.close(stop_write)
            for each in threads:
                each.join()


def _pass_on(source: int, target: int, delay: float, stop: int) -> None:
    """Passes packets on until the other end of the pipe `stop` is closed."""
    packets = deque[tuple[float, bytes]]()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(stop, select.POLLIN)
    while True:
        while packets and packets[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the device is not up (yet): the packet is lost
                os.write(target, packets.popleft()[1])
        wait = max(packets[0][0] - time.monotonic(), 0.0) * 1e3 if packets else None
        ready = [number for number, _ in poll.poll(wait)]
        if stop in ready:
            return
        if source in ready:
            due = time.monotonic() + delay
            with contextlib.suppress(OSError):  # there are no more
                for _ in range(_AT_ONCE):
                    packets.append((due, os.read(source, MTU)))
