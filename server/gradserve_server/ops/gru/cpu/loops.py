"""The loops of GRUBlockCell around the products of matrices. See `kernels`.

All arrays are flat; matrices are in row-major order.
"""

from typing import Any

from gradserve_server.devices.host.activations import hyperbolic_tangent, sigmoid
from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store, widen

_TAKEN = 1
"""The index of the counter of chunks that were taken."""


def gates(
    from_x: Any,
    from_h: Any,
    b_ru: Any,
    h_prev: Any,
    rows: Any,
    cells: Any,
    chunk_rows: Any,
    r: Any,
    u: Any,
    h_prevr: Any,
    counters: Any,
) -> None:
    """Computes both gates, and the product of the state and the reset gate.

    Args:
        from_x: [B, 2H]: the product of x and its rows of w_ru.
        from_h: [B, 2H]: the product of h_prev and its rows of w_ru.
        b_ru: [2H].
        h_prev: [B, H].
        rows: B.
        cells: H.
        chunk_rows: The rows of a chunk.
        r: [B, H]: a result.
        u: [B, H]: a result.
        h_prevr: [B, H]: h_prev r, a result.
        counters: int64 [2], zeros.
    """
    num_chunks = -(-rows // chunk_rows)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, rows)):
            first, reset, update = row * cells, 2 * row * cells, (2 * row + 1) * cells
            for cell in range(cells):
                gate = sigmoid(load(from_x, reset + cell) + load(from_h, reset + cell) + load(b_ru, cell))
                store(r, first + cell, gate)
                store(h_prevr, first + cell, load(h_prev, first + cell) * gate)
            for cell in range(cells):
                total = load(from_x, update + cell) + load(from_h, update + cell) + load(b_ru, cells + cell)
                store(u, first + cell, sigmoid(total))
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def state(
    from_x: Any,
    from_h: Any,
    b_c: Any,
    h_prev: Any,
    u: Any,
    rows: Any,
    cells: Any,
    chunk_rows: Any,
    c: Any,
    h: Any,
    counters: Any,
) -> None:
    """Computes the candidate state and the new one.

    Args:
        from_x: [B, H]: the product of x and its rows of w_c.
        from_h: [B, H]: the product of h_prev r and its rows of w_c.
        b_c: [H].
        h_prev: [B, H].
        u: [B, H].
        rows: B.
        cells: H.
        chunk_rows: The rows of a chunk.
        c: [B, H]: a result.
        h: [B, H]: a result.
        counters: int64 [2], zeros.
    """
    num_chunks = -(-rows // chunk_rows)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, rows)):
            first = row * cells
            for cell in range(cells):
                index = first + cell
                candidate = hyperbolic_tangent(load(from_x, index) + load(from_h, index) + load(b_c, cell))
                store(c, index, candidate)
                store(h, index, load(u, index) * (load(h_prev, index) - candidate) + candidate)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def gradient_of_state(
    h_prev: Any,
    u: Any,
    c: Any,
    d_h: Any,
    rows: Any,
    cells: Any,
    chunk_rows: Any,
    d_c_bar: Any,
    d_r_bar_u_bar: Any,
    counters: Any,
) -> None:
    """Computes d_c_bar and d_u_bar, which need no product of matrices.

    Args:
        h_prev: [B, H].
        u: [B, H].
        c: [B, H].
        d_h: [B, H].
        rows: B.
        cells: H.
        chunk_rows: The rows of a chunk.
        d_c_bar: [B, H]: a result.
        d_r_bar_u_bar: [B, 2H]: the second half of its columns is a result.
        counters: int64 [2], zeros.
    """
    one = widen(d_h, 1)
    num_chunks = -(-rows // chunk_rows)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, rows)):
            first, update = row * cells, (2 * row + 1) * cells
            for cell in range(cells):
                index = first + cell
                gate, candidate = load(u, index), load(c, index)
                d_candidate = load(d_h, index) * (one - gate)
                store(d_c_bar, index, d_candidate * (one - candidate * candidate))
                store(d_r_bar_u_bar, update + cell, d_candidate * gate * (load(h_prev, index) - candidate))
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def gradient_of_reset(
    d_x_h_prevr: Any,
    h_prev: Any,
    r: Any,
    rows: Any,
    inputs: Any,
    cells: Any,
    chunk_rows: Any,
    d_r_bar_u_bar: Any,
    counters: Any,
) -> None:
    """Computes d_r_bar.

    Args:
        d_x_h_prevr: [B, I + H]: the product of d_c_bar and w_c^T.
        h_prev: [B, H].
        r: [B, H].
        rows: B.
        inputs: I.
        cells: H.
        chunk_rows: The rows of a chunk.
        d_r_bar_u_bar: [B, 2H]: the first half of its columns is a result.
        counters: int64 [2], zeros.
    """
    one = widen(r, 1)
    num_chunks = -(-rows // chunk_rows)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, rows)):
            first, reset, product = row * cells, 2 * row * cells, row * (inputs + cells) + inputs
            for cell in range(cells):
                gate = load(r, first + cell)
                d_reset = load(d_x_h_prevr, product + cell) * load(h_prev, first + cell)
                store(d_r_bar_u_bar, reset + cell, d_reset * gate * (one - gate))
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def gradient_of_inputs(
    d_x_h_prev: Any,
    d_x_h_prevr: Any,
    r: Any,
    u: Any,
    d_h: Any,
    rows: Any,
    inputs: Any,
    cells: Any,
    chunk_rows: Any,
    d_x: Any,
    d_h_prev: Any,
    counters: Any,
) -> None:
    """Computes d_x and d_h_prev.

    Args:
        d_x_h_prev: [B, I + H]: the product of d_r_bar_u_bar and w_ru^T.
        d_x_h_prevr: [B, I + H]: the product of d_c_bar and w_c^T.
        r: [B, H].
        u: [B, H].
        d_h: [B, H].
        rows: B.
        inputs: I.
        cells: H.
        chunk_rows: The rows of a chunk.
        d_x: [B, I]: a result.
        d_h_prev: [B, H]: a result.
        counters: int64 [2], zeros.
    """
    num_chunks = -(-rows // chunk_rows)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, rows)):
            first, product = row * inputs, row * (inputs + cells)
            for column in range(inputs):
                total = load(d_x_h_prev, product + column) + load(d_x_h_prevr, product + column)
                store(d_x, first + column, total)
            first, product = row * cells, product + inputs
            for cell in range(cells):
                index = first + cell
                total = load(d_x_h_prev, product + cell) + load(d_x_h_prevr, product + cell) * load(r, index)
                store(d_h_prev, index, total + load(d_h, index) * load(u, index))
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def convert(source: Any, chunk_elements: Any, target: Any, counters: Any) -> None:
    """Converts between 16 bits and float32, rounding to the nearest number.

    Args:
        source: The array to convert.
        chunk_elements: The elements of a chunk.
        target: The array for the result.
        counters: int64 [2], zeros.
    """
    num_chunks = -(-source.size // chunk_elements)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for index in range(chunk * chunk_elements, min((chunk + 1) * chunk_elements, source.size)):
            store(target, index, load(source, index))
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)
