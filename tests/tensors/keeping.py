"""Keeps tensors in a store at once, from any thread that may use it."""

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from gradserve_server.tensors.store import TensorStore

T = TypeVar("T")


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Runs a call that waits for nothing but its next turn; no other task gets its turn meanwhile."""
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result


def keep_now(store: TensorStore, arrays: Sequence[Any], lease: float | None, **options: Any) -> list[str]:
    """Does what `store.keep` does; no other task gets its turn meanwhile."""
    return finished(store.keep(arrays, lease, **options))
