"""CudnnRNN and CudnnRNNBackprop on a GPU, by cuDNN."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.cudnn import Cudnn, load_cudnn
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.cuda.call import CudnnCall
from gradserve_server.ops.cudnn_rnn.cuda.thread import CudnnDevice, CudnnThread
from gradserve_server.ops.cudnn_rnn.network import Mode, Network
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    BackpropOutputs,
    ForwardInputs,
    ForwardOutputs,
    Problem,
)

_PREPARED_DTYPES = tuple(np.dtype(each) for each in (np.float32, np.float16, np.float64))


class CudaCudnnRnn:
    """CudnnRNN and CudnnRNNBackprop by cuDNN 9. Safe to use from several threads.

    Dropout uses cuDNN's generator, restarted with the seed of each forward call: a seed always drops the same elements
    on one kind of GPU and with one version of cuDNN, but not the same as on the CPU. bfloat16 is computed in float32.
    float16 is multiplied on tensor cores and added up in float32; cuDNN rounds what it keeps to float16.
    """

    def __init__(self, device: CudnnDevice, reserve_key: ReserveKey, load: Callable[[], Cudnn] = load_cudnn) -> None:
        """Takes the device, the key of reserve spaces, and cuDNN.

        Args:
            device: The GPU.
            reserve_key: Authenticates reserve spaces.
            load: Loads cuDNN at the first call, so that a server without it can compute other ops.
        """
        self._device = device
        self._reserve_key = reserve_key
        self._load = load
        self._threads = threading.local()

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Makes cuDNN load its kernels, a dtype and a kind of cell at a time; ends early, between two, once `stop()`.

        Raises:
            InternalError: cuDNN is missing, or failed.
        """
        for dtype, mode in itertools.product(_PREPARED_DTYPES, Mode):
            if stop():
                return
            with self._device.computing():
                self._run_small(dtype, mode)

    def forward(self, inputs: ForwardInputs, problem: Problem) -> ForwardOutputs:
        """Computes CudnnRNN, inside the device's `computing`.

        Raises:
            InvalidArgumentError: A sequence length is not from 1 to T, or cuDNN does not support the problem.
            InternalError: cuDNN is missing, or failed.
            MemoryError: There is not enough memory.
        """
        return self._call(inputs, problem).forward(inputs)

    def backprop(self, inputs: BackpropInputs, problem: Problem) -> BackpropOutputs:
        """Computes CudnnRNNBackprop, inside the device's `computing`.

        Raises:
            InvalidArgumentError: reserve_space or host_reserved are not from a forward call for this problem on this
                kind of GPU, with this cuDNN and in this run of the server, or were changed; a sequence length is not
                from 1 to T; or cuDNN does not support the problem.
            InternalError: cuDNN is missing, or failed.
            MemoryError: There is not enough memory.
        """
        return self._call(inputs, problem).backprop(inputs)

    def _call(self, inputs: ForwardInputs | BackpropInputs, problem: Problem) -> CudnnCall:
        lengths = self._lengths(inputs.sequence_lengths, problem)
        thread = self._thread()
        network = thread.network(problem)
        network.set_lengths(lengths)
        return CudnnCall(self._device, thread, network, problem, lengths, self._reserve_key)

    def _lengths(self, given: Array | None, problem: Problem) -> NDArray[np.int32]:
        steps = problem.max_seq_length
        if given is None:
            return np.full(problem.batch, steps, np.int32)
        lengths = np.ascontiguousarray(self._device.to_host(given))
        is_wrong = (lengths < 1) | (lengths > steps)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            raise InvalidArgumentError(
                f"sequence_lengths must be from 1 to max_seq_length, which is {steps}, "
                f"got {lengths[index]} at index {index}",
                field="sequence_lengths",
            )
        return lengths

    @functools.cached_property
    def _cudnn(self) -> Cudnn:
        return self._load()

    def _thread(self) -> CudnnThread:
        try:
            thread: CudnnThread = self._threads.state
        except AttributeError:
            thread = self._threads.state = CudnnThread(self._device, self._cudnn)
        return thread

    def _run_small(self, dtype: np.dtype[Any], mode: Mode) -> None:
        network = Network(mode, num_layers=1, num_directions=1, input_size=8, num_units=8)
        problem = Problem(network, dtype, 2, 2, time_major=True, dropout=0.0, seed=0, is_training=True)
        zeros = functools.partial(np.zeros, dtype=dtype)
        sequence, state = (self._device.from_host(zeros(shape)) for shape in ((2, 2, 8), (1, 2, 8)))
        inputs = ForwardInputs(sequence, state, self._device.from_host(zeros(network.num_params)), state)
        outputs = self.forward(inputs, problem)
        gradients = {"output_backprop": sequence, "output_h_backprop": state, "output_c_backprop": state}
        self.backprop(BackpropInputs(**vars(inputs), **vars(outputs), **gradients), problem)
