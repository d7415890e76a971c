"""Activation functions on a GPU, and their kernels on the CPU, give what the definitions say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import Limits
from gradserve_server.ops.activation import cuda as cuda_kernels
from gradserve_server.ops.activation.cuda import CudaActivation
from gradserve_server.ops.activation.spec import NAMES
from gradserve_server.tensors.spec import FLOAT32, FLOATING
from tests.devices.cuda.emulation.device import H200, EmulatedDevice
from tests.ops.activation.cases import DTYPES, assert_forward, assert_gradient, saved_for_gradient, values

ToHost = Callable[[Any], NDArray[Any]]

SEED = 20201121

by_name = pytest.mark.parametrize("name", NAMES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradients_of(x: NDArray[Any]) -> NDArray[Any]:
    return np.random.default_rng(0).normal(0, 1, x.shape).astype(np.float32).astype(x.dtype)


def check(device: Any, family: CudaActivation, name: str, x: NDArray[Any], to_host: ToHost = np.asarray) -> None:
    """Computes function and gradient, into arrays of their own and in place."""
    dy, saved = gradients_of(x), saved_for_gradient(name, x)
    there, out = device.from_host(x), device.empty(x.shape, x.dtype)
    with device.computing():
        family.forward(name, there, out)
        family.forward(name, there, there)
    assert_forward(name, x, to_host(out))
    assert to_host(there).tobytes() == to_host(out).tobytes()
    there_dy, there_saved = device.from_host(dy), device.from_host(saved)
    with device.computing():
        family.gradient(name, there_dy, there_saved, out)
        family.gradient(name, there_dy, there_saved, there_dy)
    assert_gradient(name, dy, saved, to_host(out))
    assert to_host(there_dy).tobytes() == to_host(out).tobytes()


class TestEmulated:
    @by_name
    @by_dtype
    def test_by_the_definition(self, compiled: Path, dtype: np.dtype[Any], name: str) -> None:
        device = EmulatedDevice(compiled, seed=SEED)
        check(device, CudaActivation(device), name, values(dtype))
        device.check_margins()

    @by_dtype
    @pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 17])
    def test_few_elements(self, compiled: Path, dtype: np.dtype[Any], count: int) -> None:
        device = EmulatedDevice(compiled)
        check(device, CudaActivation(device), "tanh", values(dtype)[-3 - count : -3])
        device.check_margins()

    @by_dtype
    def test_arrays_that_are_not_aligned_for_vectors(self, compiled: Path, dtype: np.dtype[Any]) -> None:
        device = EmulatedDevice(compiled, offset=dtype.itemsize)
        check(device, CudaActivation(device), "relu", values(dtype))
        device.check_margins()
        assert all(kernel.endswith("_by_1") for kernel in device.launched)

    def test_nothing_is_launched_for_empty_arrays(self, compiled: Path) -> None:
        device = EmulatedDevice(compiled)
        check(device, CudaActivation(device), "gelu", np.empty((2, 0, 3), np.float32))
        assert not device.launched

    @by_dtype
    def test_threads_do_several_vectors_where_there_are_many(self, compiled: Path, dtype: np.dtype[Any]) -> None:
        device = EmulatedDevice(compiled, Limits(num_multiprocessors=1, shared_bytes=0, element_blocks=1), SEED)
        check(device, CudaActivation(device), "elu", np.tile(values(dtype), 4))

    def test_preparing_ends_when_told(self, compiled: Path) -> None:
        checks = iter([False, True])
        CudaActivation(EmulatedDevice(compiled)).prepare(lambda: next(checks))
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
    def family(cls, device: Any) -> CudaActivation:
        made = CudaActivation(device)
        made.prepare(lambda: False)
        return made

    @by_name
    @by_dtype
    def test_by_the_definition(self, device: Any, family: CudaActivation, dtype: np.dtype[Any], name: str) -> None:
        check(device, family, name, values(dtype), device.to_host)

    @by_dtype
    def test_empty(self, device: Any, family: CudaActivation, dtype: np.dtype[Any]) -> None:
        check(device, family, "gelu", np.empty((0, 3), dtype), device.to_host)

    @by_dtype
    def test_many_elements(self, device: Any, family: CudaActivation, dtype: np.dtype[Any]) -> None:
        check(device, family, "relu", np.tile(values(dtype)[:-3], 300), device.to_host)


class TestLaunches:
    @pytest.mark.parametrize(
        ("width", "count", "blocks"), [(1, 1, 1), (1, 257, 2), (4, 1024, 1), (4, 1025, 2), (4, 1 << 40, 16 * 132)]
    )
    def test_blocks(self, width: int, count: int, blocks: int) -> None:
        launch = cuda_kernels.kernel_launch("forward", "gelu", FLOAT32, width, count, H200)
        assert launch.kernel == f"gelu_forward_float32_by_{width}"
        assert (launch.grid, launch.threads) == ((blocks, 1), 256)

    @pytest.mark.parametrize(("addresses", "width"), [((256, 512), 4), ((256, 516), 1), ((4, 512), 1)])
    def test_vectors_need_alignment(self, addresses: tuple[int, ...], width: int) -> None:
        assert cuda_kernels.vector_width(FLOAT32, addresses) == width

    def test_every_dtype_has_its_kernels(self) -> None:
        assert [len(cuda_kernels.program(dtype).kernels) for dtype in FLOATING] == [4 * len(NAMES)] * 4
