"""One pseudo-layer's way through time on the host, as the implementations of a step see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.cpu.saved import SavedDirection
from gradserve_server.ops.cudnn_rnn.network import Mode

Step: TypeAlias = Callable[[int], None]
"""Does a step, counted in the order of the scan."""

Times = TypeVar("Times", int, NDArray[np.int64])
"""One, or an array of them."""


@dataclass(frozen=True)
class Geometry:
    """Sizes, and the sequences.

    Attributes:
        mode: The kind of cell.
        units: H.
        steps: T.
        lengths: int64, [B].
        reverse: Whether this is direction 1, which begins with the last step.
        offset: Where the elements of this direction begin in those of its layer.
    """

    mode: Mode
    units: int
    steps: int
    lengths: NDArray[np.int64]
    reverse: bool
    offset: int

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    def time(self, step: int) -> int:
        """The time of a step, counted in the order of the direction."""
        return self.steps - 1 - step if self.reverse else step

    def time_back(self, step: int) -> int:
        """The time of a step, counted in the opposite order."""
        return step if self.reverse else self.steps - 1 - step

    def output_before(self, time: Times) -> Times:
        """Where the state before a step is among a layer's saved outputs; its own is at `time` + 1."""
        return time + 2 if self.reverse else time

    def cell(self, time: Times) -> Times:
        """Where a step is among saved cells."""
        return time if self.reverse else time + 1

    def cell_before(self, time: Times) -> Times:
        """Where the state before a step is among saved cells."""
        return time + 1 if self.reverse else time

    def last_times(self) -> NDArray[np.int64]:
        """The last step of each sequence in the order of the direction."""
        return np.zeros_like(self.lengths) if self.reverse else self.lengths - 1

    def first_times(self) -> NDArray[np.int64]:
        """The first step of each sequence in the order of the direction."""
        return self.lengths - 1 if self.reverse else np.zeros_like(self.lengths)


@dataclass(frozen=True)
class ForwardScan:
    """A way forward.

    Attributes:
        geometry: Of the pseudo-layer.
        weights: R, [G * H, H'].
        recurrent: [B, G * H]: products of h_(t-1) and R, before each step.
        bias: [G, H], the sum of both; for gru [4, H]: bW + bR of r and z, bW of n, bR of n.
        gates: [T, B, G, H]: products of the input and W at first; then the gates, in lstm and gru.
        saved: What is left for the way back.
        outputs: What gets the outputs: that of a layer, or what comes before the projection.
        first_output: Where the first step is among them.
        output_offset: Where the elements of this direction begin.
    """

    geometry: Geometry
    weights: NDArray[Any]
    recurrent: NDArray[Any]
    bias: NDArray[Any]
    gates: NDArray[Any]
    saved: SavedDirection
    outputs: NDArray[Any]
    first_output: int
    output_offset: int


@dataclass(frozen=True)
class BackwardScan:
    """A way back.

    Attributes:
        geometry: Of the pseudo-layer.
        weights: R, [G * H, H'].
        saved: What is left from the way forward.
        outputs: [T + 2, B, D * H'], of the layer.
        d_outputs: [T, B, columns]: gradients of what ForwardScan.outputs were.
        d_output_offset: Where in columns the elements of this direction begin.
        incoming: [2, B, H]: the gradient that comes from the step done before; that of the final state.
        carry: [B, H]. For lstm the gradient of c; for gru the part of that of h that does not come through R.
        d_gates: [T, B, G, H]: gets the gradients of what the gates' functions are taken of. For gru [T, B, 4, H]:
            n, r, z, and the gradient of R_n h_(t-1) + bR_n.
    """

    geometry: Geometry
    weights: NDArray[Any]
    saved: SavedDirection
    outputs: NDArray[Any]
    d_outputs: NDArray[Any]
    d_output_offset: int
    incoming: NDArray[Any]
    carry: NDArray[Any]
    d_gates: NDArray[Any]

    @property
    def d_recurrent(self) -> NDArray[Any]:
        """The gradients of R h_(t-1) + bR, [T, B, G, H]."""
        return self.d_gates[:, :, 1:] if self.geometry.mode is Mode.GRU else self.d_gates


class Cells(Protocol):
    """An implementation of the steps, but for the products with the recurrent weights."""

    @property
    def can_split(self) -> bool:
        """True if steps can be computed for some of the sequences, and not only for all."""
        ...

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        """Returns what does one step of a way forward, for these sequences."""
        ...

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        """Returns what does one step of a way back, for these sequences."""
        ...

    def scan_forward(self, scan: ForwardScan) -> bool:
        """Does all steps, the products too, if that is the fastest way; tells whether it has."""
        ...

    def scan_backward(self, scan: BackwardScan) -> bool:
        """Does all steps, the products too, if that is the fastest way; tells whether it has."""
        ...
