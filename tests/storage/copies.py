"""Copies of state directories, as another server would find them."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def copy_state(path: Path, copy: Path, ignore: Callable[[Any, list[str]], Iterable[str]] | None = None) -> Path:
    """Copies folders with state directories; returns `copy`.

    A segment has 64 MB of space, of which tests use a few kB: copying the rest takes longer than most of them.

    Args:
        path: What to copy.
        copy: Where to; nothing is there yet.
        ignore: See `shutil.copytree`.
    """
    return Path(shutil.copytree(path, copy, ignore=ignore, copy_function=_copy_written))


def _copy_written(source: str, target: str) -> None:
    """Copies what was written of a file; the rest reads as zeros, as in the original."""
    with open(source, "rb", buffering=0) as original, open(target, "xb", buffering=0) as copy:
        number, size = original.fileno(), os.fstat(original.fileno()).st_size
        copy.truncate(size)
        end = 0
        while end < size:
            try:
                start = os.lseek(number, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # nothing but zeros up to the end
            end = os.lseek(number, start, os.SEEK_HOLE)
            copy.seek(start)
            original.seek(start)
            while start < end and (content := original.read(min(end - start, 1 << 20))):
                copy.write(content)
                start += len(content)
    shutil.copystat(source, target)
