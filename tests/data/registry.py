"""A stand-in for the server that gives seats, for batches that follow rounds which a test makes up."""

from types import SimpleNamespace
from typing import Any, TypeVar, cast

from gradserve import Client
from gradserve.data import Batches

BatchesT = TypeVar("BatchesT", bound=Batches[Any])


class Registry:
    """Both a client and its only accumulator."""

    def __init__(self) -> None:
        self.worker_ids: list[str] = []

    def gradient_accumulator(self, *_: object, **_options: object) -> "Registry":
        return self

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(worker_ids=self.worker_ids)

    def apply_grad(self, _gradient: object, worker_id: str) -> None:
        self.worker_ids.append(worker_id)


def begun(batches: BatchesT, registry: Registry, worker_id: str) -> BatchesT:
    batches.begin(cast("Client", registry), "run", worker_id=worker_id)
    return batches
