"""Copies between memory of any kind, and fills."""

import ctypes

from tests.devices.cuda.stand_in.gpu.errors import INVALID_VALUE, CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.queues import Queue
from tests.devices.cuda.stand_in.gpu.ranges import POISON, Access, bytes_at

from .._machine import MACHINE


def fill(queue: Queue, ptr: int, value: int, size: int) -> None:
    """Queues a memset."""

    def run() -> None:
        ctypes.memset(ptr, value, size)

    MACHINE.issue(queue, "memset", [Access(ptr, ptr + size, True)], run)


def copy(queue: Queue, dst: int, src: int, size: int) -> None:
    """Queues a copy.

    What CUDA may read late is read late: pinned memory, but not pageable memory, which it first copies to memory of its
    own. What it may write at any time until the stream is done is poisoned at once, and written late. That holds for
    pageable memory, too, for which its documentation says only that the call may wait.
    """
    with MACHINE.scheduler.lock:
        _copy(queue, dst, src, size)


def _copy(queue: Queue, dst: int, src: int, size: int) -> None:
    to_device, from_device = _is_device(dst), _is_device(src)
    if not to_device and not from_device:
        raise CUDARuntimeError(INVALID_VALUE)
    accesses = []
    if to_device or _is_pinned(dst, size):
        accesses.append(Access(dst, dst + size, True))
    if from_device or _is_pinned(src, size):
        accesses.append(Access(src, src + size, False))
    if to_device and from_device:
        MACHINE.issue(queue, "copy on the device", accesses, lambda: _move(dst, src, size))
    elif to_device:
        _upload(queue, dst, src, size, accesses)
    else:
        _download(queue, dst, src, size, accesses)


def _upload(queue: Queue, dst: int, src: int, size: int, accesses: list[Access]) -> None:
    given = ctypes.string_at(src, size)
    is_pinned = len(accesses) == 2

    def run() -> None:
        if is_pinned:
            if ctypes.string_at(src, size) != given:
                MACHINE.fault("pinned memory was written while it was copied to the device")
            _move(dst, src, size)
        else:
            ctypes.memmove(dst, given, size)

    MACHINE.issue(queue, "copy to the device", accesses, run)
    MACHINE.uploaded[dst] = given


def _download(queue: Queue, dst: int, src: int, size: int, accesses: list[Access]) -> None:
    allocation = MACHINE.host.at(dst)
    is_idle = allocation is None or not any(allocation.unfinished(Access(dst, dst + size, True)))

    def run() -> None:
        if is_idle and not (bytes_at(dst, size) == POISON).all():
            raise MACHINE.fault("memory of the host was written while a copy from the device was on its way to it")
        _move(dst, src, size)

    with MACHINE.scheduler.lock:
        MACHINE.issue(queue, "copy to the host", accesses, run)
        if is_idle:
            ctypes.memset(dst, POISON, size)


def _move(dst: int, src: int, size: int) -> None:
    ctypes.memmove(dst, src, size)


def _is_device(ptr: int) -> bool:
    return MACHINE.device.at(ptr) is not None


def _is_pinned(ptr: int, size: int) -> bool:
    """Returns True if all of a range of host memory is pinned; a part is an error, as for CUDA."""
    allocation = MACHINE.host.overlapping(ptr, ptr + size)
    if allocation is None:
        return False
    if ptr < allocation.start or ptr + size > allocation.end:
        raise CUDARuntimeError(INVALID_VALUE)
    return True
