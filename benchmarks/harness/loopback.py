"""The bytes that went over network devices: the evidence that a contestant really moves its data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_DEVICES = Path("/sys/class/net")
_COUNTERS = _DEVICES / "lo/statistics/rx_bytes"


def received_bytes() -> int | None:
    """Returns the bytes received on loopback since boot, by all processes; None if the system does not count them."""
    try:
        return int(_COUNTERS.read_text(encoding="ascii"))
    except OSError:
        return None


def sent_bytes(devices: Iterable[str]) -> int:
    """Returns the bytes that devices have sent since they were made."""
    return sum(int((_DEVICES / each / "statistics/tx_bytes").read_text(encoding="ascii")) for each in devices)
