"""The batches of one worker, of a dataset with a length or of a stream, and how they follow the rounds of a run."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from copy import deepcopy
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve.client import Client
from gradserve.conversion.plain import as_flag, as_integer
from gradserve.data.blocks import Blocks, Seats, samples_at
from gradserve.data.prefetch import Prefetched
from gradserve.errors import InvalidArgumentError
from gradserve_protocol.argument import Argument

T = TypeVar("T")
LoadedT = TypeVar("LoadedT")
_MOST = 1 << 40
_STATE = Argument("state")


class Batches(ABC, Generic[T]):
    """The batches that one worker of a training run takes; see `sampler` and `stream`, which make them.

    `for batch in batches` takes batches until the epoch has ended, which all workers notice at the same step. Each is
    taken when it is needed, as which one it is depends on the rounds before: `batches_per_step` of them in each step,
    then the step, by `optimizer.step()` or `Worker.exchange`; a step of DiLoCo is a synchronization. If a step has
    ended with an error, or the loop was left, the batches of the same step come again. `prefetch` loads ahead.

    For one thread.

    Attributes:
        step: The step of the run to which this belongs.
    """

    def __init__(self, batch_size: int, batches_per_step: int) -> None:
        """Begins with nothing counted; see `sampler`."""
        self.step = 0
        self._batch_size = as_integer(batch_size, Argument("batch_size"), range(1, _MOST))
        self._per_step = as_integer(batches_per_step, Argument("batches_per_step"), range(1, _MOST))
        self._block_size = self._batch_size * self._per_step
        self._blocks = Blocks()
        self._seats: Seats | None = None
        self._worker_id = ""
        self._num_taken = 0
        self._is_used = False
        """True if the step of the batches that were taken has begun: they may be taken again, if it failed."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the first sample that has not counted: the number of epochs that have counted as a whole."""

    @property
    def num_counted(self) -> int:
        """The number of samples that have counted, over all workers and epochs."""
        return (self._blocks.first + len(self._blocks.ahead)) * self._block_size

    @property
    def batches_per_step(self) -> int:
        """The number of batches that a worker takes in each step."""
        return self._per_step

    @property
    def settings(self) -> dict[str, str]:
        """The settings that must be the same for all workers, as texts by name."""
        return {"batch_size": str(self._batch_size), "batches_per_step": str(self._per_step)}

    def begin(
        self, client: Client, name: str, *, worker_id: str, container: str = "", durability: str | None = None
    ) -> None:
        """Takes part in a run. Training that is given `data` does this; for loops of your own.

        Args:
            client: The client.
            name: The name of the run, the same for all workers. A run that starts over needs another name.
            worker_id: The id with which this worker sends its gradients or updates.
            container: The namespace of the name.
            durability: That of the accumulator or the parameters. "none": a server that is started again forgets the
                order of workers with the run.

        Raises:
            GradserveError: The server cannot be reached, or refuses.
        """
        seats = Seats(client, name, container, durability)
        seats.take(worker_id)
        self._seats, self._worker_id = seats, worker_id

    def advance(self, worker_ids: Iterable[str]) -> None:
        """Goes on to the next step, after a round. Training that is given `data` does this; for loops of your own.

        Args:
            worker_ids: The ids of the workers whose gradients or updates counted, as in the average or version of the
                round. Of each round, in order, also of those that this worker missed.

        Raises:
            AbortedError: A worker of the round takes part without this. Nothing has changed.
            GradserveError: The server cannot be reached. Nothing has changed.
        """
        self.advance_all([tuple(worker_ids)])

    def advance_all(self, rounds: Sequence[Collection[str]]) -> None:
        """Does what `advance` does for several rounds; nothing changes if that fails."""
        seats = self._begun()
        before: Collection[str] = self._blocks.members
        for worker_ids in rounds:
            seats.find(set(worker_ids) - set(before))
            before = worker_ids
        for worker_ids in rounds:
            self._blocks.end_round(worker_ids, seats.numbers)
            self.step += 1
            self._num_taken = 0

    def use(self) -> None:
        """Notes that the gradient of the batches that were taken is sent. Training that is given `data` does this.

        Raises:
            InvalidArgumentError: Not all of them were taken in this step.
        """
        if self._num_taken != self._per_step:
            raise InvalidArgumentError(
                f"expected {self._per_step} batches (batches_per_step) to have been taken from data for step "
                f"{self.step}, got {self._num_taken}",
                field="data",
            )
        self._is_used = True

    def state_dict(self) -> dict[str, Any]:
        """Returns what has counted, for a checkpoint: numbers and texts, to be saved with the weights of this step."""
        blocks = self._blocks
        return {
            "step": self.step,
            "first": blocks.first,
            "ahead": sorted(blocks.ahead),
            "members": list(blocks.members),
            "settings": self.settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was made. Before `begin`, and before training that is given `data`.

        Raises:
            InvalidArgumentError: It is none, or of data with other settings; the message has both.
        """
        settings = dict(state.get("settings", {})) if isinstance(state, Mapping) else {}
        if settings != self.settings:
            raise _STATE.error_saying(f"what state_dict() returned, with settings {self.settings},", f"{settings}")
        self._blocks = Blocks(state["first"], set(state["ahead"]), list(state["members"]))
        self.step = state["step"]
        self._num_taken = 0

    def prefetch(self, load: Callable[[Iterable[list[T]]], Iterable[LoadedT]]) -> Prefetched[T, LoadedT]:
        """Returns these batches as a loader returns them, which may be ahead of the steps.

        A batch counts with its step, not when it is loaded. Which one a worker takes in a later step is known only when
        the rounds before have ended. So the loader gets the batches that are expected, and the loop those that really
        come next. The rest is dropped: after a round without one of the workers, as many batches as the loader is ahead
        may have been loaded for nothing.

            loader = sampler.prefetch(lambda numbers: DataLoader(dataset, batch_sampler=numbers, num_workers=4))
            for inputs, targets in loader:  # until the epoch has ended

        Args:
            load: Returns an iterable of loaded batches, given an endless one of batches: one for each, in the same
                order. Called once, and again after an error of the iterable. It must read the batches one by one, in
                the thread that asks it for a loaded one, as a DataLoader and `map` do.

        Raises:
            InvalidArgumentError: While batches are taken: the iterable has ended, or has too many items.
        """
        if not callable(load):
            raise Argument("load").error("a function that returns what is loaded of batches", load)
        return Prefetched(load, self._places, self._expected, self._batch)

    def __iter__(self) -> Iterator[list[T]]:
        return map(self._batch, self._places())

    def _places(self) -> Iterator[range]:
        """Takes batches until the epoch has ended, and yields their places in the sequence of all epochs."""
        self._begun()
        epoch = self.epoch
        self._num_taken = 0
        while True:
            if self._num_taken == self._per_step and self._is_used:
                self._num_taken = 0  # of a step that has failed
            if self._num_taken == self._per_step:
                raise InvalidArgumentError(
                    f"expected a step of training after {self._per_step} batches (batches_per_step), got a call for "
                    "more: which samples come next is known when the step has ended. A DataLoader with num_workers "
                    "loads ahead: let `prefetch` make it",
                    field="data",
                )
            if self._num_taken == 0:
                self._is_used = False
                if self.epoch != epoch:
                    return
            block = self._blocks.block_of(self._worker_id, self._begun().numbers)
            self._num_taken += 1
            yield self._places_of(block, self._num_taken - 1)

    def _expected(self) -> Iterator[range]:
        """Yields the places of the batch that was taken last, and of those after it if the same workers stay."""
        blocks, seats = deepcopy(self._blocks), self._begun().numbers
        index = self._num_taken - 1
        while True:
            block = blocks.block_of(self._worker_id, seats)
            while index < self._per_step:
                yield self._places_of(block, index)
                index += 1
            blocks.end_round({*blocks.members, self._worker_id}, seats)
            index = 0

    def _places_of(self, block: int, index: int) -> range:
        begin = block * self._block_size + index * self._batch_size
        return range(begin, begin + self._batch_size)

    def _begun(self) -> Seats:
        if self._seats is None:
            raise InvalidArgumentError(
                "expected a training run before batches are taken: give this as `data` to average_gradients, "
                "average_by, Worker or DiLoCo, or call begin",
                field="data",
            )
        return self._seats

    @abstractmethod
    def _batch(self, places: range) -> list[T]:
        """Returns the samples at places of the sequence of all epochs."""


class Sampler(Batches[int]):
    """The samples of a dataset that one worker takes, as lists of their numbers. Made by `sampler`."""

    def __init__(self, num_samples: int, seed: int, batch_size: int, batches_per_step: int, shuffle: bool) -> None:
        super().__init__(batch_size, batches_per_step)
        self._num_samples = num_samples
        self._seed = as_integer(seed, Argument("seed"))
        self._is_shuffled = as_flag(shuffle, Argument("shuffle"))

    @property
    def epoch(self) -> int:
        return self._blocks.first * self._block_size // self._num_samples

    @property
    def settings(self) -> dict[str, str]:
        order = f"shuffled by seed {self._seed}" if self._is_shuffled else "as they are"
        return {"samples": f"{self._num_samples}, {order}", **super().settings}

    def _batch(self, places: range) -> list[int]:
        epochs, within = np.divmod(np.arange(places.start, places.stop, dtype=np.uint64), np.uint64(self._num_samples))
        if not self._is_shuffled:
            return [int(each) for each in within]
        parts: list[NDArray[np.uint64]] = [
            samples_at(within[epochs == epoch], self._num_samples, self._seed, int(epoch))
            for epoch in np.unique(epochs)
        ]
        return [int(each) for each in np.concatenate(parts)]


class Stream(Batches[T]):
    """The items of a stream that one worker takes, in lists. Made by `stream`."""

    def __init__(self, open_epoch: Callable[[int], Iterable[T]], batch_size: int, batches_per_step: int) -> None:
        super().__init__(batch_size, batches_per_step)
        if not callable(open_epoch):
            raise Argument("open_epoch").error("a function that returns the items of an epoch", open_epoch)
        self._open_epoch = open_epoch
        self._read_from(0, 0)

    @property
    def epoch(self) -> int:
        first = self._blocks.first * self._block_size
        self._read_to(first)
        return max(epoch for start, epoch in self._starts if start <= first)

    def state_dict(self) -> dict[str, Any]:
        """Returns what has counted, and where the latest epoch began that is known to have begun before that."""
        first = self._blocks.first * self._block_size
        return {**super().state_dict(), "start": list(max(each for each in self._starts if each[0] <= first))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was made: reads its epoch from the beginning, and skips what has counted.

        Raises:
            InvalidArgumentError: See `Batches.load_state_dict`.
        """
        super().load_state_dict(state)
        start, epoch = state["start"]
        self._read_from(start, epoch)

    def _read_from(self, start: int, epoch: int) -> None:
        self._starts = [(start, epoch)]
        """The first place of each epoch that has been read, and its number."""
        self._items: Iterator[T] = iter(self._open_epoch(epoch))
        self._num_read = start
        """The place of the next item."""
        self._kept: dict[int, T] = {}
        """The items that were read and have not counted, by place."""

    def _read_to(self, place: int) -> None:
        """Reads up to an item, and this one, too."""
        while self._num_read <= place:
            try:
                item = next(self._items)
            except StopIteration:
                start, epoch = self._starts[-1]
                if start == self._num_read:
                    raise InvalidArgumentError(
                        f"expected items in epoch {epoch} of the stream, got none", field="open_epoch"
                    ) from None
                self._starts = [*self._starts, (self._num_read, epoch + 1)]
                self._items = iter(self._open_epoch(epoch + 1))
                continue
            if not self._blocks.has_counted(self._num_read // self._block_size):
                self._kept[self._num_read] = item
            self._num_read += 1

    def _batch(self, places: range) -> list[T]:
        size = self._block_size
        self._kept = {at: item for at, item in self._kept.items() if not self._blocks.has_counted(at // size)}
        self._read_to(places[-1])
        return [self._kept[place] for place in places]


def sampler(
    dataset: Sized | int, *, seed: int, batch_size: int, batches_per_step: int = 1, shuffle: bool = True
) -> Sampler:
    """Returns the batches of samples that a worker of a training run takes, without a rank or a number of workers.

    Over all workers, each sample counts exactly once per epoch, however workers come, die and return: a batch counts if
    the gradient of its worker counted in its round, and is taken again by somebody if not. An epoch ends when each of
    its samples has counted; by then, some of the next one may have, too, so that all batches are of the same size.

    Give it as `data` to `gradserve.torch.average_gradients`, `gradserve.jax.average_by`, `gradserve.training.Worker` or
    DiLoCo of `gradserve.torch` or `gradserve.jax`, by all workers of the run. It is a `batch_sampler` of PyTorch's
    DataLoader without worker processes, and a `sampler` of one with `batch_size=None`; anything else reads
    `for numbers in sampler`. `Batches.prefetch` loads ahead.

    Args:
        dataset: The dataset, for its length, or that.
        seed: Chooses the orders of all epochs. The same for all workers, as all arguments.
        batch_size: The number of samples in a batch.
        batches_per_step: The number of batches that a worker takes in each step, if their gradients are accumulated or
            it takes several inner steps: `sync_every` of DiLoCo.
        shuffle: Whether each epoch has an order of its own. Otherwise samples come as they are.

    Raises:
        InvalidArgumentError: An argument is not valid.
    """
    argument = Argument("dataset")
    try:
        length = operator.index(dataset) if not isinstance(dataset, Sized) else len(dataset)
    except TypeError:
        raise argument.error("a dataset with a length, or a number of samples,", dataset) from None
    if isinstance(dataset, bool) or not 1 <= length < _MOST:
        raise argument.error("at least one sample", dataset if isinstance(dataset, bool) else length)
    return Sampler(length, seed, batch_size, batches_per_step, shuffle)


def stream(open_epoch: Callable[[int], Iterable[T]], *, batch_size: int, batches_per_step: int = 1) -> Stream[T]:
    """Returns the batches of items that a worker of a training run takes of a stream that each worker can read.

    The same promise as that of `sampler`, for data that can only be read from its beginning, with or without an end.
    Each worker reads the whole stream and keeps those items that it has read and that have not counted. A worker that
    joins, or begins from a checkpoint, reads the present epoch from its beginning.

    Args:
        open_epoch: Returns the items of an epoch, given its number: the same ones in the same order for all workers.
        batch_size: The number of items in a batch.
        batches_per_step: As for `sampler`.

    Raises:
        InvalidArgumentError: An argument is not valid; later, also an epoch without items.
    """
    return Stream(open_epoch, batch_size, batches_per_step)
