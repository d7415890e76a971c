"""The runtime API: CUDA's functions, with CuPy's names."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.devices.cuda.stand_in.gpu.errors import INVALID_HANDLE, INVALID_VALUE, CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.ipc import SharedEvent
from tests.devices.cuda.stand_in.gpu.queues import Queue

from .._machine import IPC, MACHINE
from . import _copies

errorMemoryAllocation = 2  # noqa: N816
errorInvalidValue = 1  # noqa: N816
errorPeerAccessAlreadyEnabled = 704  # noqa: N816
memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)  # noqa: N816
streamDefault, streamNonBlocking = 0, 1  # noqa: N816
streamLegacy, streamPerThread = 1, 2  # noqa: N816
eventDefault, eventBlockingSync, eventDisableTiming, eventInterprocess = 0, 1, 2, 4  # noqa: N816
hostAllocDefault, hostAllocPortable, hostAllocMapped, hostAllocWriteCombined = 0, 1, 2, 4  # noqa: N816
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)  # noqa: N816
is_hip = False

_event_ptrs = itertools.count(0x9000, 16)


@dataclass
class _Event:
    flags: int
    moment: dict[Queue, int] | None = field(default_factory=dict)
    shared: SharedEvent | None = None
    is_foreign: bool = False


_events: dict[int, _Event] = {}


@dataclass(frozen=True)
class PointerAttributes:
    """What is known of an address."""

    device: int
    devicePointer: int  # noqa: N815
    hostPointer: int  # noqa: N815
    type: int


def getDeviceCount() -> int:  # noqa: N802
    return MACHINE.settings.num_gpus


def getDevice() -> int:  # noqa: N802
    return MACHINE.gpu()


def setDevice(device: int) -> None:  # noqa: N802
    MACHINE.set_gpu(device)


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    return {
        "name": f"stand-in {device}".encode(),
        "totalGlobalMem": MACHINE.settings.total_bytes,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 132,
        "uuid": bytes([device]) * 16,
    }


def deviceSynchronize() -> None:  # noqa: N802
    MACHINE.enter()
    MACHINE.wait(MACHINE.scheduler.everything())


def driverGetVersion() -> int:  # noqa: N802
    return 13000


def runtimeGetVersion() -> int:  # noqa: N802
    return 13000


def malloc(size: int) -> int:
    return MACHINE.malloc(size).start


def free(ptr: int) -> None:
    MACHINE.free(ptr, is_pooled=False)


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    memory = MACHINE.memories[MACHINE.enter()]
    return memory.total_bytes - memory.used_bytes, memory.total_bytes


def hostAlloc(size: int, flags: int = 0) -> int:  # noqa: N802
    return MACHINE.pin(size).start


def freeHost(ptr: int) -> None:  # noqa: N802
    MACHINE.unpin(ptr, is_allocated=True)


def hostRegister(ptr: int, size: int, flags: int) -> None:  # noqa: N802
    MACHINE.register(ptr, size)


def hostUnregister(ptr: int) -> None:  # noqa: N802
    MACHINE.unpin(ptr, is_allocated=False)


def pointerGetAttributes(ptr: int) -> PointerAttributes:  # noqa: N802
    MACHINE.enter()
    if MACHINE.device.at(ptr) is not None:
        gpu = next((index for index, memory in enumerate(MACHINE.memories) if memory.has(ptr)), MACHINE.gpu())
        return PointerAttributes(gpu, ptr, 0, memoryTypeDevice)
    if MACHINE.host.at(ptr) is not None:
        return PointerAttributes(MACHINE.gpu(), ptr, ptr, memoryTypeHost)
    return PointerAttributes(-2, 0, ptr, memoryTypeUnregistered)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    _copies.copy(MACHINE.queue(stream), dst, src, size)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    queue = MACHINE.queue(streamLegacy)
    _copies.copy(queue, dst, src, size)
    MACHINE.wait(queue.moment())


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
    _copies.fill(MACHINE.queue(stream), ptr, value, size)


def memset(ptr: int, value: int, size: int) -> None:
    _copies.fill(MACHINE.queue(streamLegacy), ptr, value, size)


def streamCreate() -> int:  # noqa: N802
    return streamCreateWithFlags(streamDefault)


def streamCreateWithFlags(flags: int) -> int:  # noqa: N802
    return MACHINE.new_queue(is_blocking=flags != streamNonBlocking).ptr


def streamCreateWithPriority(flags: int, priority: int) -> int:  # noqa: N802
    return streamCreateWithFlags(flags)


def streamDestroy(stream: int) -> None:  # noqa: N802
    MACHINE.destroy_queue(stream)


def streamGetFlags(stream: int) -> int:  # noqa: N802
    return streamDefault if MACHINE.queue(stream).is_blocking else streamNonBlocking


def streamSynchronize(stream: int) -> None:  # noqa: N802
    MACHINE.wait(MACHINE.queue(stream).moment())


def streamQuery(stream: int) -> int:  # noqa: N802
    return _query(MACHINE.queue(stream).moment())


def streamIsCapturing(stream: int) -> bool:  # noqa: N802
    return False


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
    queue, known = MACHINE.queue(stream), _event(event)
    with MACHINE.scheduler.lock:
        if known.moment is not None:
            queue.wait_for(known.moment)
        if known.shared is not None:
            MACHINE.issue(queue, "waiting", (), lambda: None, known.shared.newest())


def launchHostFunc(stream: int, callback: Callable[[Any], None], arg: Any) -> None:  # noqa: N802
    def call() -> None:
        with MACHINE.calling_back():
            callback(arg)

    MACHINE.issue(MACHINE.queue(stream), "a function on the host", (), call)


def streamAddCallback(stream: int, callback: Callable[[int, int, Any], None], arg: Any) -> None:  # noqa: N802
    launchHostFunc(stream, lambda _: callback(stream, 0, arg), None)


def eventCreate() -> int:  # noqa: N802
    return eventCreateWithFlags(eventDefault)


def eventCreateWithFlags(flag: int) -> int:  # noqa: N802
    MACHINE.enter()
    if flag & eventInterprocess and not flag & eventDisableTiming:
        raise CUDARuntimeError(INVALID_VALUE)
    ptr = next(_event_ptrs)
    _events[ptr] = _Event(flag, shared=IPC.new_event(ptr) if flag & eventInterprocess else None)
    return ptr


def eventDestroy(event: int) -> None:  # noqa: N802
    _events.pop(event, None)


def eventRecord(event: int, stream: int) -> None:  # noqa: N802
    queue, known = MACHINE.queue(stream), _event(event)
    with MACHINE.scheduler.lock:
        MACHINE.issue(queue, "an event", (), known.shared.record() if known.shared is not None else lambda: None)
        known.moment = queue.moment()


def eventQuery(event: int) -> int:  # noqa: N802
    known = _event(event)
    if known.is_foreign and known.shared is not None:
        return 0 if known.shared.newest()() else 600
    return _query(known.moment or {})


def eventSynchronize(event: int) -> None:  # noqa: N802
    known = _event(event)
    MACHINE.wait(known.moment or {})
    if known.is_foreign and known.shared is not None:
        is_over = known.shared.newest()
        while not is_over():
            time.sleep(0.0002)


def eventElapsedTime(start: int, end: int) -> float:  # noqa: N802
    if (_event(start).flags | _event(end).flags) & eventDisableTiming:
        raise CUDARuntimeError(INVALID_HANDLE)
    return 0.001


def ipcGetMemHandle(devPtr: int) -> bytes:  # noqa: N802, N803
    return IPC.memory_handle(devPtr)


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:  # noqa: N802
    return IPC.open_memory(handle)


def ipcCloseMemHandle(devPtr: int) -> None:  # noqa: N802, N803
    IPC.close_memory(devPtr)


def ipcGetEventHandle(event: int) -> bytes:  # noqa: N802
    return IPC.event_handle(event)


def ipcOpenEventHandle(handle: bytes) -> int:  # noqa: N802
    ptr = next(_event_ptrs)
    _events[ptr] = _Event(eventDisableTiming, shared=IPC.open_event(handle), is_foreign=True)
    return ptr


def _event(ptr: int) -> _Event:
    MACHINE.enter()
    try:
        return _events[ptr]
    except KeyError:
        raise CUDARuntimeError(INVALID_HANDLE) from None


def _query(moment: dict[Queue, int]) -> int:
    """Returns 0 if work is over, cudaErrorNotReady if not; it runs on meanwhile."""
    scheduler = MACHINE.scheduler
    if not scheduler.is_over(moment):
        return 600
    scheduler.observe(moment)
    return 0
