"""Each mistake in the use of a GPU is found, whether or not its result would be wrong."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.programs import Launch, Program, element_sources
from tests.devices.cuda.stand_in.gpu.faults import Fault
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn, installed
from tests.servers.polling import PATIENCE_SECONDS

SIZE = 1000
SOURCE = "\n".join(
    [
        *element_sources(),
        "struct ShiftArguments {\n    const float* x;\n    float* out;\n    long long count;\n};",
        'extern "C" __global__ void __launch_bounds__(256) shift(const __grid_constant__ ShiftArguments arguments) {',
        "    for (long long i = threadIdx.x; i < arguments.count; i += blockDim.x) {",
        "        arguments.out[i] = arguments.x[i];",
        "    }",
        "}",
    ]
)
TABLE_SOURCE = "\n".join(
    [
        *element_sources(),
        "struct FirstArguments {\n    const long long* table;\n    float* out;\n};",
        'extern "C" __global__ void __launch_bounds__(1) first(const __grid_constant__ FirstArguments arguments) {',
        "    *arguments.out = *reinterpret_cast<const float*>(arguments.table[0]);",
        "}",
    ]
)
SHIFT = Program("shifting", SOURCE, ("shift",))


class Bench:
    """Two streams of one thread, and what is done on them."""

    def __init__(self, stand_in: StandIn) -> None:
        self.cupy = stand_in.cupy
        self.runtime = self.cupy.cuda.runtime
        self.runtime.setDevice(0)
        self.one, self.other = (self.cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    def ones(self) -> Any:
        with self.one:
            return self.cupy.ones(SIZE, np.float32)

    def pinned(self) -> Any:
        memory = self.cupy.cuda.alloc_pinned_memory(4 * SIZE)
        return np.frombuffer(memory, np.float32, SIZE)


def reads_on_another_stream(bench: Bench) -> None:
    ones = bench.ones()
    with bench.other:
        ones.get()


def writes_on_another_stream(bench: Bench) -> None:
    ones = bench.ones()
    bench.one.synchronize()
    with bench.one:
        _ = ones + 1
    with bench.other:
        ones.fill(2)


def reads_through_a_table_on_another_stream(bench: Bench) -> None:
    program, ones = bench.cupy.RawModule(code=TABLE_SOURCE).get_function("first"), bench.ones()
    with bench.other:
        table, out = bench.cupy.asarray(np.array([ones.data.ptr])), bench.cupy.empty(1, np.float32)
        arguments = np.array((table.data.ptr, out.data.ptr), [("table", np.uint64), ("out", np.uint64)])
        program((1,), (1,), (arguments,))


def records_too_early(bench: Bench) -> None:
    ready = bench.one.record()
    ones = bench.ones()
    bench.other.wait_event(ready)
    with bench.other:
        ones.get()


def counts_on_the_default_stream(bench: Bench) -> None:
    ones = bench.ones()
    ones.get(stream=bench.cupy.cuda.Stream.null)


def frees_what_another_stream_reads(bench: Bench) -> None:
    ones = bench.ones()
    bench.one.synchronize()
    with bench.other:
        _ = ones + 1
    del ones


def keeps_an_address_too_long(bench: Bench) -> None:
    with bench.one:
        kept, address = bench.ones(), bench.ones().data.ptr
        bench.runtime.memcpyAsync(kept.data.ptr, address, kept.nbytes, 3, bench.one.ptr)


def frees_twice(bench: Bench) -> None:
    address = bench.runtime.malloc(100)
    bench.runtime.free(address)
    bench.runtime.free(address)


def frees_what_is_in_use(bench: Bench) -> None:
    address = bench.runtime.malloc(100)
    bench.runtime.memsetAsync(address, 0, 100, bench.one.ptr)
    bench.runtime.free(address)


def copies_too_much(bench: Bench) -> None:
    ones = bench.ones()
    bench.runtime.memsetAsync(ones.data.ptr, 0, ones.nbytes + 1000, bench.one.ptr)


def writes_beyond_the_end(bench: Bench) -> None:
    program = bench.cupy.RawModule(code=SOURCE).get_function("shift")
    with bench.one:
        x, out = bench.cupy.zeros(2048, np.float32), bench.cupy.zeros(1024, np.float32)
        arguments = np.zeros((), [("x", np.uint64), ("out", np.uint64), ("count", np.int64)])
        arguments["x"], arguments["out"], arguments["count"] = x.data.ptr, out.data.ptr, 1025
        program((1,), (256,), (arguments,))
        del out
    bench.one.synchronize()


def reuses_pinned_memory_before_it_was_read(bench: Bench) -> None:
    ones, pinned = bench.ones(), bench.pinned()
    pinned[...] = 3
    bench.runtime.memcpyAsync(ones.data.ptr, pinned.ctypes.data, ones.nbytes, 1, bench.one.ptr)
    pinned[...] = 4
    bench.one.synchronize()


def writes_pinned_memory_before_it_was_filled(bench: Bench) -> None:
    ones, pinned = bench.ones(), bench.pinned()
    ones.get(bench.one, out=pinned, blocking=False)
    pinned[...] = 4
    bench.one.synchronize()


def fills_pinned_memory_on_two_streams(bench: Bench) -> None:
    ones, pinned = bench.ones(), bench.pinned()
    bench.one.synchronize()
    ones.get(bench.one, out=pinned, blocking=False)
    ones.get(bench.other, out=pinned, blocking=False)


def frees_pinned_memory_too_early(bench: Bench) -> None:
    ones, pinned = bench.ones(), bench.pinned()
    ones.get(bench.one, out=pinned, blocking=False)
    del pinned


def unregisters_too_early(bench: Bench) -> None:
    ones, host = bench.ones(), np.empty(SIZE, np.float32)
    bench.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    ones.get(bench.one, out=host, blocking=False)
    bench.runtime.hostUnregister(host.ctypes.data)


def chooses_no_gpu(bench: Bench) -> None:
    _in_another_thread(lambda: bench.cupy.cuda.Stream(non_blocking=True))


def uses_the_wrong_gpu(bench: Bench) -> None:
    bench.cupy.cuda.Device(1).use()


def shares_a_stream(bench: Bench) -> None:
    def enter() -> None:
        bench.runtime.setDevice(0)
        with bench.one:
            pass

    with bench.one:
        _in_another_thread(enter)


def reads_a_number(bench: Bench) -> None:
    with bench.one:
        float(bench.ones().sum())


def calls_cuda_in_a_callback(bench: Bench) -> None:
    bench.one.launch_host_func(lambda _: bench.runtime.malloc(100), None)
    bench.one.synchronize()


PLANTED: list[tuple[Callable[[Bench], None], str]] = [
    (reads_on_another_stream, "copy to the host reads memory that assignment writes on another stream"),
    (writes_on_another_stream, "assignment writes memory that add reads on another stream"),
    (reads_through_a_table_on_another_stream, "first reads memory that assignment writes on another stream"),
    (records_too_early, "copy to the host reads memory that assignment writes on another stream"),
    (counts_on_the_default_stream, "copy to the host reads memory that assignment writes on another stream"),
    (frees_what_another_stream_reads, "memory is freed while add, on another stream, may still use it"),
    (keeps_an_address_too_long, "which was freed"),
    (frees_twice, "was freed before"),
    (frees_what_is_in_use, "memory is freed while memset may still use it"),
    (copies_too_much, "memset uses 904 bytes beyond the end of its memory"),
    (writes_beyond_the_end, "something was written beyond the end of 4096 bytes of a pool"),
    (reuses_pinned_memory_before_it_was_read, "written while it was copied to the device"),
    (writes_pinned_memory_before_it_was_filled, "written while a copy from the device was on its way to it"),
    (fills_pinned_memory_on_two_streams, "writes memory that copy to the host writes on another stream"),
    (frees_pinned_memory_too_early, "goes back to its pool while copy to the host may still use it"),
    (unregisters_too_early, "memory is unpinned while copy to the host may still use it"),
    (chooses_no_gpu, "has not chosen a GPU"),
    (uses_the_wrong_gpu, "a context on GPU 1"),
    (shares_a_stream, "current in two threads at once"),
    (reads_a_number, "the host reads a number of the device"),
    (calls_cuda_in_a_callback, "a function that a stream calls on the host uses CUDA"),
]


@pytest.mark.parametrize(("mistake", "words"), PLANTED, ids=[each.__name__ for each, _ in PLANTED])
def test_a_mistake_is_a_fault(stand_in: StandIn, mistake: Callable[[Bench], None], words: str) -> None:
    bench = Bench(stand_in)
    with _failing(stand_in):
        mistake(bench)
    stand_in.faults.expected(words)


def test_after_a_fault_the_gpu_is_lost(stand_in: StandIn) -> None:
    bench = Bench(stand_in)
    with _failing(stand_in):
        frees_twice(bench)
    with pytest.raises(bench.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        bench.ones()
    stand_in.faults.expected("freed")


@contextmanager
def _failing(stand_in: StandIn) -> Iterator[None]:
    """A block in which there may be errors: some faults are raised, others are found later."""
    with suppress(Fault, stand_in.cupy.cuda.runtime.CUDARuntimeError):
        yield
    assert stand_in.faults.messages


def _in_another_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


def test_what_is_in_order_is_no_fault(stand_in: StandIn) -> None:
    """Events, the default stream with blocking ones, and temporary arrays of the same stream."""
    bench = Bench(stand_in)
    cupy = bench.cupy
    ones = bench.ones()
    bench.other.wait_event(bench.one.record())
    with bench.other:
        four = (ones + 1) * 2
        bench.one.wait_event(bench.other.record())
    del ones
    blocking = cupy.cuda.Stream()
    bench.other.synchronize()
    with blocking:
        eight = four * 2
    np.testing.assert_array_equal(eight.get(), np.full(SIZE, 8, np.float32))
    pinned = bench.pinned()
    eight.get(out=pinned, blocking=False)
    cupy.cuda.Stream.null.synchronize()
    np.testing.assert_array_equal(pinned, np.full(SIZE, 8, np.float32))


def test_what_is_not_waited_for_is_not_there(stand_in: StandIn) -> None:
    """Nothing runs before somebody waits, or looks away for some milliseconds; new memory is full of NaNs."""
    bench = Bench(stand_in)
    pinned = bench.pinned()
    pinned[...] = 5
    bench.ones().get(bench.one, out=pinned, blocking=False)
    assert np.isnan(pinned).all()
    called = threading.Event()
    bench.one.launch_host_func(lambda _: called.set(), None)
    assert called.wait(PATIENCE_SECONDS)
    with bench.one:
        assert np.isnan(bench.cupy.empty(SIZE, np.float32).get()).all()


def test_a_full_pool_is_tidied_before_it_gives_up(gpu_settings: Settings) -> None:
    with installed(gpu_settings.but(total_bytes=1 << 20, cublas_bytes=1 << 18)) as stand_in:
        bench = Bench(stand_in)
        cupy, pool = bench.cupy, bench.cupy.get_default_memory_pool()
        with bench.one:
            kept = cupy.empty(400_000, np.uint8)
            cupy.empty(400_000, np.uint8)
            cupy.empty(600_000, np.uint8)
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Out of memory allocating 700,416 bytes"):
                cupy.empty(700_000, np.uint8)
            assert (pool.used_bytes(), pool.total_bytes()) == (400_384, 400_384)
            pool.set_limit(500_000)
            with pytest.raises(MemoryError, match="limit set to: 500,000 bytes"):
                cupy.empty(200_000, np.uint8)
            pool.set_limit(0)
            others = cupy.empty((500, 1000), np.uint8)
            matrix = kept.view(np.float64)[:100].reshape(10, 10)
            with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
                cupy.matmul(matrix, matrix)
            del others
            pool.free_all_blocks()
            cupy.matmul(matrix, matrix)


def test_requests_outside_the_pool_fail_if_they_are_told_to(gpu_settings: Settings) -> None:
    with installed(gpu_settings.but(failures={"module": 1, "hostAlloc": 2, "malloc": 3})) as stand_in:
        bench = Bench(stand_in)
        module = bench.cupy.RawModule(code=SOURCE)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            module.get_function("shift")
        module.get_function("shift")
        with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
            bench.pinned()
        bench.pinned()
        with pytest.raises(MemoryError):
            bench.ones()
        bench.ones()


def test_registered_memory_is_registered_once(stand_in: StandIn) -> None:
    bench = Bench(stand_in)
    host = np.zeros(SIZE, np.float32)
    bench.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    with pytest.raises(RuntimeError, match="cudaErrorHostMemoryAlreadyRegistered"):
        bench.runtime.hostRegister(host.ctypes.data + 4, 8, 0)
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        bench.runtime.memcpyAsync(bench.ones().data.ptr, host.ctypes.data - 4, 8, 1, bench.one.ptr)
    bench.runtime.hostUnregister(host.ctypes.data)
    with pytest.raises(RuntimeError, match="cudaErrorHostMemoryNotRegistered"):
        bench.runtime.hostUnregister(host.ctypes.data)


def test_the_device_of_the_server_makes_no_mistake(stand_in: StandIn) -> None:
    device = CudaDevice(0)
    numbers = np.arange(SIZE, dtype=np.float32)
    program = device.compiled(SHIFT)

    def work(_: int) -> Any:
        x, out = device.from_host(numbers), device.empty((SIZE,), numbers.dtype)
        arguments = np.zeros((), [("x", np.uint64), ("out", np.uint64), ("count", np.int64)])
        arguments["x"], arguments["out"], arguments["count"] = device.address(x), device.address(out), SIZE
        with device.computing():
            program.launch(Launch("shift", (1, 1), 256, 0), arguments)
        return out

    with ThreadPoolExecutor(4) as threads:
        shifted = list(threads.map(work, range(16)))
        for host in threads.map(device.to_host, shifted):
            np.testing.assert_array_equal(host, numbers)
        del shifted
