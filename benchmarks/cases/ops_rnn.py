"""The recurrent ops: one step of a GRU, and whole networks."""

from __future__ import annotations

from benchmarks.cases import cudnn_rnn, gru_block_cell
from benchmarks.harness.comparison import Comparison


def comparisons() -> list[Comparison]:
    """Returns the comparisons of both families."""
    return [*gru_block_cell.comparisons(), *cudnn_rnn.comparisons()]
