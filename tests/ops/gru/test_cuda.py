"""GRUBlockCell on a GPU, and its kernels on the CPU, compute what the reference does in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.cuda.programs import ELEMENT_THREADS, Limits
from gradserve_server.ops.gru import cuda as cuda_kernels
from gradserve_server.ops.gru.cuda import CudaGRU
from gradserve_server.ops.gru.reference import gru_block_cell
from gradserve_server.ops.gru.spec import CellInputs, GradAttributes, GradInputs, Sizes
from gradserve_server.tensors.spec import FLOATING
from tests.devices.cuda.emulation.device import EmulatedDevice
from tests.golden.gru_block_cell import (
    ForwardCase,
    GradientCase,
    assert_outputs,
    load_forward_cases,
    load_gradient_cases,
)

SEED = 20201120
ALL = GradAttributes(weight_gradients=True)

by_forward_case = pytest.mark.parametrize("case", load_forward_cases(), ids=str)
by_gradient_case = pytest.mark.parametrize("case", load_gradient_cases(), ids=str)


def cell(device: Any, gru: CudaGRU, case: ForwardCase) -> dict[str, Any]:
    inputs = CellInputs(**{name: device.from_host(array) for name, array in vars(case.inputs).items()})
    with device.computing():
        return vars(gru.cell(inputs, case.plan.sizes))


def gradient(device: Any, gru: CudaGRU, case: GradientCase, attributes: GradAttributes) -> dict[str, Any]:
    inputs = GradInputs(**{name: device.from_host(array) for name, array in vars(case.inputs).items()})
    with device.computing():
        outputs = gru.gradient(inputs, attributes, case.plan.sizes)
    return {name: output for name, output in vars(outputs).items() if output is not None}


class TestEmulated:
    """With NumPy's products."""

    @by_forward_case
    def test_cell(self, compiled: Path, case: ForwardCase) -> None:
        device = EmulatedDevice(compiled, seed=SEED)
        outputs = cell(device, CudaGRU(device, np), case)
        assert_outputs(case, outputs)
        device.check_margins()

    @by_gradient_case
    def test_gradient(self, compiled: Path, case: GradientCase) -> None:
        device = EmulatedDevice(compiled, seed=SEED)
        outputs = gradient(device, CudaGRU(device, np), case, ALL)
        assert_outputs(case, outputs)
        device.check_margins()

    def test_weight_gradients_are_computed_when_they_are_wanted(self, compiled: Path) -> None:
        device, case = EmulatedDevice(compiled), load_gradient_cases()[-1]
        outputs = gradient(device, CudaGRU(device, np), case, GradAttributes())
        assert list(outputs) == ["d_x", "d_h_prev", "d_c_bar", "d_r_bar_u_bar"]

    def test_threads_do_several_elements_where_there_are_many(self, compiled: Path) -> None:
        sizes = Sizes(30, 5, 40)
        assert sizes.batch * sizes.cells > 4 * ELEMENT_THREADS
        shapes = {"x": (30, 5), "h_prev": (30, 40), "w_ru": (45, 80), "w_c": (45, 40), "b_ru": (80,), "b_c": (40,)}
        random = np.random.default_rng(3)
        inputs = CellInputs(**{name: random.uniform(-1, 1, shape) for name, shape in shapes.items()})
        device = EmulatedDevice(compiled, Limits(num_multiprocessors=1, shared_bytes=0, element_blocks=1), SEED)
        on_device = CellInputs(**{name: device.from_host(array) for name, array in vars(inputs).items()})
        with device.computing():
            outputs = CudaGRU(device, np).cell(on_device, sizes)
        for name, expected in vars(gru_block_cell(np, inputs, sizes)).items():
            np.testing.assert_allclose(getattr(outputs, name), expected, rtol=0, atol=1e-12, err_msg=name)
        device.check_margins()

    def test_preparing_ends_when_told(self, compiled: Path) -> None:
        device = EmulatedDevice(compiled)
        checks = iter([False, True])
        CudaGRU(device, np).prepare(lambda: next(checks))
        assert next(checks, None) is None


@pytest.mark.cuda
class TestOnAGpu:
    @pytest.fixture(scope="class")
    @classmethod
    def device(cls) -> Any:
        from gradserve_server.devices.cuda.device import CudaDevice

        return CudaDevice(0)

    @pytest.fixture(scope="class")
    @classmethod
    def gru(cls, device: Any) -> CudaGRU:
        import cupy

        made = CudaGRU(device, cupy)
        made.prepare(lambda: False)
        return made

    @by_forward_case
    def test_cell(self, device: Any, gru: CudaGRU, case: ForwardCase) -> None:
        outputs = cell(device, gru, case)
        assert_outputs(case, {name: device.to_host(output) for name, output in outputs.items()})

    @by_gradient_case
    def test_gradient(self, device: Any, gru: CudaGRU, case: GradientCase) -> None:
        outputs = gradient(device, gru, case, ALL)
        assert_outputs(case, {name: device.to_host(output) for name, output in outputs.items()})


class TestLaunches:
    @pytest.mark.parametrize(("count", "blocks"), [(1, 1), (256, 1), (257, 2), (1 << 40, 16 * 132)])
    def test_blocks(self, count: int, blocks: int) -> None:
        launch = cuda_kernels.kernel_launch("gates", FLOATING[2], count, EmulatedDevice(Path()).limits)
        assert (launch.kernel, launch.grid, launch.threads) == ("gru_gates_float32", (blocks, 1), 256)

    def test_every_kernel_has_an_instance_for_its_dtypes(self) -> None:
        kernels = {dtype.name: cuda_kernels.program(dtype).kernels for dtype in FLOATING}
        assert {name: len(instances) for name, instances in kernels.items()} == {
            **dict.fromkeys(("float32", "float64"), 5),
            **dict.fromkeys(("float16", "bfloat16"), 2),
        }
        assert len({instance for instances in kernels.values() for instance in instances}) == 14
