"""The kernels of GRUBlockCell on the host. Importing this imports Numba.

Most run around BLAS's products of matrices. `cell_of_one` computes a whole cell for a batch of one: a vector times
matrices, which takes as long as reading the matrices. It cuts the products into chunks of rows, which lie in memory one
after another. Each chunk has its own sums for all columns, and these are added up in order, so the results do not
depend on the number of threads.

All arrays are flat; matrices are in row-major order.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, sigmoid
from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store, store_at, wait_for, widen

_TAKEN = 1
"""The index of the counter of chunks that were taken."""


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


def cell_of_one(
    x: Any,
    h_prev: Any,
    w_ru: Any,
    w_c: Any,
    b_ru: Any,
    b_c: Any,
    chunk_rows: Any,
    chunk_cells: Any,
    sums_ru: Any,
    sums_c: Any,
    h_prevr: Any,
    r: Any,
    u: Any,
    c: Any,
    h: Any,
    counters: Any,
) -> None:
    """Computes the gates, the candidate state and the new one.

    Args:
        x: [I].
        h_prev: [H].
        w_ru: [I + H, 2H], flat.
        w_c: [I + H, H], flat.
        b_ru: [2H].
        b_c: [H].
        chunk_rows: The rows of a chunk of a product.
        chunk_cells: The cells of a chunk of the functions.
        sums_ru: [chunks of x and of h_prev, 2H]: scratch memory.
        sums_c: [chunks of x and of h_prev, H]: scratch memory.
        h_prevr: [H]: scratch memory.
        r: [H]: a result.
        u: [H]: a result.
        c: [H]: a result.
        h: [H]: a result.
        counters: int64 [2], zeros.
    """
    inputs, cells = len(x), len(h_prev)
    of_x, of_h, of_cells = -(-inputs // chunk_rows), -(-cells // chunk_rows), -(-cells // chunk_cells)
    # Each of these needs all before it.
    gates = of_x + of_x + of_h
    from_reset = gates + of_cells
    state = from_reset + of_h
    end = state + of_cells
    chunk = count_up(counters, _TAKEN)
    while chunk < end:
        if chunk < of_x:
            _multiply(x, w_ru, 0, chunk, chunk_rows, sums_ru[chunk])
        elif chunk < of_x + of_h:
            _multiply(h_prev, w_ru, inputs, chunk - of_x, chunk_rows, sums_ru[chunk])
        elif chunk < gates:
            chunk_of_x = chunk - of_x - of_h
            _multiply(x, w_c, 0, chunk_of_x, chunk_rows, sums_c[chunk_of_x])
        elif chunk < from_reset:
            wait_for(counters, DONE, gates)
            first = (chunk - gates) * chunk_cells
            last = min(first + chunk_cells, cells)
            _add_up(sums_ru, first, last)
            _add_up(sums_ru, cells + first, cells + last)
            total = sums_ru[0]
            for cell in range(first, last):
                gate = sigmoid(total[cell] + load(b_ru, cell))
                store_at(0, r, cell, gate)
                store_at(1, u, cell, sigmoid(total[cells + cell] + load(b_ru, cells + cell)))
                store_at(2, h_prevr, cell, load(h_prev, cell) * gate)
        elif chunk < state:
            wait_for(counters, DONE, from_reset)
            chunk_of_h = chunk - from_reset
            _multiply(h_prevr, w_c, inputs, chunk_of_h, chunk_rows, sums_c[of_x + chunk_of_h])
        else:
            wait_for(counters, DONE, state)
            first = (chunk - state) * chunk_cells
            last = min(first + chunk_cells, cells)
            _add_up(sums_c, first, last)
            total = sums_c[0]
            for cell in range(first, last):
                candidate = hyperbolic_tangent(total[cell] + load(b_c, cell))
                store_at(3, c, cell, candidate)
                store_at(4, h, cell, u[cell] * (load(h_prev, cell) - candidate) + candidate)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


@register_jitable
def _add_up(sums: Any, first: Any, end: Any) -> None:
    """Adds the other rows of some columns to the first row."""
    total = sums[0]
    for row in range(1, len(sums)):
        others = sums[row]
        for column in range(first, end):
            total[column] += others[column]


@register_jitable(fastmath={"contract"})
def _multiply(vector: Any, weights: Any, first_row: Any, chunk: Any, chunk_rows: Any, sums: Any) -> None:
    """Computes the sums of a chunk.

    Args:
        vector: Flat.
        weights: Flat; its row `first_row` belongs to the first element of `vector`.
        first_row: See weights.
        chunk: The number of the chunk of `vector`.
        chunk_rows: The rows of a chunk.
        sums: The results, one for each column.
    """
    columns = len(sums)
    sums[:] = 0
    row, end = chunk * chunk_rows, min((chunk + 1) * chunk_rows, len(vector))
    # No more rows at once: where rows are 4 KB long, or a multiple, they share the same few lines of the first cache.
    while row + 4 <= end:
        at = (first_row + row) * columns
        a, b, c, d = vector[row], vector[row + 1], vector[row + 2], vector[row + 3]
        for column in range(columns):
            first = a * load(weights, at + column) + b * load(weights, at + columns + column)
            second = c * load(weights, at + 2 * columns + column) + d * load(weights, at + 3 * columns + column)
            store(sums, column, sums[column] + (first + second))
        row += 4
    while row < end:
        at, a = (first_row + row) * columns, vector[row]
        for column in range(columns):
            store(sums, column, sums[column] + a * load(weights, at + column))
        row += 1
