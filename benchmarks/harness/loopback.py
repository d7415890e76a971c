"""The bytes that went over the loopback device: the evidence that a contestant really moves its data."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/sys/class/net/lo/statistics/rx_bytes")


def received_bytes() -> int | None:
    """Returns the bytes received on loopback since boot, by all processes; None if the system does not count them."""
    try:
        return int(_COUNTERS.read_text(encoding="ascii"))
    except OSError:
        return None
