"""Aggregators in processes of their own that clients have started."""

from pathlib import Path

import psutil

IDLE_SECONDS = 0.3
"""The time after which they end."""


def running_in(folder: Path) -> list[psutil.Process]:
    """Returns the aggregators that run and whose socket is in a folder."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        command = each.info["cmdline"] or []
        if "serve" in command and any(str(folder) in part for part in command):
            found.append(each)
    return found
