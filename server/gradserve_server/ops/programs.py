"""All CUDA programs of the server. Needs no GPU."""

from collections.abc import Iterator

from gradserve_server.devices.cuda.program import Program
from gradserve_server.devices.cuda.reduction import kernels as sums
from gradserve_server.ops.activation import cuda as activation
from gradserve_server.ops.batch_norm import cuda as batch_norm
from gradserve_server.ops.cudnn_rnn.cuda.family import tag_program
from gradserve_server.ops.dtypes import MOST_USUAL_FIRST
from gradserve_server.ops.gru import cuda as gru
from gradserve_server.ops.layer_norm import cuda as layer_norm


def all_programs() -> Iterator[Program]:
    """Yields the programs of all families, and of sums on a GPU."""
    yield tag_program()
    yield from map(sums.program, sums.KEYS)
    for dtype in MOST_USUAL_FIRST:
        for operation in batch_norm.KERNELS:
            yield batch_norm.program(operation, dtype)
        for family in (gru, layer_norm, activation):
            yield family.program(dtype)
