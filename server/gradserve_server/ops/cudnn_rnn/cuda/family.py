"""CudnnRNN and CudnnRNNBackprop on a GPU, by cuDNN."""

import functools
import itertools
import struct
import threading
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.cuda.cudnn import Cudnn, WgradMode, load_cudnn
from gradserve_server.devices.cuda.programs import (
    ELEMENT_THREADS,
    Launch,
    Program,
    Struct,
    element_launch,
    element_sources,
    instance,
)
from gradserve_server.devices.device import Array
from gradserve_server.ops.cudnn_rnn.cuda.network import CudnnDevice, CudnnNetwork, CudnnThread, TagDevice, data_dtype
from gradserve_server.ops.cudnn_rnn.declaration import check_lengths
from gradserve_server.ops.cudnn_rnn.reserve import TAG_START, ReserveKey, check_tag, reserve_length
from gradserve_server.ops.cudnn_rnn.spec import (
    HEADER_BYTES,
    BackpropInputs,
    BackpropOutputs,
    ForwardInputs,
    ForwardOutputs,
    Mode,
    Network,
    Problem,
)

_PREPARED_DTYPES = tuple(np.dtype(each) for each in (np.float32, np.float16, np.float64))


_ALIGNMENT = 256
"""The alignment of cuDNN's part of reserve_space, in bytes. Memory from CUDA is aligned to as much or more."""
_UINT8 = np.dtype(np.uint8)


CONTENT_TAG_BYTES = 16
WORDS_BYTES = 16
"""The number of bytes that the kernels read at a time."""

_PRIME = (1 << 61) - 1
_PLACES = 2
_ARGUMENTS = {
    "reserve_sums": Struct(("content", "partial_sums"), ("count", "key_0", "key_1", "stride_0", "stride_1")),
    "reserve_tag": Struct(("partial_sums", "tag", "second_tag"), ("blocks", "mask_0", "mask_1")),
}
_SHARED_BYTES = _PLACES * ELEMENT_THREADS * 8


class CudaCudnnRnn:
    """CudnnRNN and CudnnRNNBackprop by cuDNN 9. Safe to use from several threads.

    Dropout uses cuDNN's generator, restarted with the seed of each forward call: a seed always drops the same elements
    on one kind of GPU and with one version of cuDNN, but not the same as on the CPU. bfloat16 is computed in float32.
    float16 is multiplied on tensor cores and added up in float32; cuDNN rounds what it keeps to float16.
    """

    def __init__(self, device: CudnnDevice, reserve_key: ReserveKey, load: Callable[[], Cudnn] = load_cudnn) -> None:
        """Loads nothing yet: cuDNN is loaded at the first call.

        Args:
            device: The GPU.
            reserve_key: Authenticates reserve spaces.
            load: Loads cuDNN, without which a server can still compute other ops.
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

    def _call(self, inputs: ForwardInputs | BackpropInputs, problem: Problem) -> "CudnnCall":
        lengths = self._lengths(inputs.sequence_lengths, problem)
        thread = self._thread()
        network = thread.network(problem)
        network.set_lengths(lengths)
        return CudnnCall(self._device, thread, network, problem, lengths, self._reserve_key)

    def _lengths(self, given: Array | None, problem: Problem) -> NDArray[np.int32]:
        if given is None:
            return np.full(problem.batch, problem.max_seq_length, np.int32)
        lengths = np.ascontiguousarray(self._device.to_host(given))
        check_lengths(lengths, problem)
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


class CudnnCall:
    """One call of an op, inside the device's `computing`."""

    def __init__(
        self,
        device: CudnnDevice,
        thread: CudnnThread,
        network: CudnnNetwork,
        problem: Problem,
        lengths: NDArray[np.int32],
        reserve_key: ReserveKey,
    ) -> None:
        """Prepares a call of the current thread.

        Args:
            device: The GPU.
            thread: The thread's cuDNN handle and memory.
            network: The descriptors of the problem, with the lengths of this call.
            problem: The problem.
            lengths: The lengths of the sequences, [B].
            reserve_key: Authenticates reserve spaces.
        """
        self._device = device
        self._thread = thread
        self._network = network
        self._problem = problem
        self._lengths = lengths
        self._reserve_key = reserve_key
        self._tags = ContentTags(device)
        self._has_padding = bool(lengths.min() < problem.max_seq_length)
        self._dtype = data_dtype(problem.dtype)
        # The layout of the reserve space is internal to cuDNN, and may depend on all of this.
        order = "t" if problem.time_major else "b"
        self._reserve_name = f"cudnn{thread.cudnn.version}-{device.compute_capability}{order}"
        self._reserve_bytes = _ALIGNMENT - HEADER_BYTES + -(-network.reserve_bytes // WORDS_BYTES) * WORDS_BYTES

    def forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        """Computes CudnnRNN.

        Raises:
            InvalidArgumentError: cuDNN does not support the problem.
            InternalError: cuDNN failed.
            MemoryError: There is not enough memory.
        """
        problem, described = self._problem, self._network
        network = problem.network
        reserve_space, host_reserved, key = self._new_reserve()
        reserve_address = None if key is None else self._device.address(reserve_space) + _ALIGNMENT
        input_c = None if described.cell is None else inputs.input_c
        given = [self._given(inputs.input), self._states_given(inputs.input_h), self._states_given(input_c)]
        space = self._weight_space(inputs.params)
        output = self._device.empty(problem.sequence_shape(network.num_directions * network.hidden_size), self._dtype)
        if self._has_padding:
            output.fill(0)  # what cuDNN leaves unwritten could be another client's data
        output_h, output_c = self._new_states()
        work = self._device.empty((described.work_bytes,), _UINT8)
        if problem.dropout:
            self._thread.seed(described, problem.seed)
        x, h, c = map(self._address, given)
        checkpoint()
        self._thread.cudnn.call(
            "cudnnRNNForward",
            *(self._thread.handle, described.rnn, described.forward_mode, None),  # lengths are in the descriptors
            *(described.input, x, described.output, self._address(output)),
            *(described.hidden, h, self._address(output_h), described.cell, c, self._address(output_c)),
            *(described.params.space_bytes, self._address(space), described.work_bytes, self._address(work)),
            *(described.reserve_bytes, reserve_address),
        )
        if key is not None:
            targets = self._device.address(reserve_space), self._device.address(host_reserved)
            self._start_tag(key, reserve_space, *(target + TAG_START for target in targets))
        return ForwardOutputs(
            self._taken(output),
            self._states_taken(output_h),
            self._states_taken(output_c),
            reserve_space,
            host_reserved,
        )

    def backprop(self, inputs: BackpropInputs) -> BackpropOutputs:
        """Computes CudnnRNNBackprop.

        Raises:
            InvalidArgumentError: reserve_space or host_reserved are not of this problem, GPU, cuDNN and run of the
                server, not from the same call, or were changed; or cuDNN does not support the problem.
            InternalError: cuDNN failed.
            MemoryError: There is not enough memory.
        """
        problem, described, call = self._problem, self._network, self._thread.cudnn.call
        header = self._checked_header(inputs)
        # A copy, because cuDNN writes into the reserve space, which other calls may be reading.
        saved = self._device.empty(inputs.reserve_space.shape, problem.dtype)
        saved[...] = inputs.reserve_space
        self._check_tag(header, saved)
        is_lstm = described.cell is not None
        sequences = [self._given(array) for array in (inputs.input, inputs.output, inputs.output_backprop)]
        hidden = [self._states_given(array) for array in (inputs.input_h, inputs.output_h_backprop)]
        cells = [self._states_given(array if is_lstm else None) for array in (inputs.input_c, inputs.output_c_backprop)]
        space = self._weight_space(inputs.params)
        input_backprop = self._device.empty(problem.sequence_shape(problem.network.input_size), self._dtype)
        if self._has_padding:
            input_backprop.fill(0)
        input_h_backprop, input_c_backprop = self._new_states()
        space_backprop = self._new_weight_space()
        work = self._device.empty((described.work_bytes,), _UINT8)
        x, y, dy = map(self._address, sequences)
        h, dh = map(self._address, hidden)
        c, dc = map(self._address, cells)
        temporary = (
            *(described.work_bytes, self._address(work)),
            *(described.reserve_bytes, self._device.address(saved) + _ALIGNMENT),
        )
        checkpoint()
        call(
            "cudnnRNNBackwardData_v8",
            *(self._thread.handle, described.rnn, None),
            *(described.output, y, dy, described.input, self._address(input_backprop)),
            *(described.hidden, h, dh, self._address(input_h_backprop)),
            *(described.cell, c, dc, self._address(input_c_backprop)),
            *(described.params.space_bytes, self._address(space), *temporary),
        )
        checkpoint()
        call(
            "cudnnRNNBackwardWeights_v8",
            *(self._thread.handle, described.rnn, WgradMode.CUDNN_WGRAD_MODE_ADD, None),
            *(described.input, x, described.hidden, h, described.output, y),
            *(described.params.space_bytes, self._address(space_backprop), *temporary),
        )
        return BackpropOutputs(
            self._taken(input_backprop),
            self._states_taken(input_h_backprop),
            self._states_taken(input_c_backprop),
            self._params_taken(space_backprop),
        )

    def _address(self, array: Array | None) -> int | None:
        return None if array is None else self._device.address(array)

    def _given(self, array: Array) -> Array:
        """Returns an array in the dtype that cuDNN gets."""
        return self._converted(array, self._dtype)

    def _taken(self, array: Array) -> Array:
        """Returns an array in the problem's dtype."""
        return self._converted(array, self._problem.dtype)

    def _converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        if array.dtype == dtype:
            return array
        converted = self._device.empty(array.shape, dtype)
        converted[...] = array
        return converted

    def _states_given(self, states: Array | None) -> Array | None:
        """Returns states like `_given`, with the pseudo-layer first; None for None."""
        if states is None or self._problem.time_major:
            return None if states is None else self._given(states)
        return self._transposed(states, self._dtype)

    def _states_taken(self, states: Array | None) -> Array:
        """Returns states like `_taken`, in the order of the problem; a scalar 0 for None."""
        if states is None:
            return self._zero(self._problem.dtype)
        if self._problem.time_major:
            return self._taken(states)
        return self._transposed(states, self._problem.dtype)

    def _transposed(self, states: Array, dtype: np.dtype[Any]) -> Array:
        first, second, size = states.shape
        transposed = self._device.empty((second, first, size), dtype)
        transposed[...] = states.swapaxes(0, 1)
        return transposed

    def _new_states(self) -> tuple[Array, Array | None]:
        """Returns arrays for hidden states, and for lstm cell states, with the pseudo-layer first."""
        network = self._problem.network
        shape = (network.num_pseudo_layers, self._problem.batch)
        hidden = self._device.empty((*shape, network.hidden_size), self._dtype)
        has_cells = self._network.cell is not None
        return hidden, self._device.empty((*shape, network.num_units), self._dtype) if has_cells else None

    def _weight_space(self, params: Array) -> Array:
        vector, layout = self._given(params), self._network.params
        if layout.is_vector:
            return vector
        space = self._new_weight_space()
        for run in layout.runs:
            space[run.space_start : run.space_start + run.size] = vector[run.start : run.start + run.size]
        return space

    def _params_taken(self, space: Array) -> Array:
        layout = self._network.params
        if layout.is_vector:
            return self._taken(space)
        params = self._device.empty((self._problem.network.num_params,), self._problem.dtype)
        for run in layout.runs:
            params[run.start : run.start + run.size] = space[run.space_start : run.space_start + run.size]
        return params

    def _new_weight_space(self) -> Array:
        space = self._device.empty((-(-self._network.params.space_bytes // self._dtype.itemsize),), self._dtype)
        space.fill(0)
        return space

    def _new_reserve(self) -> tuple[Array, Array, bytes | None]:
        """Returns reserve_space, host_reserved, and the key for the content; None if there is nothing to reserve."""
        problem = self._problem
        if not problem.is_training:
            return self._zero(problem.dtype), self._zero(np.dtype(np.int8)), None
        space = self._device.empty((reserve_length(problem, self._reserve_bytes),), problem.dtype)
        space.fill(0)  # cuDNN leaves parts unwritten, which must not show earlier contents of the memory
        header = self._reserve_key.new_header(self._reserve_name, problem, self._lengths)
        host_reserved = self._device.from_host(header)
        words = host_reserved.view(problem.dtype)
        space[: len(words)] = words
        return space, host_reserved, self._reserve_key.content_key(header)

    def _zero(self, dtype: np.dtype[Any]) -> Array:
        scalar = self._device.empty((), dtype)
        scalar.fill(0)
        return scalar

    def _checked_header(self, inputs: BackpropInputs) -> NDArray[Any]:
        problem, given = self._problem, inputs.host_reserved
        words = inputs.reserve_space[: HEADER_BYTES // problem.dtype.itemsize]
        header = np.ascontiguousarray(self._device.to_host(words)).view(np.int8)
        self._reserve_key.check_header(
            self._reserve_name,
            problem,
            self._lengths,
            self._reserve_bytes,
            inputs.reserve_space,
            header,
            None if given is None else self._device.to_host(given),
        )
        return header

    def _check_tag(self, header: NDArray[Any], saved: Array) -> None:
        tag = self._device.empty((CONTENT_TAG_BYTES,), _UINT8)
        self._start_tag(self._reserve_key.content_key(header), saved, *(2 * [self._device.address(tag)]))
        check_tag(header, self._device.to_host(tag).tobytes())

    def _start_tag(self, key: bytes, space: Array, tag: int, second_tag: int) -> None:
        self._tags.start(key, self._device.address(space) + HEADER_BYTES, self._reserve_bytes, tag, second_tag)


class ContentTags:
    """Computes tags on a device. Safe to use from several threads.

    A tag is the value of a polynomial, whose coefficients are the words of the content, at two secret places, plus two
    secret numbers, modulo 2^61 - 1 (a code of Wegman and Carter). An attacker who sees the tag of a content of n words
    guesses the tag of another one with a probability of (n / 2^61)^2: 2^-64 for 2 GiB.
    """

    def __init__(self, device: TagDevice) -> None:
        self._device = device

    def start(self, key: bytes, content: int, num_bytes: int, tag: int, second_tag: int) -> None:
        """Starts to compute a tag after everything that this thread started before.

        Args:
            key: 64 bytes, which authenticate one content only.
            content: The address of the content, a multiple of 16.
            num_bytes: Its size, a multiple of 16, more than 0.
            tag: The address for the tag, of 16 bytes.
            second_tag: Where it is written as well.

        Raises:
            MemoryError: There is not enough memory.
        """
        assert content % WORDS_BYTES == num_bytes % WORDS_BYTES == 0 < num_bytes
        keys = [number % _PRIME for number in struct.unpack_from(f"<{2 * _PLACES}Q", key)]
        count = num_bytes // WORDS_BYTES
        sums = element_launch("reserve_sums", count, self._device.limits)
        sums = Launch(sums.kernel, sums.grid, sums.threads, _SHARED_BYTES)
        blocks = sums.grid[0]
        words_of_all_threads = WORDS_BYTES // 4 * blocks * sums.threads
        addresses = {
            "content": content,
            "partial_sums": self._device.scratch(8 * _PLACES * blocks),
            "tag": tag,
            "second_tag": second_tag,
        }
        numbers = {"count": count, "blocks": blocks}
        for place in range(_PLACES):
            numbers[f"key_{place}"] = keys[place]
            numbers[f"stride_{place}"] = pow(keys[place], words_of_all_threads, _PRIME)
            numbers[f"mask_{place}"] = keys[_PLACES + place]
        compiled = self._device.compiled(tag_program())
        for launch in (sums, Launch("reserve_tag", (1, 1), ELEMENT_THREADS, _SHARED_BYTES)):
            compiled.launch(launch, _ARGUMENTS[launch.kernel].of(addresses, numbers))


@functools.cache
def tag_program() -> Program:
    """Returns the program of the kernels."""
    instances = [
        instance(kernel, str(ELEMENT_THREADS), f"{kernel.title().replace('_', '')}Arguments", f"{kernel}_of")
        for kernel in _ARGUMENTS
    ]
    parts = [*element_sources(), (resources.files(__package__) / "tag.cu").read_text(encoding="utf-8")]
    return Program("tags of reserve spaces", "\n".join([*parts, *instances]), tuple(_ARGUMENTS))
