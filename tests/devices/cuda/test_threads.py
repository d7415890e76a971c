"""Copies between host and GPU, with CUDA as one that copies as late as it may."""

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.cuda import threads
from gradserve_server.devices.cuda.threads import Pinning, ThreadCopies
from tests.servers.polling import PATIENCE_SECONDS

MIB = 1 << 20
BYTE = np.dtype(np.uint8)


class CUDARuntimeError(RuntimeError):
    pass


@dataclass
class LateCuda:
    """Copies from and to registered memory when somebody waits for them; others at once, in the order of the stream."""

    registered: dict[int, int] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)
    refuses: bool = False
    queue: list[Callable[[], None]] = field(default_factory=list)
    forgotten: threading.Event = field(default_factory=threading.Event)
    ptr: int = 77

    def cupy(self) -> Any:
        cuda = self

        class Event:
            def __init__(self, *, block: bool, disable_timing: bool) -> None:
                assert block
                assert disable_timing
                self.is_done = True

            def record(self, stream: LateCuda) -> None:
                assert stream is cuda
                self.is_done = False
                cuda.queue.append(lambda: setattr(self, "is_done", True))

            def synchronize(self) -> None:
                while not self.is_done:
                    cuda.queue.pop(0)()

        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyAsync=self.copy,
            hostRegister=self.register,
            hostUnregister=self.unregister,
        )
        return SimpleNamespace(cuda=SimpleNamespace(Event=Event, runtime=runtime))

    def finish(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def is_registered(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items())

    def copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert stream == self.ptr
        self.log.append(("copy", kind, num_bytes))
        self.queue.append(lambda: (ctypes.memmove(target, source, num_bytes), None)[1])
        if not self.is_registered(source if kind == 1 else target, num_bytes):
            self.finish()

    def register(self, address: int, num_bytes: int, flags: int) -> None:
        if self.refuses:
            raise CUDARuntimeError("cudaErrorNotSupported")
        assert not self.is_registered(address, 1)
        self.registered[address] = num_bytes
        self.log.append(("register", num_bytes, flags))

    def unregister(self, address: int) -> None:
        ctypes.string_at(address, self.registered.pop(address))  # it is still mapped
        self.forgotten.set()


@pytest.fixture
def cuda() -> LateCuda:
    return LateCuda()


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(64 * MIB)


@pytest.fixture
def copies(cuda: LateCuda, pool: BufferPool) -> ThreadCopies:
    cupy = cuda.cupy()
    return ThreadCopies(cupy, cuda, Pinning(cupy, lambda: None), pool.empty)


def filled(array: NDArray[Any]) -> NDArray[Any]:
    array[...] = np.random.default_rng(0).integers(0, 255, array.shape, np.uint8)
    return array


MEMORY = {
    "of the pool": lambda pool, size: pool.empty((size,), BYTE),
    "a view of the pool's": lambda pool, size: pool.empty((size + 10,), BYTE)[3:-7],
    "of a message": lambda _pool, size: np.empty(size, np.uint8),
}
SIZES = [1, 1000, 2 * MIB, 2 * MIB + 1, 7 * MIB - 1, 8 * MIB]
by_memory = pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)


@by_memory
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("refuses", [False, True], ids=["registered", "refused"])
def test_what_goes_there_comes_back(
    cuda: LateCuda, pool: BufferPool, copies: ThreadCopies, memory: Any, size: int, refuses: bool
) -> None:
    cuda.refuses = refuses
    source, there, back = filled(memory(pool, size)), np.zeros(size, np.uint8), memory(pool, size)
    copies.upload(source, there.ctypes.data)
    cuda.finish()
    np.testing.assert_array_equal(there, source)
    copies.download(there.ctypes.data, back)
    cuda.finish()
    np.testing.assert_array_equal(back, source)


def test_pooled_memory_is_registered_once_and_copied_at_once(
    cuda: LateCuda, pool: BufferPool, copies: ThreadCopies
) -> None:
    there = np.zeros(8 * MIB, np.uint8)
    for _ in range(3):
        copies.upload(filled(pool.empty((8 * MIB,), BYTE)), there.ctypes.data)
        cuda.finish()
    assert cuda.log == [("register", 8 * MIB, 0), *[("copy", 1, 8 * MIB)] * 3]


def test_other_memory_goes_through_slots_that_are_registered_once(cuda: LateCuda, copies: ThreadCopies) -> None:
    source, there = filled(np.empty(8 * MIB, np.uint8)), np.zeros(8 * MIB, np.uint8)
    copies.upload(source, there.ctypes.data)
    copies.download(there.ctypes.data, source)
    registered = [size for what, size, *_ in cuda.log if what == "register"]
    assert registered == [2 * MIB, 2 * MIB]


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_slot_that_is_not_waited_for_is_seen(
    copies: ThreadCopies, cuda: LateCuda, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These copies are late enough for these tests."""
    monkeypatch.setattr(threads._Slot, "wait", lambda _slot: None)
    here, there = filled(np.empty(8 * MIB, np.uint8)), np.zeros(8 * MIB, np.uint8)
    if direction == "upload":
        copies.upload(here, there.ctypes.data)
    else:
        copies.download(here.ctypes.data, there)
    cuda.finish()
    assert not np.array_equal(here, there)


def test_a_map_is_forgotten_before_it_is_unmapped(cuda: LateCuda) -> None:
    pool, cupy = BufferPool(0), cuda.cupy()
    copies = ThreadCopies(cupy, cuda, Pinning(cupy, lambda: None), pool.empty)
    source, there = pool.empty((4 * MIB,), BYTE), np.zeros(4 * MIB, np.uint8)
    copies.upload(source, there.ctypes.data)
    cuda.finish()
    assert cuda.registered
    del source
    gc.collect()
    assert cuda.forgotten.wait(PATIENCE_SECONDS)
    assert not cuda.registered


def test_what_cannot_be_registered_is_tried_and_reported_once(
    cuda: LateCuda, pool: BufferPool, copies: ThreadCopies, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuses = True
    there = np.zeros(4 * MIB, np.uint8)
    for _ in range(3):
        copies.upload(pool.empty((4 * MIB,), BYTE), there.ctypes.data)
    assert [record.message for record in caplog.records] == [
        "memory cannot be registered with CUDA, copies of it are slower: cudaErrorNotSupported"
    ]
