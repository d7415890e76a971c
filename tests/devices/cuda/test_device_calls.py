"""What a CUDA device asks of CuPy, with a stand-in for it: streams, memory of a thread's own, and compilation."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.importing import KernelCache
from gradserve_server.devices.cuda.programs import Cubins, Launch, Limits, Program, instance
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.computation import FORWARD, make_layer_families
from gradserve_server.ops.activation.spec import FAMILY as ACTIVATION
from gradserve_server.ops.cudnn_rnn.cuda.family import CudaCudnnRnn
from gradserve_server.ops.cudnn_rnn.declaration import CUDNN_RNN
from gradserve_server.ops.registry import OPS, make_families
from tests.servers.polling import PATIENCE_SECONDS

KERNELS = ("double_float32", "double_float64")
PROGRAM = Program("doubling", "\n".join(instance(name, "32", "Pair", name) for name in KERNELS), KERNELS)
ALL_AT_ONCE = 4
GIB = 1 << 30
TOTAL_BYTES = 80 * GIB


@dataclass
class StandIn:
    """Records what is asked of CuPy; `current` has each thread's device, and its stack of streams."""

    log: list[Any] = field(default_factory=list)
    failure: str | None = None
    is_quick: bool = False
    limit: int = 0
    num_cached: int = 0
    compiling: Callable[[str], None] = lambda _: None
    current: threading.local = field(default_factory=threading.local)

    def stack(self) -> list[Any]:
        if not hasattr(self.current, "stack"):
            self.current.stack = []
        stack: list[Any] = self.current.stack
        return stack

    def module(self) -> types.ModuleType:
        stand_in = self

        class Context:
            def __enter__(self) -> None:
                stand_in.stack().append(self)

            def __exit__(self, *_: object) -> None:
                assert stand_in.stack().pop() is self

        class Device:
            def __init__(self, index: int) -> None:
                self.compute_capability = "90"
                self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}
                assert index == 1

            def use(self) -> None:
                assert not hasattr(stand_in.current, "device"), "once in each thread"
                stand_in.current.device = self

        class Stream(Context):
            def __init__(self, *, non_blocking: bool) -> None:
                assert non_blocking
                assert isinstance(stand_in.current.device, Device)
                self.ptr = id(self)

        class Event:
            def __init__(self, *, block: bool, disable_timing: bool) -> None:
                assert block, "a thread that waits takes no core"
                assert disable_timing
                assert isinstance(stand_in.current.device, Device)

            def record(self, stream: Stream) -> None:
                self.recorded = stream

            @property
            def done(self) -> bool:
                if stand_in.is_quick:
                    stand_in.log.append(("done", self.recorded))
                return stand_in.is_quick

            def synchronize(self) -> None:
                stand_in.log.append(("synchronize", self.recorded))

        class Memory:
            def __init__(self, array: Any) -> None:
                self.ptr = array.ctypes.data
                self._array = array

            def memset_async(self, value: int, num_bytes: int) -> None:
                assert num_bytes == self._array.nbytes
                self._array[...] = value

        class Array(np.ndarray):
            @property
            def data(self) -> Memory:  # type: ignore[override]
                return Memory(self)

        def empty(shape: Any, dtype: Any) -> Array:
            assert isinstance(stand_in.stack()[-1], Stream), "memory of no thread's own stream"
            return np.full(shape, 99, dtype).view(Array)

        class Kernel:
            def __init__(self, name: str) -> None:
                self.name = name

            def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
                assert self.max_dynamic_shared_size_bytes == 232448
                stand_in.log.append(("launch", self.name, grid, block, arguments, shared_mem, stand_in.stack()[-1]))

            max_dynamic_shared_size_bytes = 0

        class RawModule:
            def __init__(
                self, *, code: str = "", options: tuple[str, ...] = (), backend: str = "", path: str | None = None
            ) -> None:
                assert isinstance(stand_in.stack()[-1], Stream)
                if path is not None:
                    stand_in.log.append(("load", path))
                    return
                assert options == ("--std=c++17",)
                stand_in.log.append(("compile", code, backend))
                stand_in.compiling(code)

            def get_function(self, name: str) -> Kernel:
                return Kernel(name)

        cupy = types.ModuleType("cupy")

        class CUDARuntimeError(RuntimeError):
            pass

        def synchronize() -> None:
            assert isinstance(stand_in.current.device, Device)
            if stand_in.failure is not None:
                raise CUDARuntimeError(stand_in.failure)

        def copy(target: int, source: int, num_bytes: int, _kind: int, stream: int) -> None:
            assert stand_in.stack()[-1].ptr == stream
            ctypes.memmove(target, source, num_bytes)

        class Pool:
            def set_limit(self, *, size: int) -> None:
                assert isinstance(stand_in.current.device, Device)
                stand_in.limit = size

            def total_bytes(self) -> int:
                return 3 * GIB

            def free_bytes(self) -> int:
                return stand_in.num_cached

            def free_all_blocks(self) -> None:
                stand_in.num_cached = 0

        runtime = types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            memGetInfo=lambda: (TOTAL_BYTES - 5 * GIB, TOTAL_BYTES),
            getDeviceProperties=lambda _: {"totalGlobalMem": TOTAL_BYTES},
            deviceSynchronize=synchronize,
            memcpyAsync=copy,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
        )
        compiler = types.SimpleNamespace(_kernel_cache_backend=KernelCache(None))
        nvrtc = types.SimpleNamespace(getVersion=lambda: (13, 4))
        cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            Device=Device, Stream=Stream, Event=Event, compiler=compiler, runtime=runtime, nvrtc=nvrtc
        )
        pool = Pool()
        cupy.get_default_memory_pool = lambda: pool  # type: ignore[attr-defined]
        cupy.empty, cupy.ndarray, cupy.RawModule, cupy.uint32 = empty, Array, RawModule, np.uint32  # type: ignore[attr-defined]
        return cupy


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", made.module())
    return made


@pytest.fixture
def device(stand_in: StandIn) -> CudaDevice:
    return CudaDevice(1)


def test_without_cupy_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError):
        CudaDevice(0)


def test_what_it_is(device: CudaDevice) -> None:
    assert device.name == "cuda:1"
    assert device.inline_bytes == 0
    assert device.limits == Limits(132, 232448)
    assert device.compute_capability == "90"


def test_the_stream_of_a_thread_is_the_one_it_computes_on(device: CudaDevice, stand_in: StandIn) -> None:
    stream = device.stream()
    for _ in range(2):
        with device.computing():
            assert stand_in.stack()[-1].ptr == device.stream() == stream
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(device.stream).result() != stream


def test_every_family_of_ops_is_computed_on_it(device: CudaDevice) -> None:
    families = make_families(device, ForkJoin(1))
    assert set(families) == {op.family for op in OPS.values()} | {ACTIVATION}
    assert isinstance(families[CUDNN_RNN.family], CudaCudnnRnn)


def test_layers_are_computed_on_it(device: CudaDevice) -> None:
    ops = make_families(device, ForkJoin(1))
    assert list(make_layer_families(device, ops)) == [FORWARD.family]


def test_it_is_lost_once_everything_on_it_fails(device: CudaDevice, stand_in: StandIn) -> None:
    assert device.why_lost() is None
    stand_in.failure = "cudaErrorIllegalAddress"
    assert device.why_lost() == "cudaErrorIllegalAddress"


def test_the_pool_leaves_room_for_what_else_cuda_needs(device: CudaDevice, stand_in: StandIn) -> None:
    assert device.memory_bytes == 78 * GIB
    device.stream()
    assert stand_in.limit == 78 * GIB


@pytest.mark.parametrize(
    ("num_bytes", "limit"), [(GIB, GIB + GIB // 8), (78 * GIB, 78 * GIB), (1000, 1000 + GIB // 16)]
)
def test_a_limit_of_tensors_limits_the_pool(device: CudaDevice, stand_in: StandIn, num_bytes: int, limit: int) -> None:
    """The pool may take a little more: it rounds up, and what it keeps for later is in pieces."""
    device.limit_memory(num_bytes)
    device.stream()
    assert stand_in.limit == limit


@pytest.mark.parametrize(("more", "is_kept"), [(0, True), (1, False)])
def test_an_eighth_is_kept_for_later(device: CudaDevice, stand_in: StandIn, more: int, is_kept: bool) -> None:
    device.limit_memory(8 * GIB)
    device.stream()
    stand_in.num_cached = cached = stand_in.limit // 8 + more
    left = cached if is_kept else 0
    with device.computing():
        with device.computing():
            pass
        assert stand_in.num_cached == cached
    assert stand_in.num_cached == left
    stand_in.num_cached = cached
    device.trim()
    assert stand_in.num_cached == left
    stand_in.num_cached = 1
    device.free_cached()
    assert stand_in.num_cached == 0


def test_arrays_there_and_back(device: CudaDevice, stand_in: StandIn) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = device.from_host(array)
    assert there.ctypes.data != array.ctypes.data
    np.testing.assert_array_equal(device.to_host(there), array)
    assert [event for event, _ in stand_in.log] == ["synchronize", "synchronize"]
    assert device.to_host(device.from_host(np.empty((0, 3)))).shape == (0, 3)
    assert stand_in.stack() == []


def test_leaving_the_block_waits_even_for_what_failed(device: CudaDevice, stand_in: StandIn) -> None:
    with pytest.raises(ZeroDivisionError), device.computing():
        _ = 1 / 0
    assert [event for event, _ in stand_in.log] == ["synchronize"]
    assert stand_in.stack() == []


def test_work_that_is_done_soon_is_not_slept_for(device: CudaDevice, stand_in: StandIn) -> None:
    stand_in.is_quick = True
    with device.computing():
        pass
    assert [event for event, _ in stand_in.log] == ["done"]


def test_every_thread_has_its_own_stream_scratch_and_tickets(device: CudaDevice, stand_in: StandIn) -> None:
    together = threading.Barrier(ALL_AT_ONCE)

    def work(_: int) -> tuple[Any, int, int]:
        together.wait()
        with device.computing():
            own = (stand_in.stack()[-1], device.scratch(100), device.tickets(100))
            together.wait()
            return own

    with ThreadPoolExecutor(ALL_AT_ONCE) as threads:
        of_threads = list(threads.map(work, range(ALL_AT_ONCE)))
    for kind in zip(*of_threads, strict=True):
        assert len(set(kind)) == ALL_AT_ONCE


def test_scratch_and_tickets_are_kept_until_more_is_needed(device: CudaDevice) -> None:
    with device.computing():
        assert device.scratch(100) == device.scratch(10)
        assert device.tickets(100) == device.tickets(10)
        assert device.scratch(10) != device.scratch(1 << 20)
        address = device.tickets(5000)
        assert device.tickets(4000) == address


def test_tickets_begin_at_zero(device: CudaDevice) -> None:
    assert list((ctypes.c_uint32 * 3000).from_address(device.tickets(3000))) == [0] * 3000


def test_threads_compile_a_kernel_once(device: CudaDevice, stand_in: StandIn) -> None:
    together = threading.Barrier(ALL_AT_ONCE)

    def work(_: int) -> Any:
        together.wait()
        program = device.compiled(PROGRAM)
        program.prepare("double_float32")
        return program

    with ThreadPoolExecutor(ALL_AT_ONCE) as threads:
        assert len(set(threads.map(work, range(ALL_AT_ONCE)))) == 1
    assert stand_in.log == [("compile", PROGRAM.source_of("double_float32"), "nvrtc")]


def test_a_call_does_not_wait_for_the_kernels_that_it_does_not_need(device: CudaDevice, stand_in: StandIn) -> None:
    """Another thread compiles one of the same program, and does not end before the call does."""
    program, arguments = device.compiled(PROGRAM), np.zeros(1)
    begun, called = threading.Event(), threading.Event()

    def compiling(source: str) -> None:
        if "double_float32" in source:
            begun.set()
            assert called.wait(PATIENCE_SECONDS)

    stand_in.compiling = compiling
    with ThreadPoolExecutor(1) as threads:
        preparing = threads.submit(program.prepare, "double_float32")
        assert begun.wait(PATIENCE_SECONDS)
        with device.computing():
            program.launch(Launch("double_float64", (1, 1), 32, 0), arguments)
        called.set()
        preparing.result()
    assert [each[0] for each in stand_in.log if each[0] != "synchronize"] == ["compile", "compile", "launch"]


def test_a_kernel_that_was_compiled_in_advance_is_loaded(stand_in: StandIn, tmp_path: Path) -> None:
    cubins = Cubins(tmp_path, "sm_90", (13, 4))
    cubins.save(PROGRAM.source_of("double_float32"), b"a kernel")
    program = CudaDevice(1, precompiled=tmp_path).compiled(PROGRAM)
    for kernel in KERNELS:
        program.prepare(kernel)
    (file,) = tmp_path.iterdir()
    assert stand_in.log == [("load", str(file)), ("compile", PROGRAM.source_of("double_float64"), "nvrtc")]


def test_a_kernel_that_does_not_compile_is_tried_again(device: CudaDevice, stand_in: StandIn) -> None:
    def fail(_: str) -> None:
        raise ValueError("no memory")

    program, stand_in.compiling = device.compiled(PROGRAM), fail
    with pytest.raises(ValueError, match="no memory"):
        program.prepare("double_float32")
    stand_in.compiling = lambda _: None
    program.prepare("double_float32")


def test_a_launch_goes_to_the_threads_stream(device: CudaDevice, stand_in: StandIn) -> None:
    arguments = np.zeros(1)
    program = device.compiled(PROGRAM)
    with device.computing():
        stream = stand_in.stack()[-1]
        program.launch(Launch("double_float64", (7, 3), 256, 4096), arguments)
    kind, *launched = stand_in.log[1]
    assert (kind, *launched[:3]) == ("launch", "double_float64", (7, 3), (256,))
    assert launched[3][0] is arguments
    assert launched[4:] == [4096, stream]


def test_what_it_does_is_counted_in_all_threads(device: CudaDevice, stand_in: StandIn) -> None:
    device.limit_memory(8 * GIB)
    host = np.zeros(1000, np.uint8)

    def work(_: int) -> None:
        program = device.compiled(PROGRAM)
        with device.computing():
            array = device.from_host(host)
            program.launch(Launch("double_float32", (1, 1), 32, 0), host)
            device.read(array, 0, host[:10])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(5)))
    stand_in.num_cached = 77
    device.trim()
    usage = device.usage()
    assert (usage.num_compiled, usage.num_launches) == (1, 5)
    assert (usage.bytes_to_device, usage.bytes_to_host) == (5000, 50)
    assert (usage.cached_bytes, usage.other_bytes) == (77, 2 * GIB)
    assert usage.wait_seconds > 0


@pytest.mark.parametrize(
    ("module", "name", "status", "is_full"),
    [
        ("api.runtime", "CUDARuntimeError", 2, True),
        ("api.runtime", "CUDARuntimeError", 700, False),
        ("api.driver", "CUDADriverError", 2, True),
        ("api.driver", "CUDADriverError", 3, False),
        ("libs.cublas", "CUBLASError", 1, True),
        ("libs.cublas", "CUBLASError", 3, True),
        ("libs.cublas", "CUBLASError", 2, False),
    ],
)
def test_which_errors_say_that_memory_does_not_suffice(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, module: str, name: str, status: int, is_full: bool
) -> None:
    kind = type(name, (RuntimeError,), {"status": status})
    error = kind("no")
    assert not device.is_full(error), "it is not CuPy's"
    monkeypatch.setitem(sys.modules, f"cupy_backends.cuda.{module}", types.SimpleNamespace(**{name: kind}))
    assert device.is_full(error) is is_full
    assert device.is_full(MemoryError())
    assert not device.is_full(ValueError())
