"""Workers that use an aggregator at the same time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import gradserve
from tests.servers.polling import PATIENCE_SECONDS

T = TypeVar("T")


@contextmanager
def clients_of(address: str | Sequence[str], count: int, **how: Any) -> Iterator[list[gradserve.Client]]:
    """Connects workers, until the end of the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(gradserve.connect(address, timeout=PATIENCE_SECONDS, **how)) for _ in range(count)]


def at_once(work: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Calls a function for each worker at the same time; returns the results, or raises the first error."""
    with ThreadPoolExecutor(len(arguments[0])) as threads:
        return list(threads.map(work, *arguments))
