"""Collects the tests quickly in several processes at once."""

import contextlib
import fcntl
import gc
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def few_collections_of_garbage() -> Iterator[None]:
    """Keeps the collector of garbage off what the block makes: millions of objects that stay as long as the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def first_alone(folder: Path) -> Iterator[None]:
    """Lets the process that comes first run the block alone; the others run it afterwards, at the same time.

    After a fresh checkout, the first one compiles all modules to bytecode, which takes as long as all the rest. The
    others find that done. If it fails, the next one takes its place.

    Args:
        folder: A folder of these processes, and of no others.
    """
    with (folder / "collected").open("a+") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        note.seek(0)
        if note.read():
            fcntl.flock(note, fcntl.LOCK_UN)
        yield
        note.write("collected")
