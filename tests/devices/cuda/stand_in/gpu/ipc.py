"""Memory and events that processes share, by handles of 64 bytes."""

import mmap
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.devices.cuda.stand_in.gpu.errors import INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.imported import Imported
from tests.devices.cuda.stand_in.gpu.machine import Machine
from tests.devices.cuda.stand_in.gpu.memory import address_of
from tests.devices.cuda.stand_in.gpu.ranges import Access, bytes_at

_HANDLE = struct.Struct("<4sIIIQQ16s16x")
_MEMORY, _EVENT = b"MEM.", b"EVT."
_SLOTS = 4096


@dataclass(frozen=True)
class SharedEvent:
    """An event that several processes know: how often it was recorded, and which of these records have been reached.

    Attributes:
        slot: Both numbers.
    """

    slot: NDArray[np.uint64]

    def record(self) -> Callable[[], None]:
        """Notes a record; returns what is done when the stream has reached it."""
        number = self.slot[0] = self.slot[0] + 1

        def reached() -> None:
            self.slot[1] = max(self.slot[1], number)

        return reached

    def newest(self) -> Callable[[], bool]:
        """Returns a function that is true once the stream has reached the newest record, whoever made it."""
        number = int(self.slot[0])
        return lambda: int(self.slot[1]) >= number


class Ipc:
    """What a process shares, and what it has opened."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._opened: dict[bytes, Imported] = {}
        self._board: int | None = None
        self._slots: NDArray[np.uint64] | None = None
        self._tokens: dict[int, bytes] = {}
        self._mappings: list[Any] = []

    def memory_handle(self, address: int) -> bytes:
        """Returns the handle of all of the allocation that has an address.

        Raises:
            CUDARuntimeError: It is not memory of cudaMalloc.
        """
        gpu = self._machine.enter()
        allocation = self._machine.device.at(address)
        if allocation is None or isinstance(allocation, Imported):
            raise CUDARuntimeError(INVALID_VALUE)
        memory = self._machine.memories[gpu]
        place, token = memory.handle(allocation)
        return _HANDLE.pack(_MEMORY, os.getpid(), memory.file, gpu, place, allocation.num_bytes, token)

    def open_memory(self, handle: bytes) -> int:
        """Returns the address of another process's memory; the same, if it is open already.

        Raises:
            CUDARuntimeError: It is memory of this process, or not there any more.
        """
        self._machine.enter()
        exporter, file, _, place, num_bytes, token = _unpacked(handle, _MEMORY)
        with self._machine.scheduler.lock:
            known = self._opened.get(handle)
            if known is not None:
                known.openings += 1
                return known.start
            mapping = _mapped(exporter, file, mmap.PAGESIZE + num_bytes, place)
            start = address_of(mapping) + mmap.PAGESIZE
            if bytes(bytes_at(start - mmap.PAGESIZE, len(token))) != token:
                raise CUDARuntimeError(INVALID_HANDLE)
            outlives = self._machine.settings.dead_exporters == "stay"
            imported = Imported(start, num_bytes, "device", {start: num_bytes}, [], mapping, token, exporter, outlives)
            self._machine.device.add(imported)
            self._opened[handle] = imported
            return start

    def close_memory(self, address: int) -> None:
        """Closes memory, which no queued work may use.

        Raises:
            CUDARuntimeError: It is not open.
        """
        machine = self._machine
        if machine.is_closed:
            return
        with machine.scheduler.lock:
            imported = machine.device.at(address)
            if not isinstance(imported, Imported) or imported.start != address:
                raise CUDARuntimeError(INVALID_VALUE)
            imported.openings -= 1
            if imported.openings:
                return
            for use in imported.unfinished(Access(imported.start, imported.end, True)):
                raise machine.fault(f"memory of another process is closed while {use.name} may still use it")
            machine.device.remove(imported)
            self._opened = {handle: each for handle, each in self._opened.items() if each is not imported}

    def new_event(self, ptr: int) -> SharedEvent:
        """Returns an event that other processes can open."""
        with self._machine.scheduler.lock:
            if self._slots is None:
                self._board = os.memfd_create("stand-in-events")
                os.ftruncate(self._board, _SLOTS * 32)
                self._slots = self._view(mmap.mmap(self._board, _SLOTS * 32))
            number = len(self._tokens)
            token = self._tokens[ptr] = secrets.token_bytes(16)
            slot = self._slots[4 * number : 4 * number + 4]
            slot[2:] = np.frombuffer(token, np.uint64)
            return SharedEvent(slot)

    def event_handle(self, ptr: int) -> bytes:
        """Returns the handle of an event.

        Raises:
            CUDARuntimeError: It was not made for other processes.
        """
        gpu = self._machine.enter()
        if ptr not in self._tokens:
            raise CUDARuntimeError(INVALID_HANDLE)
        place = list(self._tokens).index(ptr)
        return _HANDLE.pack(_EVENT, os.getpid(), self._board, gpu, place, 0, self._tokens[ptr])

    def open_event(self, handle: bytes) -> SharedEvent:
        """Returns an event of another process.

        Raises:
            CUDARuntimeError: It is of this process, or not there any more.
        """
        self._machine.enter()
        exporter, file, _, place, _, token = _unpacked(handle, _EVENT)
        slots = self._view(_mapped(exporter, file, _SLOTS * 32, 0))
        slot = slots[4 * place : 4 * place + 4]
        if slot[2:].tobytes() != token:
            raise CUDARuntimeError(INVALID_HANDLE)
        return SharedEvent(slot)

    def _view(self, mapping: mmap.mmap) -> NDArray[np.uint64]:
        self._mappings.append(mapping)
        return np.frombuffer(mapping, np.uint64)


def _unpacked(handle: bytes, kind: bytes) -> tuple[int, int, int, int, int, bytes]:
    if len(handle) != _HANDLE.size:
        raise ValueError(f"a handle has {_HANDLE.size} bytes, got {len(handle)}")
    found, exporter, file, gpu, place, num_bytes, token = _HANDLE.unpack(handle)
    if found != kind:
        raise CUDARuntimeError(INVALID_VALUE)
    if exporter == os.getpid():
        raise CUDARuntimeError(INVALID_CONTEXT)
    return exporter, file, gpu, place, num_bytes, token


def _mapped(exporter: int, file: int, num_bytes: int, place: int) -> mmap.mmap:
    """Returns memory of another process."""
    try:
        opened = os.open(f"/proc/{exporter}/fd/{file}", os.O_RDWR)
    except OSError:
        raise CUDARuntimeError(INVALID_HANDLE) from None
    try:
        return mmap.mmap(opened, num_bytes, offset=place)
    except (OSError, ValueError):
        raise CUDARuntimeError(INVALID_HANDLE) from None
    finally:
        os.close(opened)
