"""The CUDA kernels, run on the CPU, compute what the reference does in float64."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import Limits
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    GradOutputs,
    plan_forward,
    plan_gradient,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOATING
from tests.devices.cuda.emulation.device import H200, EmulatedDevice
from tests.ops.batch_norm.cuda.cases import CASES, Case, Forward, Gradient, assert_near, forward_case, gradient_case

TWO_PASSES = Limits(num_multiprocessors=3, shared_bytes=0)
"""A GPU on which no tile fits into shared memory, so that small arrays show how large ones are computed."""
SEED = 20201120
BLOCKS = Case((8, 14, 14, 32), "NHWC")
"""Several blocks share each tile."""

by_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)
by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_limits = pytest.mark.parametrize("limits", [H200, TWO_PASSES], ids=["one_pass", "two_passes"])


@by_dtype
@by_limits
@by_case
def test_forward_in_training(compiled: Path, case: Case, limits: Limits, dtype: np.dtype[Any]) -> None:
    device = EmulatedDevice(compiled, limits, SEED)
    _check_forward(device, forward_case(case, dtype, device.from_host), dtype)
    kinds = {kernel.split(f"_{dtype}")[0] for kernel in device.launched}
    assert kinds == ({"forward_whole"} if limits == H200 else {"forward_moments", "forward_normalize"})


@by_dtype
@by_case
def test_forward_with_moving_averages(compiled: Path, case: Case, dtype: np.dtype[Any]) -> None:
    device = EmulatedDevice(compiled, TWO_PASSES, SEED)
    call = forward_case(case, dtype, device.from_host, exponential_avg_factor=0.3)
    _check_forward(device, call, dtype)


@by_dtype
@by_case
def test_forward_frozen(compiled: Path, case: Case, dtype: np.dtype[Any]) -> None:
    device = EmulatedDevice(compiled, H200, SEED)
    _check_forward(device, forward_case(case, dtype, device.from_host, is_training=False), dtype)
    assert len(device.launched) == 1


@by_dtype
@by_limits
@by_case
def test_gradient_in_training(compiled: Path, case: Case, limits: Limits, dtype: np.dtype[Any]) -> None:
    device = EmulatedDevice(compiled, limits, SEED)
    _check_gradient(device, gradient_case(case, dtype, device.from_host), dtype)
    kinds = {kernel.split(f"_{dtype}")[0] for kernel in device.launched}
    assert kinds == ({"gradient_whole"} if limits == H200 else {"gradient_sums", "gradient_apply"})


@by_dtype
@by_case
def test_gradient_frozen(compiled: Path, case: Case, dtype: np.dtype[Any]) -> None:
    device = EmulatedDevice(compiled, H200, SEED)
    _check_gradient(device, gradient_case(case, dtype, device.from_host, is_training=False), dtype)
    assert len(device.launched) == 1


@pytest.mark.parametrize(("shape", "data_format"), [((3, 8, 8, 16), "NHWC"), ((3, 16, 8, 8), "NCHW")])
@by_dtype
@by_limits
def test_arrays_inside_others(
    compiled: Path, shape: tuple[int, ...], data_format: str, limits: Limits, dtype: np.dtype[Any]
) -> None:
    """An address that is no multiple of 16 bytes rules vectors out."""
    case = Case(shape, data_format)
    device = EmulatedDevice(compiled, limits, SEED, offset=8)
    _check_forward(device, forward_case(case, dtype, device.from_host), dtype)
    _check_gradient(device, gradient_case(case, dtype, device.from_host), dtype)
    assert all(kernel.endswith("_1_1") for kernel in device.launched)


@by_dtype
@by_limits
@pytest.mark.parametrize("is_training", [True, False])
def test_the_order_of_blocks_and_threads_changes_nothing(
    compiled: Path, is_training: bool, limits: Limits, dtype: np.dtype[Any]
) -> None:
    """Not a bit: whichever block is the last adds up in the same order, and no thread reads too early."""
    results = []
    for seed in (0, 1, SEED):
        device = EmulatedDevice(compiled, limits, seed)
        forward = forward_case(BLOCKS, dtype, device.from_host, is_training=is_training)
        gradient = gradient_case(BLOCKS, dtype, device.from_host, is_training=is_training)
        outputs = [_forward(device, forward), _gradient(device, gradient)]
        results.append([array.tobytes() for structure in outputs for array in _arrays(structure)])
    assert results[0] == results[1] == results[2]


def test_a_second_call_finds_the_tickets_reset(compiled: Path) -> None:
    device = EmulatedDevice(compiled, TWO_PASSES, SEED)
    call = gradient_case(BLOCKS, FLOAT32, device.from_host)
    _check_gradient(device, call, FLOAT32)
    _check_gradient(device, call, FLOAT32)


@by_limits
def test_a_large_mean_leaves_the_variance_exact(compiled: Path, limits: Limits) -> None:
    """Sums of squares in float32 would lose all of it."""
    device = EmulatedDevice(compiled, limits)
    call = forward_case(Case((4, 8, 8, 16), "NHWC", mean=10_000), FLOAT32, device.from_host)
    outputs = _forward(device, call)
    np.testing.assert_allclose(outputs.reserve_space_2, call.expected.reserve_space_2, rtol=1e-5)
    np.testing.assert_allclose(outputs.reserve_space_1, call.expected.reserve_space_1, rtol=1e-7)


@by_limits
def test_the_first_element_of_a_channel_may_be_an_outlier(compiled: Path, limits: Limits) -> None:
    device = EmulatedDevice(compiled, limits)
    call = forward_case(Case((2, 4, 4, 8), "NHWC"), FLOAT32, device.from_host)
    call.inputs.x[0, 0, 0, :] = 1e4
    outputs = _forward(device, call)
    x = call.inputs.x.astype(np.float64)
    np.testing.assert_allclose(outputs.reserve_space_1, x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(outputs.reserve_space_2, x.var((0, 1, 2)), rtol=1e-5)


@by_limits
@by_dtype
def test_a_nan_stays_in_its_channel(compiled: Path, limits: Limits, dtype: np.dtype[Any]) -> None:
    device = EmulatedDevice(compiled, limits)
    case = Case((2, 4, 4, 8), "NHWC")
    forward = forward_case(case, dtype, device.from_host)
    gradient = gradient_case(case, dtype, device.from_host)
    forward.inputs.x[0, 1, 2, 3] = np.nan
    gradient.inputs.y_backprop[0, 1, 2, 3] = np.nan
    for tensor in (_forward(device, forward).y, _gradient(device, gradient).x_backprop):
        is_nan = np.isnan(tensor.astype(np.float64))
        assert is_nan[..., 3].all()
        assert not np.delete(is_nan, 3, axis=-1).any()


def test_a_constant_channel_without_epsilon_is_nan(compiled: Path) -> None:
    device = EmulatedDevice(compiled)
    call = forward_case(Case((2, 4, 4, 8), "NHWC"), FLOAT32, device.from_host)
    call.inputs.x[...] = 3
    attributes = dataclasses.replace(call.attributes, epsilon=0)
    outputs = _forward(device, dataclasses.replace(call, attributes=attributes))
    assert np.isnan(outputs.y).all()
    assert (outputs.reserve_space_2 == 0).all()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_rounding_is_numpys(compiled: Path, dtype: np.dtype[Any]) -> None:
    """Every finite number times a third, which lies between two numbers of the dtype, or halfway for a half."""
    device = EmulatedDevice(compiled)
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        finite = values[np.isfinite(values.astype(np.float32))].reshape(-1, 1, 1, 1)
    for factor in np.array([1, 0.5, 1 / 3], np.float32):
        offset, mean, variance = (device.from_host(np.full(1, value, np.float32)) for value in (0, 0, 1))
        scale = device.from_host(np.full(1, factor))
        inputs = ForwardInputs(device.from_host(finite), scale, offset, mean, variance)
        attributes = ForwardAttributes(epsilon=0, is_training=False)
        geometry = plan_forward(inputs, attributes).geometry
        outputs = CudaBatchNorm(device).forward(inputs, attributes, geometry)
        np.testing.assert_array_equal(outputs.y, (finite.astype(np.float32) * factor).astype(dtype))


def test_what_is_usual_is_prepared_first(compiled: Path) -> None:
    class Recorder(EmulatedDevice):
        def compiled(self, program: Any) -> Any:
            names.append(program.name)
            return SimpleNamespace(prepare=lambda kernel: None)

    names: list[str] = []
    CudaBatchNorm(Recorder(compiled)).prepare(lambda: False)
    dtypes = ("float32", "bfloat16", "float16", "float64")
    assert names == [f"batch_norm {operation} {dtype}" for dtype in dtypes for operation in ("forward", "gradient")]


def _check_forward(device: EmulatedDevice, call: Forward, dtype: np.dtype[Any]) -> None:
    outputs = _forward(device, call)
    assert_near(outputs, call.expected, dtype, np.asarray)
    device.check_margins()


def _check_gradient(device: EmulatedDevice, call: Gradient, dtype: np.dtype[Any]) -> None:
    outputs = _gradient(device, call)
    assert_near(outputs, call.expected, dtype, np.asarray)
    device.check_margins()


def _forward(device: EmulatedDevice, call: Forward) -> ForwardOutputs:
    geometry = plan_forward(call.inputs, call.attributes).geometry
    return CudaBatchNorm(device).forward(call.inputs, call.attributes, geometry)


def _gradient(device: EmulatedDevice, call: Gradient) -> GradOutputs:
    geometry = plan_gradient(call.inputs, call.attributes).geometry
    return CudaBatchNorm(device).gradient(call.inputs, call.attributes, geometry)


def _arrays(structure: Any) -> list[NDArray[Any]]:
    return [getattr(structure, field.name) for field in dataclasses.fields(structure)]
