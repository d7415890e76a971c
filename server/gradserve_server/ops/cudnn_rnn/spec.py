"""The inputs, attributes and outputs of CudnnRNN and CudnnRNNBackprop.

T is max_seq_length, B the batch, I input_size; G, L, D, H, P and H' are as in `network`. The checks are in `checks`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.ops.cudnn_rnn.network import Network
from gradserve_server.ops.dtypes import widened
from gradserve_server.tensors.spec import TensorSpec

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
