"""The gradients of one group on their way to the server and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradserve.torch.rounds import Rounds
from gradserve.torch.tensors import array_of, tensor_of


class GroupAverage:
    """Averages the gradients of a group, in place. For one thread at a time."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._stream: Any = None

    @property
    def step(self) -> int:
        """The step at which the group's next gradients are computed."""
        return self._rounds.step

    def average(self, gradients: Mapping[str, torch.Tensor], ready: Sequence[Any]) -> None:
        """Replaces gradients by their averages over the workers. Waits for the other workers.

        Args:
            gradients: The gradient of each member of the group, all on the CPU or all on one GPU.
            ready: For those on a GPU, the events after which they are there.

        Raises:
            GradserveError: See `Rounds.average`.
        """
        if next(iter(gradients.values())).is_cuda:
            self._average_on_gpu(gradients, ready)
            return
        average = self._rounds.average(gradients)
        for name, gradient in gradients.items():
            # NumPy copies in this thread alone. PyTorch would start threads of its own, beside those of the backward
            # pass.
            np.copyto(array_of(gradient), average[name])

    def _average_on_gpu(self, gradients: Mapping[str, torch.Tensor], ready: Sequence[Any]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(iter(gradients.values())).device)
        with torch.cuda.stream(self._stream):
            for event in ready:
                self._stream.wait_event(event)
            average = self._rounds.average(gradients)
            for name, gradient in gradients.items():
                gradient.copy_(tensor_of(average[name]))
        self._stream.synchronize()
