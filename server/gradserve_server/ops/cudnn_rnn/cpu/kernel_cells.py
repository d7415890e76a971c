"""The steps of CudnnRNN on the host, by kernels."""

from typing import Any

from gradserve_server.devices.host.kernel_table import Kernel
from gradserve_server.ops.cudnn_rnn.cpu.kernels import Kernels
from gradserve_server.ops.cudnn_rnn.cpu.scan import BackwardScan, ForwardScan, Geometry, Step
from gradserve_server.ops.cudnn_rnn.network import Mode

_MAX_WEIGHTS_BYTES = 3 << 19
"""The most weights for the kernels' own products: for one sequence these are faster than BLAS while the weights fit
into a core's cache."""

_MAX_PRODUCTS = 1 << 15
"""The most products per step for the kernels' own products, which take less time than calls for each step."""


class KernelCells:
    """The steps by kernels."""

    can_split = True

    def __init__(self, kernels: Kernels) -> None:
        """Takes the kernels for the dtype of the computation."""
        self._kernels = kernels

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        """Returns a function that does one step forward, for these sequences."""
        return _single_steps(self._kernels.forward(scan.geometry.mode), scan.geometry, rows, _forward_arrays(scan))

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        """Returns a function that does one step backward, for these sequences."""
        return _single_steps(self._kernels.backward(scan.geometry.mode), scan.geometry, rows, _backward_arrays(scan))

    def scan_forward(self, scan: ForwardScan) -> bool:
        """Does all steps, including the products, if the batch is small; returns whether it did."""
        if not _pays(scan):
            return False
        kernel = self._kernels.forward(scan.geometry.mode)
        kernel(0, scan.geometry.steps, 0, scan.geometry.batch, True, *_sizes(scan.geometry), *_forward_arrays(scan))
        return True

    def scan_backward(self, scan: BackwardScan) -> bool:
        """Does all steps, including the products, if the batch is small; returns whether it did."""
        if not _pays(scan):
            return False
        kernel = self._kernels.backward(scan.geometry.mode)
        kernel(0, scan.geometry.steps, 0, scan.geometry.batch, True, *_sizes(scan.geometry), *_backward_arrays(scan))
        return True


def _pays(scan: ForwardScan | BackwardScan) -> bool:
    """Returns True if the kernel's own products are faster than BLAS."""
    batch, weights = scan.geometry.batch, scan.weights
    if scan.saved.unprojected is not None:
        return False
    return (batch == 1 and weights.nbytes <= _MAX_WEIGHTS_BYTES) or batch * weights.size <= _MAX_PRODUCTS


def _single_steps(kernel: Kernel, geometry: Geometry, rows: slice, arrays: tuple[Any, ...]) -> Step:
    arguments = (rows.start, rows.stop, False, *_sizes(geometry), *arrays)
    return lambda step: kernel(step, 1, *arguments)


def _sizes(geometry: Geometry) -> tuple[Any, ...]:
    is_relu = (geometry.mode is Mode.RELU,) if geometry.mode in (Mode.RELU, Mode.TANH) else ()
    return (geometry.reverse, geometry.steps, geometry.units, *is_relu, geometry.lengths)


def _forward_arrays(scan: ForwardScan) -> tuple[Any, ...]:
    stride = scan.outputs.shape[-1]
    # The kernels count from the step before the first one.
    offset = scan.output_offset + (scan.first_output - 1) * scan.geometry.batch * stride
    arrays = (scan.weights, scan.recurrent, scan.bias, scan.gates, scan.saved.cells, scan.saved.candidates)
    return (*(array.reshape(-1) for array in (*arrays, scan.outputs) if array is not None), stride, offset)


def _backward_arrays(scan: BackwardScan) -> tuple[Any, ...]:
    saved, is_lstm = scan.saved, scan.geometry.mode is Mode.LSTM
    has_gates = saved.gates is not None
    before = (
        scan.weights,
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
