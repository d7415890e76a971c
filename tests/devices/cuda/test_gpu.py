"""A real GPU: its memory, its streams, and batch normalization on it."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.importing import import_cupy
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.ops.batch_norm.spec import ForwardOutputs, GradOutputs, plan_forward, plan_gradient
from gradserve_server.tensors.spec import BFLOAT16, FLOAT32, FLOATING
from tests.ops.batch_norm.cuda.cases import CASES, Case, Forward, Gradient, assert_near, forward_case, gradient_case

pytestmark = pytest.mark.cuda

NUM_THREADS = 8
LARGE = (
    Case((32, 56, 56, 64), "NHWC"),
    Case((32, 64, 56, 56), "NCHW"),
    Case((32, 14, 14, 256), "NHWC"),
    Case((32, 256, 14, 14), "NCHW"),
    Case((5, 57, 59, 3), "NHWC"),
    Case((2, 3, 301, 307), "NCHW"),
)

by_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)
by_case = pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
by_training = pytest.mark.parametrize("is_training", [True, False], ids=["training", "frozen"])


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture(scope="session")
def batch_norm(device: CudaDevice) -> CudaBatchNorm:
    return CudaBatchNorm(device)


def test_products_of_float32_keep_all_bits(device: CudaDevice) -> None:
    """TF32 would round these numbers to 1."""
    cupy = import_cupy()
    numbers = device.from_host(np.full((64, 64), 1 + 2**-20, np.float32))
    with device.computing():
        product = cupy.matmul(numbers, device.from_host(np.eye(64, dtype=np.float32)))
    assert np.all(device.to_host(product) == np.float32(1 + 2**-20))


@by_dtype
@by_training
@by_case
def test_forward(
    device: CudaDevice, batch_norm: CudaBatchNorm, case: Case, is_training: bool, dtype: np.dtype[Any]
) -> None:
    call = forward_case(case, dtype, device.from_host, is_training=is_training)
    assert_near(_forward(device, batch_norm, call), call.expected, dtype, device.to_host)


@by_dtype
def test_forward_with_moving_averages(device: CudaDevice, batch_norm: CudaBatchNorm, dtype: np.dtype[Any]) -> None:
    call = forward_case(LARGE[0], dtype, device.from_host, exponential_avg_factor=0.3)
    assert_near(_forward(device, batch_norm, call), call.expected, dtype, device.to_host)


@by_dtype
@by_training
@by_case
def test_gradient(
    device: CudaDevice, batch_norm: CudaBatchNorm, case: Case, is_training: bool, dtype: np.dtype[Any]
) -> None:
    call = gradient_case(case, dtype, device.from_host, is_training=is_training)
    assert_near(_gradient(device, batch_norm, call), call.expected, dtype, device.to_host)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_results_are_the_same_to_the_bit_every_time(device: CudaDevice, batch_norm: CudaBatchNorm, case: Case) -> None:
    call = gradient_case(case, FLOAT32, device.from_host)
    results = {_bytes(device, _gradient(device, batch_norm, call)) for _ in range(20)}
    assert len(results) == 1


def test_threads_at_once(device: CudaDevice, batch_norm: CudaBatchNorm) -> None:
    """Each has its own stream, scratch memory and tickets; memory goes from one to the other."""
    calls = [gradient_case(case, FLOAT32, device.from_host) for case in LARGE]
    expected = [_bytes(device, _gradient(device, batch_norm, call)) for call in calls]
    start = threading.Barrier(NUM_THREADS)

    def work(first: int) -> list[bool]:
        start.wait()
        order = [(first + i) % len(calls) for i in range(30)]
        return [_bytes(device, _gradient(device, batch_norm, calls[i])) == expected[i] for i in order]

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        assert all(all(equal) for equal in threads.map(work, range(NUM_THREADS)))


def test_threads_compile_a_program_once(device: CudaDevice) -> None:
    call = forward_case(CASES[0], FLOAT32, device.from_host)
    fresh = CudaBatchNorm(device)
    start = threading.Barrier(NUM_THREADS)

    def work(_: int) -> bytes:
        start.wait()
        return _bytes(device, _forward(device, fresh, call))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        assert len(set(threads.map(work, range(NUM_THREADS)))) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (64, 1000, 33)], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATING, np.dtype(np.int32), np.dtype(np.uint8)], ids=str)
def test_arrays_there_and_back(device: CudaDevice, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    array = np.random.default_rng(0).uniform(0, 100, shape).astype(dtype)
    there = device.from_host(array)
    assert device.holds(there)
    assert not device.holds(array)
    assert there.dtype == dtype
    assert there.shape == shape
    assert there.nbytes == array.nbytes
    back = device.to_host(there)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, array)


def test_new_arrays_are_aligned_for_vectors(device: CudaDevice) -> None:
    for size in (1, 3, 1000):
        assert device.address(device.empty((size,), BFLOAT16)) % 256 == 0


def test_a_host_array_may_be_read_only(device: CudaDevice) -> None:
    array = np.frombuffer(bytes(range(200)), np.uint8)
    np.testing.assert_array_equal(device.to_host(device.from_host(array)), array)


def test_out_of_memory_is_an_error_and_the_device_goes_on(device: CudaDevice, batch_norm: CudaBatchNorm) -> None:
    with pytest.raises(MemoryError):
        device.empty((1 << 50,), FLOAT32)
    call = gradient_case(CASES[0], FLOAT32, device.from_host)
    with device.computing(), pytest.raises(MemoryError):
        device.empty((1 << 50,), FLOAT32)
    assert_near(_gradient(device, batch_norm, call), call.expected, FLOAT32, device.to_host)


def test_limits_are_those_of_a_gpu(device: CudaDevice) -> None:
    assert device.name == "cuda:0"
    assert device.limits.num_multiprocessors > 0
    assert device.limits.shared_bytes >= 48 << 10


def _forward(device: CudaDevice, batch_norm: CudaBatchNorm, call: Forward) -> ForwardOutputs:
    geometry = plan_forward(call.inputs, call.attributes).geometry
    with device.computing():
        return batch_norm.forward(call.inputs, call.attributes, geometry)


def _gradient(device: CudaDevice, batch_norm: CudaBatchNorm, call: Gradient) -> GradOutputs:
    geometry = plan_gradient(call.inputs, call.attributes).geometry
    with device.computing():
        return batch_norm.gradient(call.inputs, call.attributes, geometry)


def _bytes(device: CudaDevice, outputs: Any) -> bytes:
    fields = dataclasses.fields(outputs)
    return b"".join(device.to_host(getattr(outputs, field.name)).tobytes() for field in fields)
