"""The steps of CudnnRNN on the host in NumPy, for the time until the kernels are compiled."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.cpu.scan import BackwardScan, ForwardScan, Step
from gradserve_server.ops.cudnn_rnn.network import Mode


class NumpyCells:
    """The steps by NumPy."""

    can_split = False

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        """Returns a function that does one step forward, for all sequences."""
        return lambda step: _forward(scan, scan.geometry.time(step))

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        """Returns a function that does one step backward, for all sequences."""
        return lambda step: _backward(scan, scan.geometry.time_back(step))

    def scan_forward(self, scan: ForwardScan) -> bool:
        """Returns False: the products are left to BLAS."""
        return False

    def scan_backward(self, scan: BackwardScan) -> bool:
        """Returns False: the products are left to BLAS."""
        return False


def _forward(scan: ForwardScan, time: int) -> None:
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


def _backward(scan: BackwardScan, time: int) -> None:
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
