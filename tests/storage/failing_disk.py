"""Disks that fail, for tests of what is durable."""

import errno
import os
from typing import Any

import pytest

from gradserve_server.storage.segments import Segments


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all space taken, on disk and in the segments."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Segments, "allocate_free", lambda *_: None)
    monkeypatch.setattr(Segments, "allocate", full)


def break_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every flush fail."""

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", broken)
