"""Asks cuDNN how the parameters of all kinds of networks lie in its weight space.

Called as `python -m tests.devices.cuda.cudnn.ask_layouts LIBRARY`.

There need not be a GPU. What is asked depends on the network alone, so cuDNN looks at nothing of the handle: the one it
gets here is a block of zeros. Should a version of cuDNN do otherwise, it is this process that ends.
"""

import ctypes
import itertools
import sys

import numpy as np

from gradserve_server.devices.cuda.cudnn import Cudnn, CudnnObject
from gradserve_server.ops.cudnn_rnn.cuda.network import CudnnNetwork
from gradserve_server.ops.cudnn_rnn.spec import Mode, Network, Problem

SIZES = ((5, 7, 3), (7, 7, 3), (1, 1, 0), (24, 16, 8), (129, 255, 127), (512, 512, 256))
"""Of input, state and projection."""


class ZeroHandle(CudnnObject):
    """Stands for a cudnnHandle_t."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(1 << 20)
        self._as_parameter_ = ctypes.c_void_p(ctypes.addressof(self._memory))


class NetworkWithoutGpu(CudnnNetwork):
    """Does not ask for the sizes of work space and reserve space, which depend on the GPU."""

    def _temporary_bytes(self) -> tuple[int, int]:
        return 0, 0


def problems() -> list[Problem]:
    """All kinds of networks."""
    made = []
    for (inputs, units, projection), mode, layers, directions in itertools.product(SIZES, Mode, (1, 2, 3), (1, 2)):
        for projects, skips in itertools.product((False, True), (False, True)):
            if (projects and (mode is not Mode.LSTM or not projection)) or (skips and inputs != units):
                continue
            network = Network(mode, layers, directions, inputs, units, projection if projects else 0, skips)
            for dtype in (np.float16, np.float32, np.float64):
                made.append(Problem(network, np.dtype(dtype), 4, 3, True, 0.0, 0, True))  # noqa: PERF401
    return made


def main() -> None:
    """Prints a line for each."""
    cudnn, handle = Cudnn(ctypes.CDLL(sys.argv[1])), ZeroHandle()
    for problem in problems():
        layout = NetworkWithoutGpu(cudnn, handle, problem, (0, 0)).params
        what = "is the vector" if layout.is_vector else f"{layout.space_bytes} bytes, {layout.runs}"
        print(f"{problem.dtype} {problem.network}: {what}")  # noqa: T201


if __name__ == "__main__":
    main()
