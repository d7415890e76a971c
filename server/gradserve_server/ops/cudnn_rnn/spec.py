"""The networks of CudnnRNN, the layout of their parameters in one vector, and the inputs and outputs of the ops.

A network has num_layers layers of one or two directions. A layer and a direction make a pseudo-layer, with the number
layer * num_directions + direction; direction 1 runs backwards in time.

T is max_seq_length, B the batch, I input_size, G the number of gates, L num_layers, D num_directions, H num_units, P
the size of the projection, and H' the size of the hidden state: P if there is a projection, else H.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.tensors.spec import TensorSpec, widened


class Mode(Enum):
    """The kind of cell; the value is TensorFlow's rnn_mode."""

    RELU = "rnn_relu"
    TANH = "rnn_tanh"
    LSTM = "lstm"
    GRU = "gru"

    @property
    def num_gates(self) -> int:
        """G. The order of gates is: lstm input, forget, new memory, output; gru reset, update, new memory."""
        return {Mode.LSTM: 4, Mode.GRU: 3}.get(self, 1)


@dataclass(frozen=True)
class Network:
    """A recurrent network.

    Attributes:
        mode: The kind of cell.
        num_layers: L, at least 1.
        num_directions: D, 1 or 2.
        input_size: I, the input size of the first layer.
        num_units: H.
        num_proj: P, the size of the projection of the hidden state; 0 for none.
        skip_input: Whether the first layer has no input matrices, so that its input, of size H, is added to every gate.
    """

    mode: Mode
    num_layers: int
    num_directions: int
    input_size: int
    num_units: int
    num_proj: int = 0
    skip_input: bool = False

    @property
    def num_pseudo_layers(self) -> int:
        """L * D."""
        return self.num_layers * self.num_directions

    @property
    def hidden_size(self) -> int:
        """H'."""
        return self.num_proj or self.num_units

    @property
    def gates_size(self) -> int:
        """G * H."""
        return self.mode.num_gates * self.num_units

    def layer_input_size(self, layer: int) -> int:
        """The size of a layer's input, which is the output of both directions of the layer below."""
        return self.num_directions * self.hidden_size if layer else self.input_size

    def matrix_columns(self, layer: int) -> int:
        """The columns of a layer's input matrices: 0 if it has none."""
        return 0 if self.skip_input and not layer else self.layer_input_size(layer)

    @property
    def num_params(self) -> int:
        """The length of the parameter vector."""
        return self.num_weights + 2 * self.num_pseudo_layers * self.gates_size

    @property
    def num_weights(self) -> int:
        """The length of its first part, the matrices."""
        return self.num_directions * (self._layer_weights(0) + (self.num_layers - 1) * self._layer_weights(1))

    def _layer_weights(self, layer: int) -> int:
        columns = self.matrix_columns(layer) + self.hidden_size
        return self.gates_size * columns + self.num_proj * self.num_units


@dataclass(frozen=True)
class PseudoLayerParams:
    """The parameters of one pseudo-layer, as views of the parameter vector.

    Attributes:
        input_weights: W of all gates, shape [G * H, columns of the layer]; no columns with skip_input.
        recurrent_weights: R of all gates, shape [G * H, H'].
        projection: P, shape [P, H]; None without a projection.
        input_bias: bW of all gates, shape [G * H].
        recurrent_bias: bR of all gates, shape [G * H].
    """

    input_weights: Array
    recurrent_weights: Array
    projection: Array | None
    input_bias: Array
    recurrent_bias: Array


def split_params(network: Network, params: Array) -> list[PseudoLayerParams]:
    """Returns views of a parameter vector, NumPy's or CuPy's, for each pseudo-layer.

    First come all matrices: for each pseudo-layer W_0.. of all gates, R_0.. of all gates, and the projection. Then come
    all biases: for each pseudo-layer bW_0.. and bR_0... Each matrix multiplies columns from the left and is in
    row-major order. (This is the order of cuDNN's own buffer for networks without padding, and the order in which Keras
    fills it.)
    """
    size, units, hidden = network.gates_size, network.num_units, network.hidden_size
    position, bias_position = 0, network.num_weights

    def take(rows: int, columns: int) -> Any:
        nonlocal position
        start, position = position, position + rows * columns
        return params[start:position].reshape(rows, columns)

    pseudo_layers = []
    for layer in range(network.num_layers):
        for _ in range(network.num_directions):
            input_weights = take(size, network.matrix_columns(layer))
            recurrent_weights = take(size, hidden)
            projection = take(network.num_proj, units) if network.num_proj else None
            biases = params[bias_position : bias_position + 2 * size]
            bias_position += 2 * size
            pseudo_layers.append(
                PseudoLayerParams(input_weights, recurrent_weights, projection, biases[:size], biases[size:])
            )
    return pseudo_layers


HEADER_BYTES = 128
"""The size of the header of a reserve_space, which says which call it belongs to; and the size of host_reserved."""


@dataclass(frozen=True)
class RnnAttributes:
    """The common attributes of CudnnRNN and CudnnRNNBackprop, with TensorFlow's defaults.

    Attributes:
        rnn_mode: The kind of cell: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        input_mode: "linear_input"; "skip_input", which needs I = H; or "auto_select", which is skip_input if I = H.
        direction: "unidirectional" or "bidirectional".
        dropout: The probability of dropping an element of a layer's input in training; the first layer drops none.
        seed: The seed of the dropout, together with seed2. Both are int32.
        seed2: See `seed`.
        num_proj: For lstm the size of the hidden state, at most H; 0 and H mean no projection.
        time_major: Whether time is the first dimension of sequences, rather than the batch; then the batch is the
            second dimension of states, otherwise the first.
    """

    rnn_mode: str = "lstm"
    input_mode: str = "linear_input"
    direction: str = "unidirectional"
    dropout: float = 0.0
    seed: int = 0
    seed2: int = 0
    num_proj: int = 0
    time_major: bool = True


@dataclass(frozen=True)
class ForwardAttributes(RnnAttributes):
    """Attributes of CudnnRNN.

    Attributes:
        is_training: Whether there is dropout, and a reserve_space for CudnnRNNBackprop.
    """

    is_training: bool = True


@dataclass(frozen=True)
class NetworkAttributes:
    """Attributes of a network, for the ops on its parameters; see RnnAttributes for `rnn_mode` to `num_proj`.

    Attributes:
        num_layers: L, at least 1.
        num_units: H, at least 1.
        input_size: I, at least 1.
    """

    num_layers: int = 0
    num_units: int = 0
    input_size: int = 0
    rnn_mode: str = "lstm"
    input_mode: str = "linear_input"
    direction: str = "unidirectional"
    num_proj: int = 0


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of CudnnRNN. All floats have the same dtype.

    Attributes:
        input: [T, B, I]; without time_major [B, T, I].
        input_h: [L * D, B, H']; without time_major [B, L * D, H'].
        params: [number of parameters].
        input_c: [L * D, B, H]; without time_major [B, L * D, H]. For lstm; not read otherwise.
        sequence_lengths: int32, [B], each from 1 to T. None: all are T.
    """

    input: Array
    input_h: Array
    params: Array
    input_c: Array | None = None
    sequence_lengths: Array | None = None


@dataclass(frozen=True)
class ForwardOutputs:
    """Outputs of CudnnRNN.

    Attributes:
        output: [T, B, D * H'], or [B, T, D * H'].
        output_h: The shape of input_h.
        output_c: The shape of input_c for lstm, else a scalar 0.
        reserve_space: In training the data for CudnnRNNBackprop, one-dimensional; else a scalar 0.
        host_reserved: int8. In training the header of reserve_space, one-dimensional; else a scalar 0.
    """

    output: Array
    output_h: Array
    output_c: Array
    reserve_space: Array
    host_reserved: Array


@dataclass(frozen=True)
class BackpropInputs:
    """Inputs of CudnnRNNBackprop: the inputs and outputs of the forward call, and the gradients of the outputs.

    Attributes:
        host_reserved: The forward call's; None if it is not available.
    """

    input: Array
    input_h: Array
    params: Array
    output: Array
    output_h: Array
    output_backprop: Array
    output_h_backprop: Array
    reserve_space: Array
    input_c: Array | None = None
    sequence_lengths: Array | None = None
    output_c: Array | None = None
    output_c_backprop: Array | None = None
    host_reserved: Array | None = None


@dataclass(frozen=True)
class BackpropOutputs:
    """Outputs of CudnnRNNBackprop.

    Attributes:
        input_backprop: The shape of input; 0 beyond the end of a sequence.
        input_h_backprop: The shape of input_h.
        input_c_backprop: The shape of input_c for lstm, else a scalar 0.
        params_backprop: The shape of params.
    """

    input_backprop: Array
    input_h_backprop: Array
    input_c_backprop: Array
    params_backprop: Array


@dataclass(frozen=True)
class Problem:
    """A network, and the sequences to which it is applied.

    Attributes:
        network: The network.
        dtype: The dtype of all floats.
        max_seq_length: T.
        batch: B.
        time_major: Whether time is the first dimension, rather than the batch.
        dropout: The probability of dropping an element of a layer's input, except the first layer's. 0 if not training,
            or with only one layer.
        seed: The seed of the dropout: 64 bits, the upper half from the attribute seed and the lower from seed2, so that
            no two pairs are the same seed.
        is_training: Whether there is a reserve_space.
    """

    network: Network
    dtype: np.dtype[Any]
    max_seq_length: int
    batch: int
    time_major: bool
    dropout: float
    seed: int
    is_training: bool

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the computation: float32 for 16 bits."""
        return widened(self.dtype)

    def sequence_shape(self, size: int) -> tuple[int, int, int]:
        """The shape of an array with values for each step of each sequence."""
        first, second = (self.max_seq_length, self.batch) if self.time_major else (self.batch, self.max_seq_length)
        return (first, second, size)

    def state_shape(self, size: int) -> tuple[int, int, int]:
        """The shape of an array with values for each pseudo-layer and sequence."""
        count = self.network.num_pseudo_layers
        return (count, self.batch, size) if self.time_major else (self.batch, count, size)

    @property
    def max_reserve_bytes(self) -> int:
        """The most bytes of reserve_space on any device.

        A header; and in compute_dtype, for each step of each sequence, for the states before the first one and for
        those after the last one: for each pseudo-layer its gates, its output, and two more values for each unit (such
        as lstm's c and output before the projection, or gru's R_n h + bR_n); for each pseudo-layer of the layers but
        the first, its input, which the host keeps with dropout and cuDNN always.

            128 + itemsize (T + 2) B (L D ((G + 2) H + H') + (L - 1) D D H')
        """
        network = self.network
        per_step = network.num_pseudo_layers * (network.gates_size + 2 * network.num_units + network.hidden_size)
        upper = network.num_pseudo_layers - network.num_directions
        per_step += upper * network.num_directions * network.hidden_size
        return HEADER_BYTES + self.compute_dtype.itemsize * (self.max_seq_length + 2) * self.batch * per_step


@dataclass(frozen=True)
class Plan:
    """A checked call.

    Attributes:
        problem: The problem to compute.
        output_specs: The specs of all outputs, in their order. Each device decides the sizes of reserve_space and
            host_reserved; here they are `Problem.max_reserve_bytes` and HEADER_BYTES.
    """

    problem: Problem
    output_specs: tuple[TensorSpec, ...]
