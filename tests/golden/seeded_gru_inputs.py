"""Inputs of the recorded calls of GRUBlockCell, made again from a seed.

Imported by the scripts that run TensorFlow, so it needs nothing but what comes with that.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.seeded_inputs import DTYPES


@dataclass(frozen=True)
class Cell:
    """The sizes of a cell, and how large its weights are."""

    name: str
    seed: int
    batch: int
    inputs: int
    cells: int
    scale: float = 1.0

    def __str__(self) -> str:
        return self.name


CELLS = (
    Cell("ordinary", 1, 4, 5, 6),
    Cell("all_one", 2, 1, 1, 1),
    Cell("batch_of_one", 3, 1, 7, 4),
    Cell("odd", 4, 7, 13, 11),
    Cell("wide", 5, 3, 9, 17, scale=0.25),
    Cell("large_batch", 6, 40, 3, 5),
    Cell("saturated", 7, 5, 4, 6, scale=16.0),
    Cell("no_batch", 8, 0, 3, 2),
    Cell("no_inputs", 9, 3, 0, 4),
    Cell("no_cells", 10, 3, 2, 0),
)


def gru_inputs(cell: Cell, dtype: str) -> dict[str, NDArray[Any]]:
    """Returns the inputs of GRUBlockCellGrad, with r, u and c that no forward call gave.

    The same numbers on every machine and with every version of NumPy: RandomState is frozen, and multiples of 2^-20
    hide the last bit in which mathematical libraries differ.
    """
    random = np.random.RandomState(cell.seed)
    rows, state = cell.inputs + cell.cells, (cell.batch, cell.cells)

    def normal(*shape: int) -> NDArray[np.float64]:
        return np.round(random.standard_normal(shape) * 2**20) / 2**20

    def within(low: float, high: float) -> NDArray[np.float64]:
        return np.round(random.uniform(low, high, state) * 2**20) / 2**20

    arrays = {
        "x": normal(cell.batch, cell.inputs),
        "h_prev": normal(*state),
        "w_ru": cell.scale * normal(rows, 2 * cell.cells),
        "w_c": cell.scale * normal(rows, cell.cells),
        "b_ru": 0.5 + normal(2 * cell.cells),
        "b_c": normal(cell.cells),
        "r": within(0, 1),
        "u": within(0, 1),
        "c": within(-1, 1),
        "d_h": normal(*state),
    }
    # Not from float64 to 16 bits at once: some versions of ml_dtypes round twice, others do not.
    through = np.float64 if dtype == "float64" else np.float32
    return {name: array.astype(through).astype(DTYPES[dtype]) for name, array in arrays.items()}
