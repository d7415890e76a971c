"""The dropout between layers on the CPU, which is the same in every call with the same seed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.spec import Problem


def dropout_masks(problem: Problem) -> tuple[NDArray[Any], ...]:
    """Returns the factors of the inputs of all layers but the first.

    They come from NumPy's counter-based Philox generator with the seed as its key, one after another: for each
    pseudo-layer in turn, whichever dimension of the input comes first. (On a GPU, cuDNN draws other numbers for the
    same seed.)

    Returns:
        For each pseudo-layer of the layers >= 1 an array in the dtype of the computation, [T, B, D * H']: 0 for dropped
        elements, 1 / (1 - dropout) for others. Empty without dropout.
    """
    if not problem.dropout:
        return ()
    network = problem.network
    random = np.random.Generator(np.random.Philox(key=problem.seed))
    shape = (problem.max_seq_length, problem.batch, network.layer_input_size(1))
    kept = problem.compute_dtype.type(1 / (1 - problem.dropout))
    return tuple(
        np.where(random.random(shape, np.float32) < problem.dropout, kept.dtype.type(0), kept)
        for _ in range(network.num_pseudo_layers - network.num_directions)
    )
