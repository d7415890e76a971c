"""The pass of one pseudo-layer through time on the host, as the implementations of a step see it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.cpu.saved import SavedDirection
from gradserve_server.ops.cudnn_rnn.network import Mode

Step: TypeAlias = Callable[[int], None]
"""A function that does a step, counted in the order of the scan."""

Times = TypeVar("Times", int, NDArray[np.int64])
"""One time, or an array of times."""


@dataclass(frozen=True)
class Geometry:
    """The sizes and the sequences of a pass.

    Attributes:
        mode: The kind of cell.
        units: H.
        steps: T.
        lengths: int64, [B].
        reverse: Whether this is direction 1, which begins with the last step.
        offset: The place of this direction's elements among those of its layer.
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
        """The time of a step, counted in the direction's order."""
        return self.steps - 1 - step if self.reverse else step

    def time_back(self, step: int) -> int:
        """The time of a step, counted in the opposite order."""
        return step if self.reverse else self.steps - 1 - step

    def output_before(self, time: Times) -> Times:
        """The index of the state before a step in a layer's saved outputs; the state after it is at `time` + 1."""
        return time + 2 if self.reverse else time

    def cell(self, time: Times) -> Times:
        """The index of a step in the saved cells."""
        return time if self.reverse else time + 1

    def cell_before(self, time: Times) -> Times:
        """The index of the state before a step in the saved cells."""
        return time + 1 if self.reverse else time

    def last_times(self) -> NDArray[np.int64]:
        """The last step of each sequence in the direction's order."""
        return np.zeros_like(self.lengths) if self.reverse else self.lengths - 1

    def first_times(self) -> NDArray[np.int64]:
        """The first step of each sequence in the direction's order."""
        return self.lengths - 1 if self.reverse else np.zeros_like(self.lengths)


@dataclass(frozen=True)
class ForwardScan:
    """A forward pass.

    Attributes:
        geometry: The sizes and sequences of the pseudo-layer.
        weights: R, [G * H, H'].
        recurrent: [B, G * H]: the products of h_(t-1) and R, before each step.
        bias: [G, H], the sum of both; for gru [4, H]: bW + bR of r and z, bW of n, bR of n.
        gates: [T, B, G, H]: the products of the input and W at first; then the gates, for lstm and gru.
        saved: The arrays for the data that the backward pass needs.
        outputs: The array for the outputs: a layer's, or the outputs before the projection.
        first_output: The index of the first step in it.
        output_offset: The place of this direction's elements in it.
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

    def steps_between(self, begin: int, end: int) -> "ForwardScan":
        """Returns the pass through some of the steps, in the order of the scan, with views of the arrays.

        Only for passes without a projection.
        """
        geometry = self.geometry
        first, last = sorted((geometry.time(begin), geometry.time(end - 1)))
        times, states, both = slice(first, last + 1), slice(first, last + 2), slice(first, last + 3)
        cells, candidates = self.saved.cells, self.saved.candidates
        return replace(
            self,
            geometry=replace(geometry, steps=end - begin, lengths=geometry.lengths - first),
            gates=self.gates[times],
            saved=replace(
                self.saved,
                cells=None if cells is None else cells[states],
                candidates=None if candidates is None else candidates[times],
            ),
            outputs=self.outputs[both],
        )


@dataclass(frozen=True)
class BackwardScan:
    """A backward pass.

    Attributes:
        geometry: The sizes and sequences of the pseudo-layer.
        weights: R, [G * H, H'].
        saved: The data that the forward pass saved.
        outputs: [T + 2, B, D * H'], the layer's.
        d_outputs: [T, B, columns]: the gradients of ForwardScan.outputs.
        d_output_offset: The place of this direction's elements in columns.
        incoming: [2, B, H]: the gradient from the step done before, and the gradient of the final state.
        carry: [B, H]. For lstm the gradient of c; for gru the part of h's gradient that does not pass through R.
        d_gates: [T, B, G, H]: the array for the gradients of the arguments of the gates' functions. For gru
            [T, B, 4, H]: n, r, z, and the gradient of R_n h_(t-1) + bR_n.
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
    """An implementation of the steps, except for the products with the recurrent weights."""

    @property
    def can_split(self) -> bool:
        """True if steps can be computed for some of the sequences, rather than only for all."""
        ...

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        """Returns a function that does one step forward, for these sequences."""
        ...

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        """Returns a function that does one step backward, for these sequences."""
        ...

    def scan_forward(self, scan: ForwardScan) -> bool:
        """Does all steps, including the products, if that is the fastest way; returns whether it did."""
        ...

    def scan_backward(self, scan: BackwardScan) -> bool:
        """Does all steps, including the products, if that is the fastest way; returns whether it did."""
        ...
