"""The GPUs of a process: what the CUDA runtime does, without CuPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from tests.devices.cuda.stand_in.gpu.errors import (
    ALREADY_REGISTERED,
    ILLEGAL_ADDRESS,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    CUBLASError,
    CUDARuntimeError,
)
from tests.devices.cuda.stand_in.gpu.faults import Fault, Faults
from tests.devices.cuda.stand_in.gpu.imported import Imported
from tests.devices.cuda.stand_in.gpu.memory import DeviceMemory, HostMemory
from tests.devices.cuda.stand_in.gpu.queues import LEGACY, Queue, Scheduler, always
from tests.devices.cuda.stand_in.gpu.ranges import POISON, Access, Allocation, Ranges, Use, bytes_at
from tests.devices.cuda.stand_in.gpu.settings import Settings

_FIRST_PTR = 0x5000


class Machine:
    """GPUs, and what a process has on them.

    Attributes:
        contexts: The indices of the GPUs on which the process has a context.
        uploaded: What was copied to the beginnings of blocks; kernels find addresses there.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.faults = Faults(settings.report)
        self.scheduler = Scheduler(settings.seed, settings.patience_seconds)
        self.memories = [DeviceMemory(index, settings.total_bytes) for index in range(settings.num_gpus)]
        self.device = Ranges[Allocation]()
        self.host = HostMemory()
        self.contexts: set[int] = set()
        self.uploaded: dict[int, bytes] = {}
        self.is_closed = False
        self._failures = dict(settings.failures)
        self._next_ptr = _FIRST_PTR
        self._threads = threading.local()
        self._lost: str | None = None
        self._defaults = [Queue(LEGACY, index, True) for index in range(settings.num_gpus)]
        self.scheduler.add(self._defaults[0])

    # Threads and contexts

    def set_gpu(self, index: int) -> None:
        """Makes a GPU the current one of this thread, which makes a context on it."""
        if not 0 <= index < self.settings.num_gpus:
            raise CUDARuntimeError(INVALID_DEVICE)
        self._threads.gpu = index
        self._use_context(index)

    def gpu(self) -> int:
        """Returns the index of this thread's current GPU."""
        return getattr(self._threads, "gpu", 0)

    def enter(self) -> int:
        """Returns the index of this thread's current GPU, for a call that needs a context.

        A thread that has not chosen one would get GPU 0, whatever the others use.
        """
        if self._lost is not None:
            raise CUDARuntimeError(ILLEGAL_ADDRESS)
        if getattr(self._threads, "is_calling_back", False):
            raise self.fault("a function that a stream calls on the host uses CUDA")
        if not hasattr(self._threads, "gpu"):
            raise self.fault(f"thread {threading.current_thread().name} uses CUDA, but has not chosen a GPU")
        self._use_context(self.gpu())
        return self.gpu()

    def _use_context(self, index: int) -> None:
        self.contexts.add(index)
        if index not in self.settings.usable:
            raise self.fault(f"this process has a context on GPU {index}, which it was not told to use")

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """A block in which a stream calls a function on the host."""
        self._threads.is_calling_back = True
        try:
            yield
        finally:
            self._threads.is_calling_back = False

    # Faults

    def fault(self, message: str) -> Fault:
        """Records a fault. After it the process cannot use its GPUs any more, and what follows is not recorded."""
        if self._lost is not None:
            return Fault(message)
        self._lost = message
        return self.faults.add(message)

    def lose(self, reason: str) -> None:
        """Spoils the context, as an access to memory that is not there does."""
        self._lost = reason

    def fails(self, what: str) -> bool:
        """Returns True if a request is one of those that have to fail."""
        with self.scheduler.lock:
            left = self._failures.get(what, 0)
            self._failures[what] = max(left - 1, 0)
            return left > 0

    def fail_next(self, what: str, times: int = 1) -> None:
        """Makes the next requests of a kind fail for want of memory; see `Settings.failures`."""
        self._failures[what] = times

    def cublas_handle(self) -> int:
        """Returns this thread's handle of cuBLAS on its GPU, which takes memory when it is made.

        Raises:
            CUBLASError: There is none.
        """
        gpu = self.enter()
        handles: set[int] = self._threads.__dict__.setdefault("cublas", set())
        if gpu not in handles:
            if not self.take_outside("cublas", self.settings.cublas_bytes):
                raise CUBLASError(1)
            handles.add(gpu)
        return 0xB1A5 + gpu

    # Streams

    def new_queue(self, *, is_blocking: bool) -> Queue:
        gpu = self.enter()
        with self.scheduler.lock:
            self._next_ptr += 16
            queue = Queue(self._next_ptr, gpu, is_blocking)
            self.scheduler.add(queue)
            return queue

    def queue(self, ptr: int) -> Queue:
        """Returns the queue of a cudaStream_t."""
        gpu = self.enter()
        if ptr in (LEGACY, 1):
            self.scheduler.add(self._defaults[gpu])
            return self._defaults[gpu]
        queue = self.scheduler.queues.get(ptr)
        if queue is None or queue.is_destroyed:
            raise CUDARuntimeError(INVALID_HANDLE)
        return queue

    def destroy_queue(self, ptr: int) -> None:
        """Forgets a stream. What was queued still runs."""
        self.scheduler.queues[ptr].is_destroyed = True

    # Work

    def issue(
        self,
        queue: Queue,
        name: str,
        accesses: Iterable[Access],
        run: Callable[[], None],
        is_ready: Callable[[], bool] = always,
    ) -> int:
        """Queues work, after a look at the memory that it uses.

        What it uses must be allocated, and every other use of it, on other streams, must surely come before.
        """
        gpu = self.enter()
        if queue.gpu != gpu:
            raise self.fault(f"{name} on a stream of GPU {queue.gpu}, but GPU {gpu} is current")
        accesses = [access for access in accesses if access.end > access.start]
        with self.scheduler.lock:
            self.scheduler.order_by_default(queue)
            used = [(self._allocation(access, name), access) for access in accesses]
            for allocation, access in used:
                self._check_order(queue, name, allocation, access)
            number = self.scheduler.issue(queue, self._guarded(name, used, run), is_ready)
            for allocation, access in used:
                allocation.uses.append(Use(access, queue, number, name))
            return number

    def from_address(self, address: int, *, writes: bool) -> Access:
        """Returns the use of a block from an address to its end, by work that does not say how much it uses."""
        with self.scheduler.lock:
            allocation = self.device.at(address)
            block = None if allocation is None else allocation.block_at(address)
            return Access(address, address + 1 if block is None else block[1], writes)

    def found_in(self, words: bytes) -> list[Access]:
        """Returns uses of the memory whose addresses are among words: whatever else, it is read."""
        numbers = np.frombuffer(words[: len(words) // 8 * 8], np.uint64)
        with self.scheduler.lock:
            inside = [memory.has_any(numbers) for memory in self.memories]
            addresses = np.unique(numbers[np.logical_or.reduce(inside)]).tolist()
            return [self.from_address(address, writes=False) for address in addresses]

    def give_back(self, ptr: int, allocation: Allocation, access: Access, run: Callable[[], None]) -> None:
        """Queues what the pool does to memory that was freed, on the stream of its arena. The lock is held.

        Another client of the pool may have the memory at once, on that stream.
        """
        self.uploaded.pop(access.start, None)
        queue = self.scheduler.queues[ptr]
        self.scheduler.order_by_default(queue)
        for use in allocation.unfinished(access):
            if not queue.comes_after(use.queue, use.number):
                self.fault(f"memory is freed while {use.name}, on another stream, may still use it")
        number = self.scheduler.issue(queue, run)
        allocation.uses.append(Use(access, queue, number, "the pool"))

    def _allocation(self, access: Access, name: str) -> Allocation:
        allocation = self.device.at(access.start) or self.host.at(access.start)
        if allocation is None:
            raise self.fault(f"{name} uses memory at {access.start:#x}, which is not allocated")
        block = allocation.block_at(access.start)
        if block is None:
            raise self.fault(f"{name} uses memory at {access.start:#x}, which was freed")
        if access.end > block[1]:
            raise self.fault(f"{name} uses {access.end - block[1]} bytes beyond the end of its memory")
        return allocation

    def _check_order(self, queue: Queue, name: str, allocation: Allocation, access: Access) -> None:
        for use in allocation.unfinished(access):
            if (use.access.writes or access.writes) and not queue.comes_after(use.queue, use.number):
                did, does = ("writes" if each.writes else "reads" for each in (use.access, access))
                raise self.fault(
                    f"{name} {does} memory that {use.name} {did} on another stream, and nothing says which comes first"
                )

    def _guarded(self, name: str, used: list[tuple[Allocation, Access]], run: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            if self._lost is not None:
                return
            for allocation, access in used:
                memory = self.host if allocation.kind == "pinned" else self.device
                if memory.at(access.start) is not allocation:
                    self.fault(f"{name} ran after its memory at {access.start:#x} was freed")
                    return
                if isinstance(allocation, Imported) and (why := allocation.why_gone()):
                    self.fault(f"{name} uses memory of another process: {why}")
                    return
            try:
                run()
            except Fault:
                pass  # it is known
            except Exception as error:
                self.fault(f"{name} failed: {type(error).__name__}: {error}")

        return guarded

    def wait(self, moment: dict[Queue, int]) -> None:
        """Waits, as a host thread, until work is over."""
        self.enter()
        self.scheduler.wait(moment)
        self.enter()

    # Device memory

    def malloc(self, num_bytes: int) -> Allocation:
        gpu = self.enter()
        with self.scheduler.lock:
            if self.fails("malloc"):
                raise CUDARuntimeError(OUT_OF_MEMORY)
            return self._allocated(gpu, num_bytes)

    def _allocated(self, gpu: int, num_bytes: int) -> Allocation:
        allocation = self.memories[gpu].malloc(num_bytes)
        self.device.add(allocation)
        return allocation

    def take_outside(self, what: str, num_bytes: int) -> bool:
        """Takes memory for good that is not asked of any pool; returns False if there is none."""
        gpu = self.enter()
        with self.scheduler.lock:
            if self.fails(what):
                return False
            try:
                self._allocated(gpu, num_bytes)
            except CUDARuntimeError:
                return False
            return True

    def free(self, address: int, *, is_pooled: bool) -> None:
        """Frees memory of cudaMalloc once all work is over, which only CuPy's own pools may count on."""
        if self.is_closed:
            return
        with self.scheduler.lock:
            allocation = self.device.at(address)
            if allocation is None or allocation.start != address or allocation.kind != "device":
                raise self.fault(f"memory at {address:#x} is freed, but was not allocated, or was freed before")
            if not is_pooled:
                self._check_unused(allocation, "memory is freed")
        self.scheduler.drain()
        with self.scheduler.lock:
            memory = next(each for each in self.memories if each.has(address))
            if not memory.free(allocation):
                self.fault(f"something was written beside {allocation.num_bytes} bytes of memory at {address:#x}")
            self.device.remove(allocation)

    def _check_unused(self, allocation: Allocation, what: str) -> None:
        for use in allocation.unfinished(Access(allocation.start, allocation.end, True)):
            raise self.fault(f"{what} while {use.name} may still use it")

    # Pinned memory

    def pin(self, num_bytes: int) -> Allocation:
        self.enter()
        with self.scheduler.lock:
            if self.fails("hostAlloc"):
                raise CUDARuntimeError(OUT_OF_MEMORY)
            return self.host.allocate(num_bytes)

    def register(self, address: int, num_bytes: int) -> None:
        """Pins memory of the process."""
        self.enter()
        with self.scheduler.lock:
            if self.fails("hostRegister"):
                raise CUDARuntimeError(OUT_OF_MEMORY)
            if num_bytes <= 0:
                raise CUDARuntimeError(INVALID_VALUE)
            if self.host.overlapping(address, address + num_bytes) is not None:
                raise CUDARuntimeError(ALREADY_REGISTERED)
            self.host.add(Allocation(address, num_bytes, "pinned", {address: num_bytes}))

    def unpin(self, address: int, *, is_allocated: bool) -> None:
        """Frees pinned memory, or ends its registration."""
        if self.is_closed:
            return
        with self.scheduler.lock:
            allocation = self.host.at(address)
            if allocation is None or allocation.start != address or self.host.is_allocated(allocation) != is_allocated:
                raise CUDARuntimeError(INVALID_VALUE if is_allocated else NOT_REGISTERED)
            self._check_unused(allocation, "pinned memory is freed" if is_allocated else "memory is unpinned")
            if is_allocated:
                self.host.free(allocation)
            else:
                self.host.remove(allocation)

    def check_reuse(self, address: int) -> None:
        """Checks that pinned memory, which goes back to a pool, is not in use, and poisons it."""
        if self.is_closed:
            return
        with self.scheduler.lock:
            allocation = self.host.at(address)
            assert allocation is not None
            for use in allocation.unfinished(Access(allocation.start, allocation.end, True)):
                self.fault(f"pinned memory goes back to its pool while {use.name} may still use it")
            bytes_at(address, allocation.num_bytes)[...] = POISON

    def close(self) -> None:
        """Ends it, after all work. What is left of its arrays must not be used any more."""
        if not self.is_closed:
            self.scheduler.drain()
            self.is_closed = True
            self.scheduler.close()
            for memory in self.memories:
                memory.close()
