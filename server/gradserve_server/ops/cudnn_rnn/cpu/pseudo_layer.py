"""One pseudo-layer of CudnnRNN on the host.

`PseudoLayer` computes the products over all steps at once. A scan is its pass through time, whose steps `Cells` do.
`SavedLayer` is the data that the forward pass keeps for the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.products import Product, Products, Summation, sum_of_rows
from gradserve_server.ops.cudnn_rnn.spec import Mode, PseudoLayerParams

Step: TypeAlias = Callable[[int], None]
"""A function that does a step, counted in the order of the scan."""

Times = TypeVar("Times", int, NDArray[np.int64])
"""One time, or an array of times."""


_MIN_ROWS = 8
"""The fewest sequences for a thread: for fewer, reading the weights takes as long as the products."""

_WIDE_TERMS, _WIDE_MULTIPLICATIONS = 1024, 1 << 25
"""The most terms and multiplications for sums in float64, which take a millisecond longer."""


@dataclass(frozen=True)
class States:
    """The states of one pseudo-layer, or their gradients: h, [B, H'], and for lstm c, [B, H]."""

    h: NDArray[Any]
    c: NDArray[Any] | None


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
class SavedDirection:
    """The data that the forward call saves for one pseudo-layer. Floats are in the dtype of the computation.

    Attributes:
        gates: [T, B, G, H]; None in networks without gates.
        cells: [T + 1, B, H], for lstm: c, and the initial state as an additional step, the first one for direction 0
            and the last one for direction 1.
        candidates: [T, B, H], for gru: R_n h_(t-1) + bR_n.
        unprojected: [T, B, H]: with a projection, the output before it.
        kept: bool, [T, B, columns]: the elements of the layer's input that dropout keeps; None without dropout.
    """

    gates: NDArray[Any] | None = None
    cells: NDArray[Any] | None = None
    candidates: NDArray[Any] | None = None
    unprojected: NDArray[Any] | None = None
    kept: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class SavedLayer:
    """The data that the forward call saves for one layer.

    Attributes:
        outputs: [T + 2, B, D * H'], between the initial states of direction 0 and those of direction 1.
        directions: The data of one or two directions.
    """

    outputs: NDArray[Any]
    directions: tuple[SavedDirection, ...]


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


class PseudoLayer:
    """A pseudo-layer, its parameters and its sequences."""

    def __init__(
        self, device: CpuDevice, parallel: ForkJoin, cells: Cells, geometry: Geometry, params: PseudoLayerParams
    ) -> None:
        """Takes memory from `device` and threads from `parallel`; `cells` does the steps."""
        self._device = device
        self._parallel = parallel
        self._products = Products(parallel)
        self._cells = cells
        self._geometry = geometry
        self._params = params
        self._hidden_size = params.recurrent_weights.shape[1]
        self._columns = slice(geometry.offset, geometry.offset + self._hidden_size)
        self._rows = np.arange(geometry.batch)

    def forward(
        self,
        x: NDArray[Any],
        initial: States,
        saved: SavedDirection,
        outputs: NDArray[Any],
        is_valid: NDArray[np.bool_],
    ) -> States:
        """Does all steps forward in time.

        Args:
            x: [T, B, columns].
            initial: The initial states.
            saved: The arrays for the data that the backward pass needs. Steps beyond the end of a sequence are not
                written.
            outputs: [T + 2, B, D * H'], of the layer: the array for the outputs, and for the initial state before them.
            is_valid: [T, B, 1]: whether a sequence has a step.

        Returns:
            The last state of each sequence.
        """
        geometry, params = self._geometry, self._params
        first, last = geometry.first_times(), geometry.last_times()
        outputs[geometry.output_before(first), self._rows, self._columns] = initial.h
        if saved.cells is not None:
            saved.cells[geometry.cell_before(first), self._rows] = initial.c
        is_projected = saved.unprojected is not None
        scan = ForwardScan(
            geometry=geometry,
            weights=params.recurrent_weights,
            recurrent=np.empty((geometry.batch, len(params.recurrent_weights)), x.dtype),
            bias=self._bias(),
            gates=self._input_products(x, saved.gates),
            saved=saved,
            outputs=outputs if saved.unprojected is None else saved.unprojected,
            first_output=0 if is_projected else 1,
            output_offset=0 if is_projected else geometry.offset,
        )
        if not self._cells.scan_forward(scan):
            self._step_forward(scan, outputs, is_valid)
        c = None if saved.cells is None else saved.cells[geometry.cell(last), self._rows]
        return States(outputs[last + 1, self._rows, self._columns], c)

    def backward(
        self,
        x: NDArray[Any],
        saved: SavedDirection,
        outputs: NDArray[Any],
        d_outputs: NDArray[Any],
        d_last: States,
        d_params: PseudoLayerParams,
    ) -> tuple[NDArray[Any], States]:
        """Does all steps backward in time.

        Args:
            x: See `forward`.
            saved: The data that `forward` saved.
            outputs: The outputs of `forward`.
            d_outputs: [T, B, D * H'], gradients of the outputs of the layer. Not read beyond the end of a sequence.
            d_last: Gradients of the last states.
            d_params: The arrays for the gradients of the parameters.

        Returns:
            The gradients of x and of the initial states.
        """
        geometry = self._geometry
        batch, units = geometry.batch, geometry.units
        num_columns = (4 if geometry.mode is Mode.GRU else geometry.mode.num_gates, units)
        scan = BackwardScan(
            geometry=geometry,
            weights=self._params.recurrent_weights,
            saved=saved,
            outputs=outputs,
            d_outputs=d_outputs,
            d_output_offset=geometry.offset,
            incoming=np.zeros((2, batch, units), x.dtype),
            carry=np.zeros((batch, units), x.dtype) if d_last.c is None else d_last.c.copy(),
            d_gates=self._device.empty((geometry.steps, batch, *num_columns), x.dtype),
        )
        if self._params.projection is not None:
            self._step_back_projected(scan, d_last, d_params)
        else:
            scan.incoming[1] = d_last.h
            if not self._cells.scan_backward(scan):
                self._step_back(scan)
        d_recurrent = scan.d_recurrent.reshape(geometry.steps, batch, -1)
        d_h = d_recurrent[geometry.first_times(), self._rows] @ self._params.recurrent_weights
        if geometry.mode is Mode.GRU:
            d_h += scan.carry
        self._params_gradients(scan, x, d_params)
        return self._input_gradient(scan, x), States(d_h, None if d_last.c is None else scan.carry)

    def _bias(self) -> NDArray[Any]:
        input_bias = self._params.input_bias.reshape(-1, self._geometry.units)
        recurrent_bias = self._params.recurrent_bias.reshape(-1, self._geometry.units)
        if self._geometry.mode is not Mode.GRU:
            bias: NDArray[Any] = input_bias + recurrent_bias
            return bias
        return np.concatenate((input_bias[:2] + recurrent_bias[:2], input_bias[2:], recurrent_bias[2:]))

    def _input_products(self, x: NDArray[Any], gates: NDArray[Any] | None) -> NDArray[Any]:
        """Multiplies the inputs of all steps by W."""
        geometry, weights = self._geometry, self._params.input_weights
        shape = (geometry.steps, geometry.batch, geometry.mode.num_gates, geometry.units)
        products: NDArray[Any] = self._device.empty(shape, x.dtype) if gates is None else gates
        if weights.shape[1]:
            self._products.compute(Product(_by_step(x), weights.T, _by_step(products)))
        else:
            products[...] = x[:, :, None]
        return products

    def _step_forward(self, scan: ForwardScan, outputs: NDArray[Any], is_valid: NDArray[np.bool_]) -> None:
        geometry = self._geometry
        hidden = [each[:, self._columns] for each in outputs]
        # In this order BLAS is a fifth faster than with a transposed view.
        weights = np.ascontiguousarray(self._params.recurrent_weights.T)
        projection = None if self._params.projection is None else self._params.projection.T

        def steps(rows: slice) -> None:
            do_step = self._cells.forward_step(scan, rows)
            for step in range(geometry.steps):
                checkpoint()
                time = geometry.time(step)
                np.matmul(hidden[geometry.output_before(time)][rows], weights, out=scan.recurrent[rows])
                do_step(step)
                if projection is not None:
                    projected = scan.outputs[time, rows] @ projection
                    np.copyto(hidden[time + 1][rows], projected, where=is_valid[time, rows])

        self._for_all_rows(steps)

    def _step_back(self, scan: BackwardScan) -> None:
        geometry = self._geometry
        d_recurrent = list(scan.d_recurrent.reshape(geometry.steps, geometry.batch, -1))
        incoming = scan.incoming[0]

        def steps(rows: slice) -> None:
            do_step = self._cells.backward_step(scan, rows)
            for step in range(geometry.steps):
                checkpoint()
                if step:
                    np.matmul(d_recurrent[geometry.time_back(step - 1)][rows], scan.weights, out=incoming[rows])
                do_step(step)

        self._for_all_rows(steps)

    def _step_back_projected(self, scan: BackwardScan, d_last: States, d_params: PseudoLayerParams) -> None:
        """Does the steps with gradients of the output before the projection, and without incoming gradients."""
        geometry = self._geometry
        projection, d_projection = self._params.projection, d_params.projection
        assert projection is not None
        assert d_projection is not None
        assert scan.saved.unprojected is not None
        d_recurrent = list(scan.d_recurrent.reshape(geometry.steps, geometry.batch, -1))
        d_hidden = self._device.empty((geometry.steps, *d_last.h.shape), d_last.h.dtype)
        d_unprojected = self._device.empty(scan.saved.unprojected.shape, d_last.h.dtype)
        incoming = np.zeros_like(d_last.h)
        last_times = geometry.last_times()
        seen = replace(scan, d_outputs=d_unprojected, d_output_offset=0)

        def steps(rows: slice) -> None:
            do_step = self._cells.backward_step(seen, rows)
            for step in range(geometry.steps):
                checkpoint()
                time = geometry.time_back(step)
                if step:
                    np.matmul(d_recurrent[geometry.time_back(step - 1)][rows], scan.weights, out=incoming[rows])
                d = np.where(np.equal(last_times[rows], time)[:, None], d_last.h[rows], incoming[rows])
                d += scan.d_outputs[time, rows, self._columns]
                d_hidden[time, rows] = np.where((time < geometry.lengths[rows])[:, None], d, 0)
                np.matmul(d_hidden[time, rows], projection, out=d_unprojected[time, rows])
                do_step(step)

        self._for_all_rows(steps)
        summation = self._batch_summation(d_projection.size)
        self._products.compute(Product(_by_step(d_hidden).T, _by_step(scan.saved.unprojected), d_projection, summation))

    def _for_all_rows(self, steps: Callable[[slice], None]) -> None:
        """Splits the sequences between threads, because they do not depend on each other."""
        batch = self._geometry.batch
        num_parts = min(self._parallel.num_threads, batch // _MIN_ROWS) if self._cells.can_split else 1
        size = -(-batch // max(num_parts, 1))
        self._parallel.run_all(
            [partial(steps, slice(first, min(first + size, batch))) for first in range(0, batch, size)]
        )

    def _params_gradients(self, scan: BackwardScan, x: NDArray[Any], d_params: PseudoLayerParams) -> None:
        """Computes the gradients of the parameters, with one product over all steps for each matrix."""
        geometry = self._geometry
        d_gates = _by_step(scan.d_gates)
        summation = self._batch_summation(d_gates.shape[1] * max(x.shape[2], self._hidden_size))
        if summation is Summation.WIDE:
            d_gates = d_gates.astype(np.float64)
        first_recurrent = d_gates.shape[1] - len(d_params.recurrent_bias)
        first = 2 if geometry.reverse else 0
        hidden = _by_step(scan.outputs[first : first + geometry.steps, :, self._columns])
        units = geometry.units
        # The places of the parameters' gates in the gradients.
        parts = [(slice(None), slice(None))]
        if geometry.mode is Mode.GRU:
            parts = [(slice(2 * units), slice(units, 3 * units)), (slice(2 * units, None), slice(units))]
        factors = [(d_gates[:, first_recurrent:].T, hidden, d_params.recurrent_weights)]
        if d_params.input_weights.shape[1]:
            factors += [
                (d_gates[:, of_gradients].T, _by_step(x), d_params.input_weights[of_params])
                for of_params, of_gradients in parts
            ]
        self._products.compute(*(Product(left, right, out, summation) for left, right, out in factors))
        sums = sum_of_rows(d_gates)
        d_params.recurrent_bias[...] = sums[first_recurrent:]
        for of_params, of_gradients in parts:
            d_params.input_bias[of_params] = sums[of_gradients]

    def _batch_summation(self, num_elements: int) -> Summation:
        """Returns the summation for a matrix of this many elements over all steps of all sequences.

        Adding up each step, and then the steps, is more exact than blocks while there are few of both. But it takes
        longer than float64, which is fast enough for a short sum.
        """
        batch, steps = self._geometry.batch, self._geometry.steps
        terms = batch * steps
        is_wide = 2 * (batch + steps) <= terms <= _WIDE_TERMS and terms * num_elements <= _WIDE_MULTIPLICATIONS
        return Summation.WIDE if is_wide else Summation.BLOCKS

    def _input_gradient(self, scan: BackwardScan, x: NDArray[Any]) -> NDArray[Any]:
        geometry, weights = self._geometry, self._params.input_weights
        num_gates, units = geometry.mode.num_gates, geometry.units
        d_x: NDArray[Any] = self._device.empty(x.shape, x.dtype)
        if not weights.shape[1]:
            return np.sum(scan.d_gates[:, :, :num_gates], axis=2, out=d_x)
        if geometry.mode is Mode.GRU:
            weights = np.roll(weights, units, axis=0)
        self._products.compute(Product(_by_step(scan.d_gates)[:, : num_gates * units], weights, _by_step(d_x)))
        return d_x


def _by_step(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a view with one row for each step of each sequence."""
    steps, batch = array.shape[:2]
    return array.reshape(steps * batch, -1)
