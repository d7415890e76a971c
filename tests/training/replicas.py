"""Workers that train a model of one vector with made-up gradients."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import gradserve
from gradserve.training import Advance, State, Worker
from tests.servers.polling import eventually

SIZE = 5
RATE = np.float32(0.1)


class Replica:
    """A worker with its weights, which it changes as any framework would."""

    def __init__(self, client: gradserve.Client, name: str, worker_id: str, num_required: int, **options: Any) -> None:
        self._generator = np.random.default_rng(sum(worker_id.encode()))
        self.weights: NDArray[Any] = self._generator.normal(size=SIZE).astype(np.float32)
        self.num_loaded = 0
        self.worker = Worker(
            client, {"w": self.weights}, name=name, num_required=num_required, worker_id=worker_id, **options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.worker.__exit__(*error)

    @property
    def step(self) -> int:
        return self.worker.step

    def begin(self, **how: Any) -> Self:
        self._load(self.worker.begin(self.state, **how))
        return self

    def state(self) -> State:
        return State({"w": self.weights}, {"rate": float(RATE)})

    def train(self, gradient: NDArray[np.float32] | None = None, weight: float = 1.0) -> Advance:
        """Takes one step."""
        own = self._generator.normal(size=SIZE).astype(np.float32) if gradient is None else gradient
        advance = self.worker.exchange({"w": own}, weight)
        self._load(advance.state)
        for average in advance.averages:
            self._apply(average)
        return advance

    def _load(self, state: State | None) -> None:
        if state is not None:
            self.num_loaded += 1
            self.weights = np.array(state.tensors["w"])

    def _apply(self, average: Mapping[str, NDArray[Any]]) -> None:
        self.weights = self.weights - RATE * average["w"]


def have_equal_weights(*replicas: Replica) -> bool:
    """Returns True if all are at the same step with the same weights."""
    first, *others = replicas
    return all(each.step == first.step and np.array_equal(each.weights, first.weights) for each in others)


def waits_for_its_round(replica: Replica, threads: ThreadPoolExecutor) -> Future[Advance]:
    """Begins a step of a worker, and returns when its gradient is in."""
    before = replica.worker.accumulator.num_accumulated()
    waiting = threads.submit(replica.train)
    eventually(replica.worker.accumulator.num_accumulated, lambda num: num > before)
    return waiting


@contextmanager
def training(replica: Replica) -> Iterator[None]:
    """Lets a worker train in a thread during a block."""
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(0.01):
            replica.train()

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train)
        try:
            yield
        finally:
            is_over.set()
        trained.result()
