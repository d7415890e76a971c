"""The blocks of an endless sequence: which have counted, which one each worker takes, and which samples are in them.

Workers new to a run take blocks by their seats: each has one that no other worker has, and all know it. The order of
the samples in an epoch is computed for single places of it, without memory for the others.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from gradserve.client import Client
from gradserve.errors import AbortedError, AlreadyExistsError, InvalidArgumentError
from gradserve.results import DenseSpec


@dataclass
class Blocks:
    """The state on which all workers at the same step agree. It changes with each round, and with nothing else.

    Workers of the last round take the first blocks that have not counted, in the order of their ids; all others take
    those behind, by their seats, which no two workers share. So no two workers take the same block in a step, and a
    block that did not count is taken again in the next step.

    Attributes:
        first: The first block that has not counted.
        ahead: The later blocks that have counted.
        members: The ids of the workers of the last round, sorted.
    """

    first: int = 0
    ahead: set[int] = field(default_factory=set)
    members: list[str] = field(default_factory=list)

    def block_of(self, worker_id: str, seats: Mapping[str, int]) -> int:
        """Returns the block of a worker in the coming round.

        Raises:
            KeyError: It was not in the last round, and has no seat.
        """
        is_member = worker_id in self.members
        rank = self.members.index(worker_id) if is_member else len(self.members) + seats[worker_id]
        block = self.first + rank
        for counted in sorted(self.ahead):
            if counted > block:
                break
            block += 1
        return block

    def end_round(self, worker_ids: Iterable[str], seats: Mapping[str, int]) -> None:
        """Notes the end of a round, in which the gradients of these workers counted, and so did their blocks."""
        members = sorted(set(worker_ids))
        self.ahead |= {self.block_of(each, seats) for each in members}
        while self.first in self.ahead:
            self.ahead.remove(self.first)
            self.first += 1
        self.members = members

    def has_counted(self, block: int) -> bool:
        """Returns whether a block has counted."""
        return block < self.first or block in self.ahead


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


_NUM_ROUNDS = 16
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def samples_at(places: NDArray[np.uint64], num_samples: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Returns the samples at some places of an epoch: of all places, a permutation, the same on every machine.

    It is a Feistel network over the rows and columns of the smallest rectangle, nearly a square, that has room for all
    samples: columns are moved by a random number of their row, rows by one of their column, and so on. A place that
    ends where there is no sample goes through it again.

    Args:
        places: Numbers from 0 to num_samples - 1, uint64, of any shape.
        num_samples: The number of samples, below 2^40.
        seed: Chooses the orders of all epochs.
        epoch: The number of the epoch.

    Returns:
        The numbers of the samples, of the same shape.
    """
    width = isqrt(num_samples - 1) + 1
    height = -(-num_samples // width)
    keys = _keys(seed, epoch)
    samples = _moved(places, np.uint64(width), np.uint64(height), keys)
    while (is_outside := samples >= num_samples).any():
        samples[is_outside] = _moved(samples[is_outside], np.uint64(width), np.uint64(height), keys)
    return samples


def _moved(
    places: NDArray[np.uint64], width: np.uint64, height: np.uint64, keys: tuple[np.uint64, ...]
) -> NDArray[np.uint64]:
    rows, columns = np.divmod(places, width)
    for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
        columns = (columns + _random(rows, row_key)) % width
        rows = (rows + _random(columns, column_key)) % height
    return rows * width + columns


def _random(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Returns random numbers below 2^32 that follow from numbers and a key."""
    mixed = (numbers ^ key) * _FACTORS[0]
    return ((mixed ^ (mixed >> _HALF)) * _FACTORS[1]) >> _HALF


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    text = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * _NUM_ROUNDS)
    return tuple(np.frombuffer(text, "<u8").astype(np.uint64))
