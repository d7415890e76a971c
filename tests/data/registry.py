"""Seats without a server, for batches that follow rounds which a test makes up."""

from typing import TypeVar

from gradserve.data import Batches

BatchesT = TypeVar("BatchesT", bound=Batches[int])


class Registry:
    """Numbers in the order in which workers came."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def find(self, worker_ids: set[str]) -> None:
        assert worker_ids <= self.numbers.keys()


def begun(batches: BatchesT, seats: Registry, worker_id: str) -> BatchesT:
    """Begins as a worker does with a server."""
    seats.numbers.setdefault(worker_id, len(seats.numbers))
    batches._seats, batches._worker_id = seats, worker_id  # type: ignore[assignment]
    return batches
