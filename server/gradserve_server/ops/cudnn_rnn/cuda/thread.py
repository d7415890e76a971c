"""The cuDNN objects of a thread, and the GPU as cuDNN needs it."""

import dataclasses
import functools
from collections import OrderedDict
from contextlib import AbstractContextManager
from ctypes import byref, c_size_t
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.cudnn import Cudnn, CudnnObject
from gradserve_server.devices.device import Array
from gradserve_server.ops.cudnn_rnn.cuda.network import CudnnNetwork
from gradserve_server.ops.cudnn_rnn.cuda.tag import TagDevice
from gradserve_server.ops.cudnn_rnn.spec import Problem

KEPT_NETWORKS = 64
"""The most networks whose descriptors a thread keeps."""
KEPT_SEEDS = 4
"""The most seeds for which a thread keeps the generator's first states, of some MB each. Copying them takes
microseconds, making them milliseconds: cuDNN starts a generator for each of the GPU's threads."""


class CudnnDevice(TagDevice, Protocol):
    """A GPU as cuDNN needs it. Safe to use from several threads."""

    @property
    def compute_capability(self) -> str:
        """The kind of GPU, such as "90"."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array, aligned to 256 bytes.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def from_host(self, array: NDArray[Any]) -> Array:
        """Returns a copy in this GPU's memory."""
        ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns a copy in host memory."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Ensures that work started by this thread in the block is finished when the block is left."""
        ...

    def address(self, array: Array) -> int:
        """Returns the address of the elements of an array on this device."""
        ...

    def stream(self) -> int:
        """Returns this thread's stream, a cudaStream_t that is the same in all its `computing` blocks."""
        ...


class CudnnThread:
    """The cuDNN objects of a thread, which no other thread may use."""

    def __init__(self, device: CudnnDevice, cudnn: Cudnn) -> None:
        """Makes a handle for the device, which must be current, and for this thread's stream.

        Raises:
            InternalError: cuDNN failed.
        """
        self.cudnn = cudnn
        self.handle = CudnnObject(cudnn, "")
        cudnn.call("cudnnSetStream", self.handle, device.stream())
        self._device = device
        self._networks: OrderedDict[Problem, CudnnNetwork] = OrderedDict()
        self._first_states: OrderedDict[int, Array] = OrderedDict()

    def network(self, problem: Problem) -> CudnnNetwork:
        """Returns the descriptors of a problem; keeps the ones last used."""
        key = dataclasses.replace(problem, seed=0)
        network = self._networks.get(key)
        if network is None:
            states = (0, 0)
            if problem.dropout:
                states = (self._device.address(self._dropout_states), self._dropout_states.nbytes)
            network = self._networks[key] = CudnnNetwork(self.cudnn, self.handle, problem, states)
            if len(self._networks) > KEPT_NETWORKS:
                self._networks.popitem(last=False)
        self._networks.move_to_end(key)
        return network

    def seed(self, network: CudnnNetwork, seed: int) -> None:
        """Starts the generator of a network's dropout with a seed, after the earlier work of the stream.

        Raises:
            MemoryError: There is not enough memory.
        """
        states = self._dropout_states
        kept = self._first_states.get(seed)
        if kept is None:
            if len(self._first_states) == KEPT_SEEDS:
                _, kept = self._first_states.popitem(last=False)
            else:
                kept = self._device.empty(states.shape, states.dtype)
            network.seed(seed)
            kept[...] = states
            self._first_states[seed] = kept
        else:
            states[...] = kept
            network.restore(seed)
        self._first_states.move_to_end(seed)

    @functools.cached_property
    def _dropout_states(self) -> Array:
        """Returns memory for the state of cuDNN's generator."""
        size = c_size_t()
        self.cudnn.call("cudnnDropoutGetStatesSize", self.handle, byref(size))
        return self._device.empty((size.value,), np.dtype(np.uint8))
