"""How far a long command is, on standard error: if that is a terminal, and nobody asked for JSON."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # imported late: other commands do not need it, and start sooner
    from gradserve_server.storage.store import StateStore


def shows_progress(*, as_json: bool = False) -> bool:
    """Returns True if a command shows how far it is."""
    return not as_json and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def bytes_of(label: str, num_bytes: int) -> Iterator[Callable[[int], object] | None]:
    """Shows a bar with bytes and their rate; gives what adds bytes, None if nothing is shown."""
    if not shows_progress():
        yield None
        return
    from gradserve.progress_line import ProgressLine
    from gradserve.transport.progress import TransferProgress

    line = ProgressLine(sys.stderr, label)
    with TransferProgress(line, line) as progress:
        progress.receives(num_bytes)
        yield progress.moved
        progress.end()


@contextmanager
def reading(store: "StateStore", num_bytes: int | None = None) -> Iterator[None]:
    """Shows how much of a state directory has been read: of so many bytes, or of all that is there."""
    with bytes_of("reading", store.num_bytes if num_bytes is None else num_bytes) as add:
        store.on_read = add
        try:
            yield
        finally:
            store.on_read = None


@contextmanager
def steps(label: str, number: int, *, as_json: bool = False) -> Iterator[Callable[[], object]]:
    """Shows a bar of steps; gives what is called after each."""
    if not shows_progress(as_json=as_json):
        yield lambda: None
        return
    with click.progressbar(length=number, label=label, file=sys.stderr) as bar:
        yield lambda: bar.update(1)
