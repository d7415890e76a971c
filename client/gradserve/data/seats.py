"""The numbers of the workers of a run: each has one that no other worker has, and all know it."""

import time
from functools import partial

import numpy as np

from gradserve.client import Client
from gradserve.errors import AbortedError, AlreadyExistsError, InvalidArgumentError
from gradserve.results import DenseSpec

_IDLE_SECONDS = 30 * 24 * 3600.0
_PAUSE_SECONDS = 0.05
_NUM_PAUSES = 200
"""An aggregator between client and server passes a gradient on after a second or so."""


class Seats:
    """The seats of a run: the order in which workers sent a gradient to accumulator NAME/seats, whose round never ends.

    At durability "gradient", as a restart of the server must not change the order.
    """

    def __init__(self, client: Client, name: str, container: str, durability: str | None) -> None:
        """Finds the accumulator, or makes it.

        Args:
            client: The client.
            name: The name of the run, with what distinguishes it from others of the same name.
            container: The namespace of the name.
            durability: That of the run.
        """
        self._name = name
        find = partial(
            client.gradient_accumulator,
            {"seat": DenseSpec("float32", ())},
            shared_name=f"{name}/seats",
            container=container,
            idle_lease=_IDLE_SECONDS,
            device="cpu",
            sharded=False,
        )
        try:
            self._accumulator = find(durability="none" if durability == "none" else "gradient")
        except (AlreadyExistsError, InvalidArgumentError):  # the server has no state directory
            self._accumulator = find(durability="none")
        self.numbers: dict[str, int] = {}

    def read(self) -> None:
        """Asks the server for the seats of all workers; also keeps them for longer."""
        self.numbers = {each: number for number, each in enumerate(self._accumulator.info().worker_ids)}

    def take(self, worker_id: str) -> None:
        """Gives a worker a seat, unless it has one from before.

        Raises:
            AbortedError: The server has it not.
        """
        self.read()
        if worker_id in self.numbers:
            return
        self._accumulator.apply_grad({"seat": np.float32(1)}, worker_id=worker_id)
        for _ in range(_NUM_PAUSES):
            self.read()
            if worker_id in self.numbers:
                return
            time.sleep(_PAUSE_SECONDS)
        raise AbortedError(f"worker {worker_id!r} has asked for a seat in run {self._name!r}, and has none")

    def find(self, worker_ids: set[str]) -> None:
        """Makes sure that `numbers` has the seats of some workers.

        Raises:
            AbortedError: One of them has none.
        """
        if not worker_ids - self.numbers.keys():
            return
        self.read()
        if missing := sorted(worker_ids - self.numbers.keys()):
            raise AbortedError(
                f"worker {missing[0]!r} was in a round of run {self._name!r}, and nobody knows with which samples: it "
                "has no `data`, or has them from elsewhere. All workers of the run need the same `data`"
            )
