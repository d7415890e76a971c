"""All steps forward of an LSTM for a few sequences, with their products, on several threads; see `kernels`.

Every step is cut into the same parts, each a range of units, whatever the number of threads. A thread that finds all
parts of a step taken waits for them: h is needed whole for the next step. That takes a fraction of a
microsecond, because the others are at work on them.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import DONE, count_up, wait_for
from gradserve_server.ops.cudnn_rnn.cpu.lstm import forward_row
from gradserve_server.ops.cudnn_rnn.cpu.products import products_with_rows

_THREADS = 1
"""The index of the counter of threads that take part."""


def lstm_scan_forward(
    part_units: Any,
    taken: Any,
    reverse: Any,
    steps: Any,
    units: Any,
    lengths: Any,
    weights: Any,
    recurrent: Any,
    bias: Any,
    gates: Any,
    cells: Any,
    outputs: Any,
    stride: Any,
    offset: Any,
    counters: Any,
) -> None:
    """Computes c_t = f c_(t-1) + i c~ and h_t = o tanh(c_t)."""
    batch, num_parts = len(lengths), -(-units // part_units)
    first_part = _first_part(counters, num_parts)
    for step in range(steps):
        time = steps - 1 - step if reverse else step
        cell, cell_before = (time, time + 1) if reverse else (time + 1, time)
        position = (time + 2 if reverse else time) * batch * stride + offset
        for index in range(num_parts):
            part = (first_part + index) % num_parts
            if count_up(taken, step * num_parts + part) > 0:
                continue
            first, end = part * part_units, min((part + 1) * part_units, units)
            for gate in range(4):
                row, end_row = gate * units + first, gate * units + end
                products_with_rows(weights, row, end_row, 4, units, batch, outputs, position, stride, recurrent)
            for row in range(batch):
                if time < lengths[row]:
                    forward_row(
                        first,
                        end,
                        units,
                        recurrent,
                        row * 4 * units,
                        bias,
                        gates,
                        (time * batch + row) * 4 * units,
                        cells,
                        (cell * batch + row) * units,
                        (cell_before * batch + row) * units,
                        outputs,
                        ((time + 1) * batch + row) * stride + offset,
                    )
            count_up(counters, DONE)
        wait_for(counters, DONE, (step + 1) * num_parts)


@register_jitable
def _first_part(counters: Any, num_parts: Any) -> Any:
    """Returns the part of each step that this thread tries first, so that it finds its weights in its own cache."""
    return count_up(counters, _THREADS) * (num_parts // 2) % num_parts
