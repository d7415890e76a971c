"""The recurrent networks that cuDNN supports, and the layout of their parameters in one vector.

A network has num_layers layers of one or two directions. A layer and a direction make a pseudo-layer, with the number
layer * num_directions + direction; direction 1 runs backwards in time. Notation: G gates, H num_units, H' the size of
the hidden state, which is the size of the projection if there is one, else H.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradserve_server.devices.device import Array


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
