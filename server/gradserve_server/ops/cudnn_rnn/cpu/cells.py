"""The steps of CudnnRNN's cells on the host: the table of their kernels, and NumPy until these are compiled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.host.kernels import ELEMENTS, ChunkedKernels, Declared, ForkJoin, Kernel, KernelTable
from gradserve_server.ops.cudnn_rnn.cpu.pseudo_layer import BackwardScan, ForwardScan, Geometry, Step
from gradserve_server.ops.cudnn_rnn.spec import Mode
from gradserve_server.tensors.spec import FLOAT32, FLOAT64

_MAX_WEIGHTS_BYTES = 3 << 19
"""The most weights for the kernels' own products: for one sequence these are faster than BLAS while the weights fit
into a core's cache."""

_MAX_PRODUCTS = 1 << 15
"""The most products per step for the kernels' own products, which take less time than calls for each step."""

_PART_WEIGHTS = 1 << 16
"""The weights of a part of a step that threads share, five microseconds: threads would wait too often for less."""

_PRODUCTS_AT_ONCE = 1 << 26
"""As many products as take about ten milliseconds; a longer pass checks in between whether it was cancelled."""

_PART_UNITS = 16
"""The units of a part are a multiple of this: whole vectors, and whole cache lines for each thread."""


@dataclass(frozen=True)
class Kernels:
    """The kernels for one U."""

    lstm_forward: Kernel
    lstm_backward: Kernel
    gru_forward: Kernel
    gru_backward: Kernel
    vanilla_forward: Kernel
    vanilla_backward: Kernel

    def forward(self, mode: Mode) -> Kernel:
        """Returns the forward kernel."""
        return {Mode.LSTM: self.lstm_forward, Mode.GRU: self.gru_forward}.get(mode, self.vanilla_forward)

    def backward(self, mode: Mode) -> Kernel:
        """Returns the backward kernel."""
        return {Mode.LSTM: self.lstm_backward, Mode.GRU: self.gru_backward}.get(mode, self.vanilla_backward)


@dataclass(frozen=True)
class LstmScans(ChunkedKernels):
    """The scans of an lstm for one U."""

    forward: Kernel
    backward: Kernel


_PLACE, _SIZES = "int64, int64, int64, int64", "bool, int64, int64"
_LSTM = f"{_PLACE}, {_SIZES}, const int64[]"
_GATED = f"{_PLACE}, bool, {_SIZES}, const int64[], const {{U}}[]"
_VANILLA = f"{_PLACE}, bool, {_SIZES}, bool, const int64[], const {{U}}[]"
_SCAN = f"int64, int64[], {_SIZES}, const int64[], const {{U}}[]"
_POSITION = "int64, int64"
_READ, _MADE = "const {U}[]", "{U}[]"

CUDNN_RNN = KernelTable(
    what="CudnnRNN",
    package=__package__,
    kernels=Kernels,
    types={dtype: {"U": ELEMENTS[dtype]} for dtype in (FLOAT32, FLOAT64)},
    declared={
        "lstm_forward": Declared(
            "lstm_loops.lstm_forward", ", ".join((_LSTM, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))
        ),
        "lstm_backward": Declared(
            "lstm_loops.lstm_backward", ", ".join((_GATED, _READ, _READ, _READ, _POSITION, _MADE, _MADE, _MADE))
        ),
        "gru_forward": Declared("loops.gru_forward", ", ".join((_GATED, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))),
        "gru_backward": Declared(
            "loops.gru_backward", ", ".join((_GATED, _READ, _READ, _READ, _READ, _POSITION, _MADE, _MADE, _MADE))
        ),
        "vanilla_forward": Declared(
            "loops.vanilla_forward", ", ".join((_VANILLA, _MADE, _READ, _READ, _MADE, _POSITION))
        ),
        "vanilla_backward": Declared(
            "loops.vanilla_backward", ", ".join((_VANILLA, _READ, _READ, _POSITION, _MADE, _MADE))
        ),
    },
)

LSTM_SCANS = KernelTable(
    what="CudnnRNN's lstm",
    package=__package__,
    kernels=LstmScans,
    types=CUDNN_RNN.types,
    declared={
        "forward": Declared(
            "lstm_loops.lstm_scan_forward", ", ".join((_SCAN, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))
        ),
        "backward": Declared(
            "lstm_loops.lstm_scan_backward",
            ", ".join(("int64, int64", _SCAN, _READ, _READ, _READ, _POSITION, _MADE, _MADE, _MADE)),
        ),
    },
)


class KernelCells:
    """The steps by kernels."""

    can_split = True

    def __init__(self, kernels: Kernels, lstm_scans: LstmScans, parallel: ForkJoin) -> None:
        """Runs kernels for the dtype of the computation; threads share some of them."""
        self._kernels = kernels
        self._lstm_scans = lstm_scans
        self._parallel = parallel

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        """Returns a function that does one step forward, for these sequences."""
        geometry = scan.geometry
        sizes = _sizes(geometry) if geometry.mode is Mode.LSTM else _with_weights(scan, own_products=False)
        return _single_steps(self._kernels.forward(geometry.mode), rows, (*sizes, *_forward_arrays(scan)))

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        """Returns a function that does one step backward, for these sequences."""
        arguments = (*_with_weights(scan, own_products=False), *_backward_arrays(scan))
        return _single_steps(self._kernels.backward(scan.geometry.mode), rows, arguments)

    def scan_forward(self, scan: ForwardScan) -> bool:
        """Does all steps, including the products, if the batch is small; returns whether it did."""
        if not _pays(scan):
            return False
        if scan.geometry.mode is Mode.LSTM:
            for begin, end in _stretches(scan):
                self._scan_lstm(scan.steps_between(begin, end))
        else:
            _all_steps(self._kernels.forward(scan.geometry.mode), scan, _forward_arrays(scan))
        return True

    def scan_backward(self, scan: BackwardScan) -> bool:
        """Does all steps, including the products, if the batch is small; returns whether it did."""
        if not _pays(scan):
            return False
        if scan.geometry.mode is Mode.LSTM:
            self._scan_lstm_back(scan)
        else:
            _all_steps(self._kernels.backward(scan.geometry.mode), scan, _backward_arrays(scan))
        return True

    def _scan_lstm(self, scan: ForwardScan) -> None:
        geometry, weights = scan.geometry, scan.weights.reshape(-1)
        part_units = _part_units(geometry)
        num_parts = -(-geometry.units // part_units)
        taken = np.zeros(geometry.steps * num_parts, np.int64)
        arguments = (part_units, taken, *_sizes(geometry), weights, *_forward_arrays(scan))
        self._lstm_scans.run(self._parallel, self._lstm_scans.forward, arguments, num_parts)

    def _scan_lstm_back(self, scan: BackwardScan) -> None:
        """Does the steps with the columns of R for each part in a row: among all columns, reading them takes longer."""
        geometry, units = scan.geometry, scan.geometry.units
        part_units = min(_part_units(geometry), -(-units // _PART_UNITS) * _PART_UNITS)
        num_parts = -(-units // part_units)
        weights = np.zeros((num_parts, len(scan.weights), part_units), scan.weights.dtype)
        for part, columns in enumerate(weights):
            of_part = scan.weights[:, part * part_units : (part + 1) * part_units]
            columns[:, : of_part.shape[1]] = of_part
        incoming = np.zeros((2, geometry.batch, num_parts * part_units), weights.dtype)
        incoming[:, :, :units] = scan.incoming
        arrays = _backward_arrays(replace(scan, incoming=incoming))
        taken = np.zeros(geometry.steps * num_parts, np.int64)
        arguments = (part_units, taken, *_sizes(geometry), weights.reshape(-1), *arrays)
        for begin, end in _stretches(scan):
            self._lstm_scans.run(self._parallel, self._lstm_scans.backward, (begin, end - begin, *arguments), num_parts)


def _part_units(geometry: Geometry) -> int:
    """Returns the number of units of a part of a step."""
    return -(-_PART_WEIGHTS // (4 * geometry.units * _PART_UNITS)) * _PART_UNITS


def _pays(scan: ForwardScan | BackwardScan) -> bool:
    """Returns True if the kernel's own products are faster than BLAS."""
    batch, weights = scan.geometry.batch, scan.weights
    if scan.saved.unprojected is not None:
        return False
    return (batch == 1 and weights.nbytes <= _MAX_WEIGHTS_BYTES) or batch * weights.size <= _MAX_PRODUCTS


def _single_steps(kernel: Kernel, rows: slice, arguments: tuple[Any, ...]) -> Step:
    all_arguments = (rows.start, rows.stop, *arguments)
    return lambda step: kernel(step, 1, *all_arguments)


def _all_steps(kernel: Kernel, scan: ForwardScan | BackwardScan, arrays: tuple[Any, ...]) -> None:
    arguments = (0, scan.geometry.batch, *_with_weights(scan, own_products=True), *arrays)
    for begin, end in _stretches(scan):
        checkpoint()
        kernel(begin, end - begin, *arguments)


def _stretches(scan: ForwardScan | BackwardScan) -> Iterator[tuple[int, int]]:
    """Yields ranges of steps, each short enough to run without checking whether the call was cancelled."""
    steps = scan.geometry.steps
    at_once = max(_PRODUCTS_AT_ONCE // (scan.geometry.batch * scan.weights.size), 1)
    for begin in range(0, steps, at_once):
        yield begin, min(begin + at_once, steps)


def _with_weights(scan: ForwardScan | BackwardScan, *, own_products: bool) -> tuple[Any, ...]:
    return (own_products, *_sizes(scan.geometry), scan.weights.reshape(-1))


def _sizes(geometry: Geometry) -> tuple[Any, ...]:
    is_relu = (geometry.mode is Mode.RELU,) if geometry.mode in (Mode.RELU, Mode.TANH) else ()
    return (geometry.reverse, geometry.steps, geometry.units, *is_relu, geometry.lengths)


def _forward_arrays(scan: ForwardScan) -> tuple[Any, ...]:
    stride = scan.outputs.shape[-1]
    # The kernels count from the step before the first one.
    offset = scan.output_offset + (scan.first_output - 1) * scan.geometry.batch * stride
    arrays = (scan.recurrent, scan.bias, scan.gates, scan.saved.cells, scan.saved.candidates)
    return (*(array.reshape(-1) for array in (*arrays, scan.outputs) if array is not None), stride, offset)


def _backward_arrays(scan: BackwardScan) -> tuple[Any, ...]:
    saved, is_lstm = scan.saved, scan.geometry.mode is Mode.LSTM
    has_gates = saved.gates is not None
    before = (
        saved.gates,
        saved.cells,
        saved.candidates,
        None if is_lstm else scan.outputs,
        scan.d_outputs,
    )
    after = (scan.incoming, scan.carry if has_gates else None, scan.d_gates)
    position = (scan.d_outputs.shape[-1], scan.d_output_offset)
    return (*_flat(before), *position, *_flat(after))


def _flat(arrays: tuple[Any, ...]) -> list[Any]:
    return [array.reshape(-1) for array in arrays if array is not None]


class NumpyCells:
    """The steps by NumPy."""

    can_split = False

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        """Returns a function that does one step forward, for all sequences."""
        return lambda step: _numpy_forward(scan, scan.geometry.time(step))

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        """Returns a function that does one step backward, for all sequences."""
        return lambda step: _numpy_backward(scan, scan.geometry.time_back(step))

    def scan_forward(self, scan: ForwardScan) -> bool:
        """Returns False: the products are left to BLAS."""
        return False

    def scan_backward(self, scan: BackwardScan) -> bool:
        """Returns False: the products are left to BLAS."""
        return False


def _numpy_forward(scan: ForwardScan, time: int) -> None:
    geometry, saved = scan.geometry, scan.saved
    columns = slice(scan.output_offset, scan.output_offset + geometry.units)
    is_valid = (time < geometry.lengths)[:, None]
    recurrent = scan.recurrent.reshape(scan.gates[time].shape)
    if geometry.mode is Mode.LSTM:
        assert saved.cells is not None
        i, f, n, o = np.moveaxis(scan.gates[time] + recurrent + scan.bias, 1, 0)
        i, f, n, o = _sigmoid(i), _sigmoid(f), np.tanh(n), _sigmoid(o)
        c = f * saved.cells[geometry.cell_before(time)] + i * n
        h = o * np.tanh(c)
        scan.gates[time] = np.stack((i, f, n, o), 1)
        np.copyto(saved.cells[geometry.cell(time)], c, where=is_valid)
    elif geometry.mode is Mode.GRU:
        assert saved.candidates is not None
        r, z = np.moveaxis(_sigmoid(scan.gates[time, :, :2] + recurrent[:, :2] + scan.bias[:2]), 1, 0)
        q = recurrent[:, 2] + scan.bias[3]
        n = np.tanh(scan.gates[time, :, 2] + scan.bias[2] + r * q)
        h = n + z * (scan.outputs[geometry.output_before(time)][:, columns] - n)
        scan.gates[time] = np.stack((r, z, n), 1)
        saved.candidates[time] = q
    else:
        h = (scan.gates[time] + recurrent + scan.bias)[:, 0]
        h = np.maximum(h, 0) if geometry.mode is Mode.RELU else np.tanh(h)
    np.copyto(scan.outputs[time + scan.first_output][:, columns], h, where=is_valid)


def _numpy_backward(scan: BackwardScan, time: int) -> None:
    geometry, saved = scan.geometry, scan.saved
    is_valid = (time < geometry.lengths)[:, None]
    is_last = np.equal(geometry.last_times(), time)[:, None]
    columns = slice(scan.d_output_offset, scan.d_output_offset + geometry.units)
    d = scan.d_outputs[time][:, columns] + np.where(is_last, scan.incoming[1], scan.incoming[0])
    carry = scan.carry
    d_gates: tuple[NDArray[Any], ...]
    if geometry.mode is Mode.LSTM:
        assert saved.gates is not None
        assert saved.cells is not None
        i, f, n, o = np.moveaxis(saved.gates[time], 1, 0)
        tanh_c = np.tanh(saved.cells[geometry.cell(time)])
        d_c = scan.carry + d * o * (1 - tanh_c**2)
        c_before = saved.cells[geometry.cell_before(time)]
        d_gates = (d_c * n * i * (1 - i), d_c * c_before * f * (1 - f), d_c * i * (1 - n**2), d * tanh_c * o * (1 - o))
        carry = d_c * f
    else:
        own = slice(geometry.offset, geometry.offset + geometry.units)
        if geometry.mode is Mode.GRU:
            assert saved.gates is not None
            assert saved.candidates is not None
            r, z, n = np.moveaxis(saved.gates[time], 1, 0)
            d = d + scan.carry
            d_n = d * (1 - z) * (1 - n**2)
            d_z = d * (scan.outputs[geometry.output_before(time)][:, own] - n) * z * (1 - z)
            d_gates = (d_n, d_n * saved.candidates[time] * r * (1 - r), d_z, d_n * r)
            carry = d * z
        else:
            h = scan.outputs[time + 1][:, own]
            d_gates = (np.where(h > 0, d, 0) if geometry.mode is Mode.RELU else d * (1 - h**2),)
    np.copyto(scan.carry, carry, where=is_valid)
    scan.d_gates[time] = np.where(is_valid[:, None], np.stack(d_gates, 1), 0)


def _sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    """The logistic function, in a form that cannot overflow."""
    y: NDArray[Any] = (np.tanh(x / 2) + 1) / 2
    return y
