"""The steps of CudnnRNN on the host, by kernels."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.host.kernel_table import Kernel
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.ops.cudnn_rnn.cpu.kernels import Kernels, LstmScans
from gradserve_server.ops.cudnn_rnn.cpu.scan import BackwardScan, ForwardScan, Geometry, Step
from gradserve_server.ops.cudnn_rnn.network import Mode

_MAX_WEIGHTS_BYTES = 3 << 19
"""The most weights for the kernels' own products: for one sequence these are faster than BLAS while the weights fit
into a core's cache."""

_MAX_PRODUCTS = 1 << 15
"""The most products per step for the kernels' own products, which take less time than calls for each step."""

_PART_WEIGHTS = 1 << 16
"""The weights of a part of a step that threads share: some five microseconds. For less, they would wait too often."""

_PRODUCTS_AT_ONCE = 1 << 26
"""About as many products take some ten milliseconds; a pass of more looks in between whether it was cancelled."""

_PART_UNITS = 16
"""The units of a part are a multiple of this: whole vectors, and whole cache lines for each thread."""


class KernelCells:
    """The steps by kernels."""

    can_split = True

    def __init__(self, kernels: Kernels, lstm_scans: LstmScans, parallel: ForkJoin) -> None:
        """Takes the kernels for the dtype of the computation, and threads for those that are shared."""
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
        """Does all steps, including the products, if the batch is small; returns whether it did.

        Also for an lstm in one thread: a part of a step would need columns of R, and reading some of them takes almost
        as long as reading whole rows.
        """
        if not _pays(scan):
            return False
        _all_steps(self._kernels.backward(scan.geometry.mode), scan, _backward_arrays(scan))
        return True

    def _scan_lstm(self, scan: ForwardScan) -> None:
        geometry, weights = scan.geometry, scan.weights.reshape(-1)
        part_units = -(-_PART_WEIGHTS // (len(scan.weights) * _PART_UNITS)) * _PART_UNITS
        num_parts = -(-geometry.units // part_units)
        taken = np.zeros(geometry.steps * num_parts, np.int64)
        arguments = (part_units, taken, *_sizes(geometry), weights, *_forward_arrays(scan))
        self._lstm_scans.run(self._parallel, self._lstm_scans.forward, arguments, num_parts)


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
    """Yields ranges of steps, each short enough to be done without a look at whether the call was cancelled."""
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
