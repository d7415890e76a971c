"""LayerNorm on a GPU, and its kernels on the CPU, compute what PyTorch and the reference do in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import Limits
from gradserve_server.ops.layer_norm import cuda as cuda_kernels
from gradserve_server.ops.layer_norm.cuda import CudaLayerNorm
from gradserve_server.ops.layer_norm.reference import layer_norm
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FLOATING
from tests.devices.cuda.emulation.device import H200, EmulatedDevice
from tests.golden.layer_norm import Case, assert_outputs, load_cases
from tests.ops.layer_norm.random_calls import ATTRIBUTES, check, make_inputs, widened

SEED = 20201120
SMALL = Limits(num_multiprocessors=1, shared_bytes=0)
"""A GPU whose blocks have several turns even with small arrays."""
SIZES = [(1, 1), (5, 3), (700, 8), (3, 4103), (37, 264), (0, 5), (4, 0)]
"""Groups, and their elements."""

by_case = pytest.mark.parametrize("case", load_cases(), ids=str)
by_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)
by_sizes = pytest.mark.parametrize(("groups", "size"), SIZES)


@dataclass(frozen=True)
class OnDevice:
    """The family on a device, for arrays of the host."""

    device: Any
    to_host: Callable[[Any], NDArray[Any]] = np.asarray

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        with self.device.computing():
            outputs = CudaLayerNorm(self.device).forward(self._brought(inputs), attributes, geometry)
        return ForwardOutputs(**{name: self.to_host(output) for name, output in vars(outputs).items()})

    def gradient(self, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        with self.device.computing():
            outputs = CudaLayerNorm(self.device).gradient(self._brought(inputs), geometry)
        return GradOutputs(**{name: self.to_host(output) for name, output in vars(outputs).items()})

    def check(self, groups: int, size: int, dtype: np.dtype[Any]) -> bytes:
        """Computes both ops beside the reference; returns all results."""
        return check(self.forward, self.gradient, groups, size, dtype)

    def check_case(self, case: Case) -> None:
        """Computes both ops beside PyTorch."""
        assert_outputs(case, self.forward(case.inputs, case.attributes, case.geometry))
        assert_outputs(case, self.gradient(case.grad_inputs, case.geometry))

    def _brought(self, inputs: Any) -> Any:
        return type(inputs)(**{name: self.device.from_host(array) for name, array in vars(inputs).items()})


class TestEmulated:
    @by_case
    def test_beside_pytorch(self, compiled: Path, case: Case) -> None:
        device = EmulatedDevice(compiled, seed=SEED)
        OnDevice(device).check_case(case)
        device.check_margins()

    @by_dtype
    @by_sizes
    def test_like_the_reference(self, compiled: Path, groups: int, size: int, dtype: np.dtype[Any]) -> None:
        device = EmulatedDevice(compiled, SMALL, SEED)
        OnDevice(device).check(groups, size, dtype)
        device.check_margins()

    @by_dtype
    def test_arrays_that_are_not_aligned_for_vectors(self, compiled: Path, dtype: np.dtype[Any]) -> None:
        device = EmulatedDevice(compiled, offset=8)
        OnDevice(device).check(5, 16, dtype)
        assert [kernel for kernel in device.launched if "_by_" in kernel] == [
            f"layer_norm_{kernel}_{dtype}_by_1" for kernel in ("forward", "x_gradient")
        ]

    @by_dtype
    @pytest.mark.parametrize("limits", [H200, SMALL], ids=["many_blocks", "few_blocks"])
    def test_the_order_of_blocks_and_threads_changes_nothing(
        self, compiled: Path, limits: Limits, dtype: np.dtype[Any]
    ) -> None:
        devices = [EmulatedDevice(compiled, limits, seed) for seed in (0, 1, SEED)]
        assert len({OnDevice(device).check(300, 40, dtype) for device in devices}) == 1

    @pytest.mark.parametrize("kind", ["far from zero", "outlier first"])
    def test_moments_keep_their_digits(self, compiled: Path, kind: str) -> None:
        x = np.random.default_rng(3).normal(1e4 if kind == "far from zero" else 0, 1, (3, 5000)).astype(np.float32)
        if kind == "outlier first":
            x[:, 0] = 1e4
        ones = np.ones(5000, np.float32)
        geometry = Geometry((3,), 5000)
        inputs = ForwardInputs(x, ones, ones)
        outputs = OnDevice(EmulatedDevice(compiled)).forward(inputs, ATTRIBUTES, geometry)
        expected = layer_norm(np, widened(inputs), ATTRIBUTES, geometry)
        np.testing.assert_allclose(outputs.mean, expected.mean, rtol=1e-7, atol=1e-6 / expected.rstd.max())
        np.testing.assert_allclose(outputs.rstd, expected.rstd, rtol=1e-6)
        np.testing.assert_allclose(outputs.y, expected.y, rtol=0, atol=1e-6 * np.abs(expected.y).max())

    @by_dtype
    def test_a_nan_stays_in_its_group(self, compiled: Path, dtype: np.dtype[Any]) -> None:
        device, geometry = OnDevice(EmulatedDevice(compiled)), Geometry((6,), 16)
        inputs, grad_inputs = make_inputs(6, 16, dtype)
        inputs.x[2, 3], grad_inputs.y_backprop[2, 3] = np.nan, np.nan
        gradients = device.gradient(grad_inputs, geometry)
        for found in (device.forward(inputs, ATTRIBUTES, geometry).y, gradients.x_backprop):
            is_nan = np.isnan(found.astype(np.float32))
            assert is_nan[2].all()
            assert not np.delete(is_nan, 2, axis=0).any()
        assert np.flatnonzero(np.isnan(gradients.offset_backprop)).tolist() == [3]

    def test_preparing_ends_when_told(self, compiled: Path) -> None:
        checks = iter([False, True])
        CudaLayerNorm(EmulatedDevice(compiled)).prepare(lambda: next(checks))
        assert next(checks, None) is None


@pytest.mark.cuda
class TestOnAGpu:
    @pytest.fixture(scope="class")
    @classmethod
    def device(cls) -> Any:
        from gradserve_server.devices.cuda.device import CudaDevice

        return CudaDevice(0)

    @by_case
    def test_beside_pytorch(self, device: Any, case: Case) -> None:
        OnDevice(device, device.to_host).check_case(case)

    @by_dtype
    @pytest.mark.parametrize(("groups", "size"), [*SIZES, (8192, 768), (100_000, 6), (2, 1 << 20)])
    def test_like_the_reference(self, device: Any, groups: int, size: int, dtype: np.dtype[Any]) -> None:
        OnDevice(device, device.to_host).check(groups, size, dtype)

    @by_dtype
    def test_results_are_the_same_to_the_bit_every_time(self, device: Any, dtype: np.dtype[Any]) -> None:
        assert len({OnDevice(device, device.to_host).check(3000, 300, dtype) for _ in range(5)}) == 1


class TestLaunches:
    @pytest.mark.parametrize(
        ("size", "threads"), [(0, 1), (1, 1), (8, 1), (9, 2), (256, 32), (257, 64), (4096, 512), (1 << 30, 512)]
    )
    def test_a_group_has_a_power_of_two_of_threads(self, size: int, threads: int) -> None:
        assert cuda_kernels.threads_of_group(Geometry((3,), size)) == threads

    @pytest.mark.parametrize(
        ("groups", "size", "blocks", "threads"),
        [(1, 1, 1, 256), (256, 8, 1, 256), (257, 8, 2, 256), (5, 4096, 5, 512), (1 << 40, 100, 8 * 132, 256)],
    )
    def test_blocks_of_groups(self, groups: int, size: int, blocks: int, threads: int) -> None:
        launch = cuda_kernels.group_launch("x_gradient", Geometry((groups,), size), FLOAT16, 8, H200)
        assert launch.kernel == "layer_norm_x_gradient_float16_by_8"
        assert (launch.grid, launch.threads, launch.shared_bytes) == ((blocks, 1), threads, 16 * threads)

    @pytest.mark.parametrize(
        ("groups", "size", "grid"),
        [(0, 5, (1, 1)), (64, 32, (1, 1)), (65, 33, (2, 2)), (1 << 20, 768, (24, 44)), (1 << 20, 1 << 20, (32768, 1))],
    )
    def test_blocks_of_columns(self, groups: int, size: int, grid: tuple[int, int]) -> None:
        geometry = Geometry((groups,), size)
        sums, _ = cuda_kernels.param_launches(geometry, FLOAT32, H200)
        assert sums.grid == grid
        assert cuda_kernels.partial_bytes(geometry, H200) == 16 * size * grid[1]

    @pytest.mark.parametrize(
        ("size", "dtype", "addresses", "width"),
        [
            (16, FLOAT32, (256, 512), 4),
            (16, BFLOAT16, (256, 512), 8),
            (6, FLOAT64, (256, 512), 2),
            (12, FLOAT16, (256, 512), 1),
            (16, FLOAT32, (256, 520), 1),
        ],
    )
    def test_vectors_need_alignment(
        self, size: int, dtype: np.dtype[Any], addresses: tuple[int, ...], width: int
    ) -> None:
        assert cuda_kernels.vector_width(Geometry((3,), size), dtype, addresses) == width

    def test_every_dtype_has_its_kernels(self) -> None:
        assert [len(cuda_kernels.program(dtype).kernels) for dtype in FLOATING] == [6] * 4
