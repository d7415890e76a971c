"""One backward pass of DistributedDataParallel: its buckets, and the groups of parameters that are averaged together.

Groups depend on the model alone, so they are the same for all workers, however a worker's DistributedDataParallel packs
gradients into buckets.

"""

import threading
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradserve.torch.parameters import without_gradient
from gradserve.torch.tensors import array_of, tensor_of
from gradserve.training.rounds import PRESENCE, Rounds, presence_of, present_names

_LEAST_BYTES = 4 << 20
"""A group of fewer bytes takes in the next parameter: below this, a call takes longer than the copying that it
saves."""
_MOST_GROUPS = 16
"""The most groups of a dtype: each is one call, and all of them may wait for other workers at once."""


class GroupAverage:
    """Averages the gradients of a group, in place. For one thread at a time."""

    def __init__(self, rounds: Rounds, names: Sequence[str]) -> None:
        """Averages the gradients of these names in rounds of an accumulator that also has the component PRESENCE."""
        self._rounds = rounds
        self._names = names
        self._stream: Any = None

    @property
    def step(self) -> int:
        """The step at which the group's next gradients are computed."""
        return self._rounds.step

    def average(
        self, gradients: Mapping[str, torch.Tensor], ready: Sequence[Any], used: Container[str]
    ) -> frozenset[str]:
        """Replaces gradients by their averages over the workers. Waits for the other workers.

        Args:
            gradients: The gradient of each member of the group, all on the CPU or all on one GPU.
            ready: For those on a GPU, the events after which they are there.
            used: The members that this worker has used. The gradients of the others are zeros.

        Returns:
            The names of the members that at least one worker of the round has used.

        Raises:
            GradserveError: See `Rounds.average`.
        """
        if next(iter(gradients.values())).is_cuda:
            return self._average_on_gpu(gradients, ready, used)
        average = self._rounds.average(self._sent(gradients, used))
        for name, gradient in gradients.items():
            # NumPy copies in this thread alone. PyTorch would start threads of its own, beside those of the backward
            # pass.
            np.copyto(array_of(gradient), average[name])
        return present_names(self._names, average)

    def _average_on_gpu(
        self, gradients: Mapping[str, torch.Tensor], ready: Sequence[Any], used: Container[str]
    ) -> frozenset[str]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(iter(gradients.values())).device)
        with torch.cuda.stream(self._stream):
            for event in ready:
                self._stream.wait_event(event)
            average = self._rounds.average(self._sent(gradients, used))
            for name, gradient in gradients.items():
                gradient.copy_(tensor_of(average[name]))
        self._stream.synchronize()
        return present_names(self._names, average)

    def _sent(self, gradients: Mapping[str, torch.Tensor], used: Container[str]) -> dict[str, Any]:
        return {**gradients, PRESENCE: presence_of(self._names, used)}


@dataclass(frozen=True)
class Group:
    """Parameters of one dtype whose gradients are averaged by one call.

    Attributes:
        number: Its number among the groups.
        dtype: The dtype of the parameters.
        names: The names of the parameters.
    """

    number: int
    dtype: torch.dtype
    names: tuple[str, ...]


def groups_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> tuple[Group, ...]:
    """Returns the groups of a model's parameters, from the last parameter to the first: the order of a backward pass.

    Args:
        parameters: The names and parameters, in the model's order.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in reversed(list(parameters)):
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    groups: list[Group] = []
    for dtype, same in by_dtype.items():
        total = sum(parameter.nbytes for _, parameter in same)
        enough = max(_LEAST_BYTES, -(-total // _MOST_GROUPS))
        names: list[str] = []
        num_bytes = 0
        for index, (name, parameter) in enumerate(same):
            names.append(name)
            num_bytes += parameter.nbytes
            if num_bytes >= enough or index == len(same) - 1:
                groups.append(Group(len(groups), dtype, tuple(names)))
                names, num_bytes = [], 0
    return tuple(groups)


@dataclass(eq=False)
class _Bucket:
    """A bucket of DistributedDataParallel.

    Attributes:
        buffer: Its gradients, one after the other, which are replaced by averages.
        future: What DistributedDataParallel waits for.
        waiting: The numbers of the groups that it has members of, whose averages are not in yet.
    """

    buffer: torch.Tensor
    future: Any
    waiting: set[int]


@dataclass(eq=False)
class _Arrivals:
    """The gradients of a group that are there.

    Attributes:
        group: The group.
        gradients: The gradients of its members, by name.
        used: The members that this worker has used; the gradients of the others are zeros.
        present: The members that any worker has used, once they are averaged.
        ready: For those on a GPU, the events after which they are there.
        buckets: The buckets that they are in.
    """

    group: Group
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    present: frozenset[str] = frozenset()
    ready: list[Any] = field(default_factory=list)
    buckets: list[_Bucket] = field(default_factory=list)


class BackwardPass:
    """Averages groups as their last gradient arrives, and completes buckets as their last group is averaged."""

    def __init__(self, averages: Mapping[Group, GroupAverage], threads: ThreadPoolExecutor) -> None:
        """Needs as many threads as there are groups, as each of them may wait for other workers."""
        self._averages = averages
        self._threads = threads
        self._group_of = {name: group for group in averages for name in group.names}
        self._arrivals = {group: _Arrivals(group) for group in averages}
        self._lock = threading.Lock()
        self._open: list[_Bucket] = []
        self._error: BaseException | None = None

    def has(self, name: str) -> bool:
        """Returns True if the gradient of a parameter is there."""
        return name in self._arrivals[self._group_of[name]].gradients

    def add(self, buffer: torch.Tensor, gradients: Mapping[str, torch.Tensor], used: Collection[str]) -> Any:
        """Takes the gradients of a bucket, by the names of their parameters, and which of these the pass has used.

        Returns:
            A torch.futures.Future of the bucket's buffer. After an error it has whatever is in the buffer; see
            `failure`.
        """
        ready = [torch.cuda.current_stream(buffer.device).record_event()] if buffer.is_cuda else []
        groups = {self._group_of[name] for name in gradients}
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        bucket = _Bucket(buffer, future, {group.number for group in groups})
        with self._lock:
            has_failed = self._error is not None
            if not has_failed:
                self._open.append(bucket)
        if has_failed:
            future.set_result(buffer)
            return future
        for name, gradient in gradients.items():
            arrivals = self._arrivals[self._group_of[name]]
            arrivals.gradients[name] = gradient
            if name in used:
                arrivals.used.add(name)
        for group in sorted(groups, key=lambda each: each.number):
            arrivals = self._arrivals[group]
            arrivals.ready += ready
            arrivals.buckets.append(bucket)
            if len(arrivals.gradients) == len(group.names):
                self._threads.submit(self._average, arrivals)
        return future

    def failure(self) -> BaseException | None:
        """Returns the error of the pass, None if all gradients have been averaged. Asked when the pass is over."""
        if self._error is not None:
            return self._error
        missing = [
            name for group, arrivals in self._arrivals.items() for name in group.names if name not in arrivals.gradients
        ]
        return without_gradient(missing) if missing else None

    def used_by_others(self) -> Mapping[str, torch.Tensor]:
        """Returns the averages, by name, of the parameters that only other workers have used. After the pass."""
        return {
            name: arrivals.gradients[name]
            for arrivals in self._arrivals.values()
            for name in arrivals.present - arrivals.used
        }

    def _average(self, arrivals: _Arrivals) -> None:
        try:
            average = self._averages[arrivals.group]
            arrivals.present = average.average(arrivals.gradients, arrivals.ready, arrivals.used)
        except BaseException as error:  # whatever it is, `backward()` raises it in the user's thread
            with self._lock:
                self._error = self._error or error
                completed, self._open = self._open, []
        else:
            with self._lock:
                for bucket in arrivals.buckets:
                    bucket.waiting.discard(arrivals.group.number)
                completed = [bucket for bucket in self._open if not bucket.waiting]
                self._open = [bucket for bucket in self._open if bucket.waiting]
        for bucket in completed:
            bucket.future.set_result(bucket.buffer)
