"""GRUBlockCell for a batch of one: a vector times matrices, which takes as long as reading the matrices. See `kernels`.

The products are cut into chunks of rows, which lie in memory one after another. Each chunk has its own sums for all
columns, and these are added up in order, so the results do not depend on the number of threads.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, sigmoid
from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store, store_at, wait_for

_TAKEN = 1
"""The index of the counter of chunks that were taken."""


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
