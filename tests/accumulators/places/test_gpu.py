"""Sums on a real GPU have the bits of the host's."""

from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.reduction import SUMS, CudaReducer, SumsKey
from gradserve_server.devices.device import Place
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_testing import LocalServer
from tests.devices.cuda.reduction.test_emulated import SIZES, arrays, assert_same_bits

pytestmark = pytest.mark.cuda

LARGE = [*SIZES, 3_000_001]


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(0)


def there(device: CudaDevice, lists: Any, shift: int = 0) -> list[Any]:
    """Copies on the GPU: each array begins some more elements behind an address for vectors than the one before."""
    copies = []
    with device.computing():
        for index, array in enumerate(lists):
            offset = shift * (index + 1) % 8
            memory = device.empty((array.size + offset,), array.dtype)
            device.write(memory, offset * array.dtype.itemsize, array)
            copies.append(memory[offset:])
    return copies


def here(device: CudaDevice, lists: Any) -> list[Any]:
    return [device.to_host(array) for array in lists]


@pytest.mark.parametrize("key", SUMS, ids=lambda key: f"{key.gradient}-{key.total}")
@pytest.mark.parametrize("shift", [0, 1])
def test_a_round_of_sums(device: CudaDevice, key: SumsKey, shift: int) -> None:
    """Rounded each by itself, with subnormal numbers: what a compiler would otherwise change."""
    host, reducer = Reducer(ForkJoin(1)), CudaReducer(device)
    lists = [arrays(key.gradient, number, LARGE) for number in range(20)]
    sums, outs = ([np.empty(each.size, dtype) for each in lists[0]] for dtype in (key.total, key.gradient))
    its_sums, its_outs = there(device, sums, shift), there(device, outs, 2 * shift)
    its_lists = [there(device, each, shift) for each in lists]
    host.scale(lists[0], 0.3, sums)
    host.add_scaled(sums, lists[1], 3.0)
    reducer.scale(its_lists[0], 0.3, its_sums)
    reducer.add_scaled(its_sums, its_lists[1], 3.0)
    assert_same_bits(here(device, its_sums), sums)
    reducer.add_and_divide(its_sums, its_lists[2], 0.7, 3.0, its_outs)
    host.add_and_divide(sums, lists[2], 0.7, 3.0, outs)
    assert_same_bits(here(device, its_outs), outs)
    factors, dtypes = [0.5 + number / 7 for number in range(20)], [key.total] * len(LARGE)
    host.add_up(lists, factors, 3.0, dtypes, sums, outs)
    reducer.add_up(its_lists, factors, 3.0, dtypes, its_sums, its_outs)
    assert_same_bits(here(device, its_outs), outs)


def test_the_first_value_that_is_not_finite(device: CudaDevice) -> None:
    values = [np.zeros(size, np.float32) for size in LARGE]
    reducer = CudaReducer(device)
    assert reducer.first_non_finite(there(device, values)) is None
    values[-1][2_999_999] = values[-1][1_234_567] = np.nan
    assert reducer.first_non_finite(there(device, values, 1)) == Place(len(LARGE) - 1, 1_234_567)


def test_a_table_of_many_arrays(device: CudaDevice) -> None:
    totals = there(device, [np.full(1 + number % 7, number, np.float32) for number in range(5000)])
    sources = there(device, [np.ones(1 + number % 7, np.float32) for number in range(5000)])
    CudaReducer(device).add_scaled(totals, sources, 2.0)
    assert all(set(each.tolist()) == {number + 2} for number, each in enumerate(here(device, totals)))


def test_accumulators_of_a_server() -> None:
    runtime = RuntimeConfig(device="cuda:0", accumulator_device="cuda:0")
    generator = np.random.default_rng(0)
    gradients = [generator.standard_normal(1 << 20).astype(np.float32) for _ in range(4)]
    with LocalServer(ServerConfig(runtime=runtime)) as local, gradserve.connect(local.address) as client:
        found = []
        for name in ("cuda:0", "cpu"):
            acc = client.conditional_accumulator("float32", (1 << 20,), device=name)
            for number, gradient in enumerate(gradients):
                acc.apply_grad(client.put(gradient, device="cuda:0") if number % 2 else gradient, weight=1 + number)
            assert acc.info().device == name
            found.append(acc.take_grad(4))
    assert found[0].tobytes() == found[1].tobytes()
