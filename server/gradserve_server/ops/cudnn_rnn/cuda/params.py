"""Maps the parameter vector to cuDNN's weight space, which has its own order and padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradserve_server.ops.cudnn_rnn.network import Network


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


def parameters(network: Network) -> Iterator[Parameter]:
    """Yields all parameters of a network, in the order of cuDNN's numbers; see `network.split_params`."""
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
