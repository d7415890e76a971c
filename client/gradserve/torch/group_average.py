"""The gradients of one group on their way to the server and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradserve.client import Client
from gradserve.torch.groups import Group, Member
from gradserve.torch.rounds import Rounds
from gradserve.torch.tensors import tensor_of
from gradserve.wire.dtypes import BFLOAT16


class GroupAverage:
    """Averages the gradients of a group, in place. For one thread at a time."""

    def __init__(self, group: Group, rounds: Rounds, client: Client) -> None:
        self._group = group
        self._rounds = rounds
        self._client = client
        self._places: dict[str, NDArray[Any]] = {}
        self._stream: Any = None

    @property
    def step(self) -> int:
        """The step at which the group's next gradients are computed."""
        return self._rounds.step

    def average(self, gradients: Mapping[str, torch.Tensor], ready: Any) -> None:
        """Replaces gradients by their averages over the workers. Waits for the other workers.

        Args:
            gradients: The gradient of each member of the group, all on the CPU or all on one GPU.
            ready: For those on a GPU, the events after which they are there.

        Raises:
            GradserveError: See `Rounds.average`.
        """
        if next(iter(gradients.values())).is_cuda:
            self._average_on_gpu(gradients, ready)
        else:
            self._average_on_host(gradients)

    def _average_on_host(self, gradients: Mapping[str, torch.Tensor]) -> None:
        # NumPy copies in this thread alone. PyTorch would start threads of its own, beside those of the backward pass.
        if not self._places:
            memory = self._client.empty(self._group.num_bytes, np.uint8)
            self._places = {each.name: _place(memory, each, self._group.dtype) for each in self._group.members}
        arrays = {name: _array(gradient) for name, gradient in gradients.items()}
        for name, array in arrays.items():
            np.copyto(self._places[name], array)
        average = self._rounds.average(self._places)
        for name, array in arrays.items():
            np.copyto(array, average[name])

    def _average_on_gpu(self, gradients: Mapping[str, torch.Tensor], ready: Any) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(iter(gradients.values())).device)
        with torch.cuda.stream(self._stream):
            for event in ready:
                self._stream.wait_event(event)
            average = self._rounds.average(gradients)
            for name, gradient in gradients.items():
                gradient.copy_(tensor_of(average[name]))
        self._stream.synchronize()


def _place(memory: NDArray[Any], member: Member, dtype: torch.dtype) -> NDArray[Any]:
    numpy_dtype = BFLOAT16 if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype
    return memory[member.start : member.start + member.num_bytes].view(numpy_dtype).reshape(member.shape)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns a tensor of the CPU as an array in the same memory."""
    if tensor.dtype is torch.bfloat16:
        bits: NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: NDArray[Any] = tensor.numpy()
    return array
