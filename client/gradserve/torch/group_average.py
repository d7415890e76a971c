"""The gradients of one group on their way to the server and back."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradserve.torch.rounds import Rounds
from gradserve.torch.tensors import array_of, tensor_of
from gradserve.training.presence import PRESENCE, presence_of, present_names


class GroupAverage:
    """Averages the gradients of a group, in place. For one thread at a time."""

    def __init__(self, rounds: Rounds, names: Sequence[str]) -> None:
        """Takes the rounds of the group's accumulator, which has component PRESENCE too, and its members' names."""
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
