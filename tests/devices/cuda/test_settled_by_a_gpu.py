"""What neither compilers nor stand-ins can settle; `make check-gpu` tells a verdict for each of these."""

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
from benchmarks.harness.environments import ROOT
from gradserve_protocol.memory.pool import BufferPool, MappedArray, MappedMemory
from gradserve_protocol.memory.sealed import make_region, map_region
from gradserve_server.commands.kernels import compile_source
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.importing import import_cupy
from gradserve_server.devices.cuda.programs import Cubins, Launch, Program, Struct
from gradserve_server.devices.cuda.reduction import CudaReducer
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.ops.batch_norm.spec import ForwardAttributes, ForwardInputs, plan_forward
from gradserve_server.ops.cudnn_rnn.cuda.family import ContentTags, CudaCudnnRnn
from gradserve_server.ops.cudnn_rnn.declaration import plan_forward as plan_network
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import ForwardAttributes as NetworkAttributes
from gradserve_testing import LocalServer
from tests.ops.cudnn_rnn.cuda.test_gpu import LENGTHS, make_call, put
from tests.ops.cudnn_rnn.cuda.test_tag import expected as expected_tag
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.cuda

NUM_THREADS = 4
GIB = 1 << 30
MANY = (1 << 31) + 65_536
"""More elements than an int32 counts."""


@pytest.fixture(scope="module")
def pool() -> BufferPool:
    return BufferPool(GIB)


@pytest.fixture(scope="module")
def device(pool: BufferPool) -> CudaDevice:
    return CudaDevice(0, pool.empty)


@pytest.fixture(scope="module")
def networks(device: CudaDevice) -> CudaCudnnRnn:
    return CudaCudnnRnn(device, ReserveKey())


def run_script(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRODUCTS = """
import numpy as np
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.importing import import_cupy
device, cupy = CudaDevice(0), import_cupy()
random = np.random.default_rng(0)
left, right = (random.standard_normal(shape).astype(np.float32) for shape in ((256, 4096), (4096, 256)))
with device.computing():
    product = cupy.matmul(device.from_host(left), device.from_host(right))
exact = left.astype(np.float64) @ right.astype(np.float64)
scale = np.abs(left).astype(np.float64) @ np.abs(right).astype(np.float64)
print((np.abs(device.to_host(product) - exact) / scale).max())
"""


@pytest.mark.parametrize("tf32", ["0", "1"])
def test_products_beside_float64(tf32: str) -> None:
    """Factors of TF32 would be off by ten times as much."""
    assert float(run_script(PRODUCTS, CUPY_TF32=tf32)) < 2.0**-19


def test_dropout_is_the_same_in_every_thread(device: CudaDevice, networks: CudaCudnnRnn) -> None:
    attributes = NetworkAttributes(dropout=0.5, seed=5, seed2=6)
    others = [dataclasses.replace(attributes, seed=seed) for seed in (1, 2, 3)]
    inputs, _ = make_call(attributes, 2, None, np.float32)
    together = threading.Barrier(NUM_THREADS)

    def output(wanted: NetworkAttributes) -> bytes:
        with device.computing():
            outputs = networks.forward(put(device, inputs), plan_network(inputs, wanted).problem)
        return device.to_host(outputs.output).tobytes()

    def work(index: int) -> list[bytes]:
        together.wait()
        found = []
        for other in others[index % 3 :] + others[: index % 3]:
            output(other)
            found.append(output(attributes))
        return found

    expected = output(attributes)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        assert all(found == [expected] * 3 for found in threads.map(work, range(NUM_THREADS)))


@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("mode", ["rnn_tanh", "lstm", "gru"])
def test_networks_are_the_same_to_the_bit_every_time(
    device: CudaDevice, networks: CudaCudnnRnn, mode: str, direction: str
) -> None:
    attributes = NetworkAttributes(rnn_mode=mode, direction=direction)
    inputs, _ = make_call(attributes, 2, LENGTHS, np.float32)
    problem = plan_network(inputs, attributes).problem
    found = set()
    for _ in range(5):
        with device.computing():
            outputs = networks.forward(put(device, inputs), problem)
        found.add(device.to_host(outputs.output).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("total", [np.float32, np.float64], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: np.dtype(dtype).name)
def test_sums_have_the_bits_of_the_host(device: CudaDevice, dtype: Any, total: Any) -> None:
    random = np.random.default_rng(0)
    sizes = (1, 5, 100_003)
    with np.errstate(all="ignore"):
        gradients = [
            [(random.standard_normal(size) * 10.0 ** random.integers(-45, 30, size)).astype(dtype) for size in sizes]
            for _ in range(20)
        ]
    weights = random.uniform(0.1, 3, 20)
    sums = [np.zeros(array.shape, total) for array in gradients[0]]
    host, there = Reducer(ForkJoin(1)), CudaReducer(device)
    sums_there = [device.from_host(array) for array in sums]
    with np.errstate(all="ignore"), device.computing():
        for gradient, weight in zip(gradients, weights, strict=True):
            host.add_scaled(sums, gradient, weight)
            there.add_scaled(sums_there, [device.from_host(array) for array in gradient], weight)
        host.divide(sums, 7.3, sums)
        there.divide(sums_there, 7.3, sums_there)
    for found, expected in zip(map(device.to_host, sums_there), sums, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.fixture
def room(device: CudaDevice) -> Iterator[Any]:
    """CuPy, once there is room for large tensors."""
    cupy = import_cupy()
    with device.computing():
        cupy.get_default_memory_pool().free_all_blocks()
        free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 40 * GIB:
        pytest.skip(f"needs 40 GiB of free memory on the GPU, there are {free / GIB:.0f}")
    yield cupy
    with device.computing():
        cupy.get_default_memory_pool().free_all_blocks()


def test_more_than_2_31_elements_of_a_sum(device: CudaDevice, room: Any) -> None:
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    with device.computing():
        gradient, total = device.empty((MANY,), half), device.empty((MANY,), single)
        gradient.fill(0.5)
        gradient[-3:] = 2
        total.fill(1)
        CudaReducer(device).add_scaled([total], [gradient], 2.0)
        assert float(total.astype(np.float64).sum()) == 2.0 * MANY + 3 * 3
        gradient[-2] = np.inf
        place = CudaReducer(device).first_non_finite([gradient])
    assert place is not None
    assert place.position == MANY - 2


def test_more_than_2_31_elements_of_a_batch(device: CudaDevice, room: Any) -> None:
    rows = 1 << 15
    shape = (2, rows, MANY // (2 * rows), 1)
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    with device.computing():
        x = device.empty(shape, half)
        flat = x.reshape(-1)
        flat[0::2], flat[1::2] = 1, 3
        one, nothing = device.from_host(np.ones(1, single)), device.from_host(np.empty(0, single))
        inputs = ForwardInputs(x, one, one, nothing, nothing)
        attributes = ForwardAttributes(epsilon=1e-3)
        outputs = CudaBatchNorm(device).forward(inputs, attributes, plan_forward(inputs, attributes).geometry)
        ends = [device.to_host(outputs.y.reshape(-1)[part].copy()) for part in (slice(4), slice(-4, None))]
    np.testing.assert_allclose(device.to_host(outputs.reserve_space_1), 2, rtol=1e-6)
    for end in ends:
        np.testing.assert_allclose(end.astype(np.float64), [0, 2, 0, 2], atol=2e-3)


def _pooled(pool: BufferPool, size: int) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = pool.empty((size,), np.dtype(np.uint8))
    return array


def _other(_pool: BufferPool, size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


@pytest.mark.parametrize("memory", [_pooled, _other])
@pytest.mark.parametrize("size", [1, 4097, (1 << 21) + 1, 37_000_001])
def test_copies(device: CudaDevice, pool: BufferPool, memory: Any, size: int) -> None:
    source, back = memory(pool, size), memory(pool, size)
    source[...] = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    there = device.from_host(source)
    for _ in range(2):
        back[...] = 0
        device.read(there, 0, back)
        np.testing.assert_array_equal(back, source)


def test_copies_of_memory_that_a_client_may_change(device: CudaDevice) -> None:
    size = 5 << 20
    descriptor, writable = make_region(size, read_only_for_others=False)
    np.frombuffer(writable, np.uint8)[...] = 7
    region = MappedArray.of(MappedMemory(map_region(descriptor, size)), size)
    assert (device.to_host(device.from_host(region)) == 7).all()


def test_memory_at_full_concurrency() -> None:
    cupy = import_cupy()
    x = np.random.default_rng(0).standard_normal((8, 56, 56, 64)).astype(np.float32)
    ones = np.ones(64, np.float32)
    arguments: Any = {"scale": ones, "offset": ones, "mean": ones[:0], "variance": ones[:0]}
    config = ServerConfig(runtime=RuntimeConfig(device="cuda:0"))
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    with LocalServer(config) as server:

        def work(_: int) -> None:
            with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
                handle = client.put(x, device="auto")
                for _ in range(10):
                    outputs = client.raw_ops.FusedBatchNormV3(x=handle, **arguments, keep=True)
                    client.delete(*outputs)
                client.delete(handle)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(work, range(16)))
        held = pool.total_bytes()
        with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
            assert client.server_info().usage["num_bytes"] == 0
    # Each of 16 calls has x, y, and two thirds of that besides; twice that for what the pool keeps in pieces.
    assert held - before < 2 * 16 * 3 * x.nbytes
    assert pool.used_bytes() - before < 64 << 20, "scratch memory of threads"


TWICE = """struct Twice { float* x; long long count; };
extern "C" __global__ void __launch_bounds__(32) twice(const __grid_constant__ Twice arguments) {
    if (threadIdx.x < arguments.count) arguments.x[threadIdx.x] *= 2;
}"""


@pytest.mark.parametrize("is_damaged", [False, True])
def test_kernels_compiled_in_advance(tmp_path: Path, is_damaged: bool) -> None:
    """The one that is saved here multiplies by 3, so that it shows which one runs."""
    nvrtc, capability = import_cupy().cuda.nvrtc, CudaDevice(0).compute_capability
    cubins = Cubins(tmp_path, f"sm_{capability}", nvrtc.getVersion())
    cubins.save(TWICE, compile_source(nvrtc, TWICE.replace("*= 2", "*= 3"), f"sm_{capability}"))
    if is_damaged:
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-1])
    device = CudaDevice(0, precompiled=tmp_path)
    numbers = device.from_host(np.arange(5, dtype=np.float32))
    arguments = Struct(("x",), ("count",)).of({"x": device.address(numbers)}, {"count": 5})
    with device.computing():
        device.compiled(Program("twice", TWICE, ("twice",))).launch(Launch("twice", (1, 1), 32, 0), arguments)
    np.testing.assert_array_equal(device.to_host(numbers), (2 if is_damaged else 3) * np.arange(5))


@pytest.mark.parametrize("num_vectors", [1, 257, 1 << 17])
def test_tags_of_reserve_spaces(device: CudaDevice, num_vectors: int) -> None:
    key = np.random.default_rng(1).bytes(64)
    content = np.frombuffer(np.random.default_rng(2).bytes(16 * num_vectors), np.uint8)
    there, tag = device.from_host(content), device.empty((16,), np.dtype(np.uint8))
    address = device.address(tag)
    with device.computing():
        ContentTags(device).start(key, device.address(there), content.nbytes, address, address)
    assert device.to_host(tag).tobytes() == expected_tag(content, key)


CONTEXTS = """
import ctypes
import numpy as np
from gradserve_server.devices.cuda.device import CudaDevice
device = CudaDevice(1)
device.to_host(device.from_host(np.ones(1000)))
flags, is_active = ctypes.c_uint(), ctypes.c_int()
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active)) == 0
print(is_active.value)
"""


def test_contexts() -> None:
    if import_cupy().cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    assert run_script(CONTEXTS) == "0"
