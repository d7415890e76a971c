"""Kernels move little more than the fewest bytes that would do, or than their passes over memory need."""

from pathlib import Path

import numpy as np
import pytest

from gradserve_server.devices.cuda.programs import Launch, Program, element_sources
from gradserve_server.tensors.spec import FLOAT32
from tests.devices.cuda.traffic.counting import CountingDevice
from tests.devices.cuda.traffic.measuring import Computation, computations, measure

_OTHERS = ("tanh", "FusedBatchNorm NHWC,", "FusedBatchNorm NCHW,")
"""Whose traffic follows from what is measured here; `python -m tests.devices.cuda.traffic` measures all."""


@pytest.mark.parametrize(
    "computation", [each for each in computations([FLOAT32]) if not each.name.startswith(_OTHERS)], ids=str
)
def test_kernels_move_what_they_must(compiled: Path, computation: Computation) -> None:
    found = measure(computation, compiled)
    assert 0.99 <= found.ratio <= computation.most, found.launches


SOURCE = """
struct Arguments { const float* x; float* y; long long count; };
extern "C" __global__ void copied(const __grid_constant__ Arguments arguments) {
    const long long step = 4LL * gridDim.x * blockDim.x;
    for (int again = 0; again < 3; ++again) {
        for (long long i = 4LL * (blockIdx.x * blockDim.x + threadIdx.x); i < arguments.count; i += step) {
            for (int j = 0; j < 4; ++j) {
                arguments.y[i + j] = arguments.x[i + j];
            }
        }
    }
}
"""


@pytest.mark.parametrize("blocks", [1, 2])
def test_what_a_block_loads_again_counts_once(compiled: Path, blocks: int) -> None:
    device = CountingDevice(compiled)
    x, y = device.from_host(np.ones(4096, np.float32)), device.empty((4096,), FLOAT32)
    arguments = np.zeros((), [("x", np.uint64), ("y", np.uint64), ("count", np.int64)])
    arguments["x"], arguments["y"], arguments["count"] = device.address(x), device.address(y), x.size
    program = Program("copies", "\n".join([*element_sources(), SOURCE]), ("copied",))
    device.compiled(program).launch(Launch("copied", (blocks, 1), 32, 0), arguments)
    (traffic,) = device.traffic
    assert traffic.loaded == x.nbytes
    assert traffic.stored == 3 * y.nbytes
