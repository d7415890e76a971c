"""Keeps tensors in a store at once, from any thread that may use it."""

from collections.abc import Sequence
from typing import Any

from gradserve_server.tensors.store import TensorStore


def keep_now(store: TensorStore, arrays: Sequence[Any], lease: float | None, **options: Any) -> list[str]:
    """Does what `store.keep` does; no other task gets its turn meanwhile."""
    keeping = store.keep(arrays, lease, **options)
    while True:
        try:
            keeping.send(None)
        except StopIteration as kept:
            handles: list[str] = kept.value
            return handles
