"""cuDNN's objects for CudnnRNN: the handle of a thread, the descriptors of a problem, and the weight space."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.cudnn import (
    CUDNN_RNN_PADDED_IO_ENABLED,
    Cudnn,
    CudnnObject,
    DataType,
    DirectionMode,
    ForwardMode,
    MathType,
    RnnAlgo,
    RnnBiasMode,
    RnnDataLayout,
    RnnInputMode,
    RnnMode,
    int32,
    int_array,
)
from gradserve_server.devices.cuda.programs import CompiledProgram, Limits, Program
from gradserve_server.devices.device import Array
from gradserve_server.errors import InternalError
from gradserve_server.ops.cudnn_rnn.spec import (
    Mode,
    Network,
    Problem,
)

_MODES = {
    Mode.RELU: RnnMode.CUDNN_RNN_RELU,
    Mode.TANH: RnnMode.CUDNN_RNN_TANH,
    Mode.LSTM: RnnMode.CUDNN_LSTM,
    Mode.GRU: RnnMode.CUDNN_GRU,
}
_DATA_TYPES = {
    np.dtype(np.float16): DataType.CUDNN_DATA_HALF,
    np.dtype(np.float32): DataType.CUDNN_DATA_FLOAT,
    np.dtype(np.float64): DataType.CUDNN_DATA_DOUBLE,
}
_MATH_TYPES = {
    np.dtype(np.float16): MathType.CUDNN_TENSOR_OP_MATH,
    np.dtype(np.float32): MathType.CUDNN_FMA_MATH,
    np.dtype(np.float64): MathType.CUDNN_DEFAULT_MATH,
}
"""The math types. float32 is really computed in float32; by default cuDNN would round the factors to TensorFloat-32."""

_MAX_DIMENSIONS = 4


KEPT_NETWORKS = 64
"""The most networks whose descriptors a thread keeps."""
KEPT_SEEDS = 4
"""The most seeds for which a thread keeps the generator's first states, of some MB each. Copying them takes
microseconds, making them milliseconds: cuDNN starts a generator for each of the GPU's threads."""


class TagDevice(Protocol):
    """The part of a `KernelDevice` that tags need. Safe to use from several threads."""

    @property
    def limits(self) -> Limits:
        """The properties that decide how work is cut into blocks."""
        ...

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of this thread's scratch memory, which its next kernels may overwrite."""
        ...

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program for this device."""
        ...


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

    def network(self, problem: Problem) -> "CudnnNetwork":
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

    def seed(self, network: "CudnnNetwork", seed: int) -> None:
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


@dataclass(frozen=True)
class Parameter:
    """A matrix or a bias.

    Attributes:
        pseudo_layer: The pseudo-layer to which it belongs.
        linear_layer: Its number there in cuDNN: gates of input matrices come first, then gates of recurrent ones, then
            the projection. A bias has the number of its matrix.
        is_bias: Whether it is a bias.
        rows: The rows of the matrix, or the length of the bias.
        columns: The columns of the matrix; 1 for a bias.
        start: Its place in the parameter vector, in elements.
    """

    pseudo_layer: int
    linear_layer: int
    is_bias: bool
    rows: int
    columns: int
    start: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Run:
    """Elements that are contiguous in both places: from `start` in the vector, from `space_start` in the space."""

    start: int
    space_start: int
    size: int


@dataclass(frozen=True)
class ParamsLayout:
    """The layout of the parameter vector in the weight space.

    Attributes:
        runs: All elements of the vector, in its order.
        space_bytes: The size of the weight space.
        is_vector: Whether the vector itself is a weight space.
    """

    runs: tuple[Run, ...]
    space_bytes: int
    is_vector: bool


class CudnnNetwork:
    """The descriptors for all calls of one problem, whatever the seed. For one thread.

    Attributes:
        rnn: The network: a cudnnRNNDescriptor_t.
        input: The sequences that the network reads: a cudnnRNNDataDescriptor_t.
        output: The sequences that it writes: a cudnnRNNDataDescriptor_t.
        hidden: Hidden states, [L * D, B, H']: a cudnnTensorDescriptor_t.
        cell: Cell states, [L * D, B, H], for lstm; otherwise None.
        params: The layout of parameters in the weight space.
        work_bytes: The size of the work space of a call.
        reserve_bytes: In training the size of the reserve space, for sequences of any length; else 0.
    """

    def __init__(self, cudnn: Cudnn, handle: CudnnObject, problem: Problem, dropout_states: tuple[int, int]) -> None:
        """Describes a problem.

        Args:
            cudnn: The library.
            handle: The handle of this thread.
            problem: The problem.
            dropout_states: The address and size of the memory for the state of the generator. Used only with dropout.

        Raises:
            InvalidArgumentError: cuDNN does not support the problem.
            InternalError: cuDNN failed, or its parameters differ from the network's.
        """
        self._cudnn = cudnn
        self._handle = handle
        self._problem = problem
        self._dropout_states = dropout_states if problem.dropout else (0, 0)
        self._dtype = data_dtype(problem.dtype)
        self._data_type = _DATA_TYPES[self._dtype]
        network = problem.network
        self._dropout = CudnnObject(cudnn, "DropoutDescriptor")
        self.rnn = CudnnObject(cudnn, "RNNDescriptor")
        self.input = CudnnObject(cudnn, "RNNDataDescriptor")
        self.output = CudnnObject(cudnn, "RNNDataDescriptor")
        self._set_dropout("cudnnRestoreDropoutDescriptor" if problem.dropout else "cudnnSetDropoutDescriptor", 0)
        self._lengths = b""
        self.set_lengths(np.full(problem.batch, problem.max_seq_length, np.int32))
        self.hidden = self._states(network.hidden_size)
        self.cell = self._states(network.num_units) if network.mode is Mode.LSTM else None
        self.work_bytes, self.reserve_bytes = self._temporary_bytes()
        self.params = self._params_layout()

    @property
    def forward_mode(self) -> ForwardMode:
        """The mode of forward calls: training if there is a reserve space."""
        training, inference = ForwardMode.CUDNN_FWD_MODE_TRAINING, ForwardMode.CUDNN_FWD_MODE_INFERENCE
        return training if self._problem.is_training else inference

    def set_lengths(self, lengths: NDArray[np.int32]) -> None:
        """Sets the length of every sequence, [B], for the following calls."""
        if lengths.tobytes() == self._lengths:
            return
        network, problem = self._problem.network, self._problem
        layout = RnnDataLayout.CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED
        if problem.time_major:
            layout = RnnDataLayout.CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED
        sizes = (network.input_size, network.num_directions * network.hidden_size)
        for descriptor, size in zip((self.input, self.output), sizes, strict=True):
            fill = np.zeros((), self._dtype)  # the value of output beyond the end of a sequence
            self._cudnn.call(
                "cudnnSetRNNDataDescriptor",
                *(descriptor, self._data_type, layout),
                *(int32(problem.max_seq_length), int32(problem.batch), int32(size)),
                *(lengths.ctypes.data_as(POINTER(c_int)), fill.ctypes.data),
            )
        self._lengths = lengths.tobytes()

    def seed(self, seed: int) -> None:
        """Starts the generator of the dropout, after the earlier work of the stream, which fills its states."""
        self._set_dropout("cudnnSetDropoutDescriptor", seed)

    def restore(self, seed: int) -> None:
        """Continues with the present states of the generator: those that `seed` left, or a copy of them."""
        self._set_dropout("cudnnRestoreDropoutDescriptor", seed)

    def _set_dropout(self, function: str, seed: int) -> None:
        address, num_bytes = self._dropout_states
        self._cudnn.call(function, self._dropout, self._handle, self._problem.dropout, address or None, num_bytes, seed)
        self._set_network()

    def _set_network(self) -> None:
        """Describes the network, again after each change of the dropout, which the descriptor may have copied."""
        network, dtype = self._problem.network, self._problem.compute_dtype
        two_directions = network.num_directions == 2
        self._cudnn.call(
            "cudnnSetRNNDescriptor_v8",
            self.rnn,
            RnnAlgo.CUDNN_RNN_ALGO_STANDARD,
            _MODES[network.mode],
            RnnBiasMode.CUDNN_RNN_DOUBLE_BIAS,
            DirectionMode.CUDNN_BIDIRECTIONAL if two_directions else DirectionMode.CUDNN_UNIDIRECTIONAL,
            RnnInputMode.CUDNN_SKIP_INPUT if network.skip_input else RnnInputMode.CUDNN_LINEAR_INPUT,
            self._data_type,
            _DATA_TYPES[dtype],
            _MATH_TYPES[self._dtype],
            int32(network.input_size),
            int32(network.num_units),
            int32(network.hidden_size),  # num_units without a projection: cuDNN refuses 0
            int32(network.num_layers),
            self._dropout,
            CUDNN_RNN_PADDED_IO_ENABLED,
        )

    def _states(self, size: int) -> CudnnObject:
        batch = self._problem.batch
        descriptor = CudnnObject(self._cudnn, "TensorDescriptor")
        dimensions = int_array((self._problem.network.num_pseudo_layers, batch, size))
        strides = int_array((batch * size, size, 1))
        self._cudnn.call("cudnnSetTensorNdDescriptor", descriptor, self._data_type, 3, dimensions, strides)
        return descriptor

    def _temporary_bytes(self) -> tuple[int, int]:
        """Returns the sizes for the longest sequences, which are described so far and need most."""
        work, reserve = c_size_t(), c_size_t()
        self._cudnn.call(
            "cudnnGetRNNTempSpaceSizes",
            *(self._handle, self.rnn, self.forward_mode, self.input, byref(work), byref(reserve)),
        )
        return work.value, reserve.value if self._problem.is_training else 0

    def _params_layout(self) -> ParamsLayout:
        space = c_size_t()
        self._cudnn.call("cudnnGetRNNWeightSpaceSize", self._handle, self.rnn, byref(space))
        matrix, bias = (CudnnObject(self._cudnn, "TensorDescriptor") for _ in range(2))
        starts = [
            self._space_start(parameter, space.value, matrix, bias) for parameter in parameters(self._problem.network)
        ]
        return make_layout(self._problem.network, starts, space.value, self._dtype.itemsize)

    def _space_start(self, parameter: Parameter, space_bytes: int, matrix: CudnnObject, bias: CudnnObject) -> int:
        """Returns the place of a parameter in the weight space, in elements, as cuDNN says."""
        # cuDNN adds to the address of the space, and reads nothing from it.
        base = 1 << 32
        addresses = c_void_p(), c_void_p()
        self._cudnn.call(
            "cudnnGetRNNWeightParams",
            *(self._handle, self.rnn, parameter.pseudo_layer, space_bytes, base, parameter.linear_layer),
            *(matrix, byref(addresses[0]), bias, byref(addresses[1])),
        )
        address = addresses[parameter.is_bias].value
        shape, strides = self._shape_and_strides(bias if parameter.is_bias else matrix)
        start, remainder = divmod((address or 0) - base, self._dtype.itemsize)
        rows, columns = parameter.rows, parameter.columns
        if address is None or remainder or (shape, strides) != ((1, rows, columns), (rows * columns, columns, 1)):
            raise InternalError(
                f"cuDNN {self._cudnn.version} has other parameters than the network: {parameter} has shape {shape} "
                f"and strides {strides}, at byte {address and address - base}"
            )
        return start

    def _shape_and_strides(self, descriptor: CudnnObject) -> tuple[tuple[int, ...], tuple[int, ...]]:
        data_type, count = c_int(), c_int()
        shape, strides = (c_int * _MAX_DIMENSIONS)(), (c_int * _MAX_DIMENSIONS)()
        self._cudnn.call(
            "cudnnGetTensorNdDescriptor",
            *(descriptor, _MAX_DIMENSIONS, byref(data_type), byref(count), shape, strides),
        )
        return tuple(shape[: count.value]), tuple(strides[: count.value])


def data_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype for cuDNN: float32 for bfloat16, as in TensorFlow."""
    return np.dtype(np.float32) if dtype == ml_dtypes.bfloat16 else dtype


def parameters(network: Network) -> Iterator[Parameter]:
    """Yields all parameters of a network, in the order of cuDNN's numbers; see `split_params`."""
    gates, units = network.mode.num_gates, network.num_units
    start, bias_start = 0, network.num_weights
    for pseudo_layer in range(network.num_pseudo_layers):
        input_columns = network.matrix_columns(pseudo_layer // network.num_directions)
        shapes = [(units, input_columns)] * gates + [(units, network.hidden_size)] * gates
        if network.num_proj:
            shapes.append((network.num_proj, units))
        for linear_layer, (rows, columns) in enumerate(shapes):
            if columns:
                yield Parameter(pseudo_layer, linear_layer, False, rows, columns, start)
                start += rows * columns
            if linear_layer < 2 * gates:
                yield Parameter(pseudo_layer, linear_layer, True, units, 1, bias_start)
                bias_start += units


def make_layout(network: Network, space_starts: Sequence[int], space_bytes: int, itemsize: int) -> ParamsLayout:
    """Returns the layout for a weight space.

    Args:
        network: The network.
        space_starts: The place in the space of each of `parameters`, in elements.
        space_bytes: The size of the space.
        itemsize: The size of an element, in bytes.
    """
    pieces = [
        Run(each.start, space_start, each.size)
        for each, space_start in zip(parameters(network), space_starts, strict=True)
    ]
    runs: list[Run] = []
    for piece in sorted(pieces, key=lambda each: each.start):
        last = runs[-1] if runs else Run(0, 0, 0)
        if (last.start + last.size, last.space_start + last.size) == (piece.start, piece.space_start):
            runs[-1:] = [Run(last.start, last.space_start, last.size + piece.size)]
        else:
            runs.append(piece)
    whole = Run(0, 0, network.num_params)
    return ParamsLayout(tuple(runs), space_bytes, runs == [whole] and space_bytes == network.num_params * itemsize)
