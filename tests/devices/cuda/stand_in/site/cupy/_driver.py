"""The driver API: the functions of libcuda.so.1 that gradserve calls through ctypes, with the same arguments."""

import hashlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

from gradserve_protocol import gpu as driver
from tests.devices.cuda.stand_in.gpu.errors import INVALID_VALUE, CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.imported import Imported
from tests.devices.cuda.stand_in.gpu.ranges import Allocation

from ._machine import MACHINE
from .cuda import runtime

_BUFFER_ID, _DEVICE_ORDINAL, _IS_LEGACY_CUDA_IPC_CAPABLE = 7, 9, 10


def uuid_of(index: int) -> bytes:
    """Returns the UUID of a simulated GPU, which all processes see."""
    return hashlib.md5(f"stand-in {index}".encode()).digest()


class Library:
    """Stands for a CDLL."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[Allocation, int]] = {}
        self._numbers = itertools.count(1)
        self._outer = threading.local()
        self.not_capable: set[int] = set()
        """The addresses of allocations that are made as if by cudaMallocAsync."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self, f"_{name.removesuffix('_v2')}")

        def call(*arguments: Any) -> int:
            try:
                function(*(each._obj if hasattr(each, "_obj") else each.value for each in arguments))
            except CUDARuntimeError as error:
                return error.status
            return 0

        return call

    def _cuInit(self, flags: int) -> None: ...  # noqa: N802

    def _cuGetErrorName(self, status: int, text: Any) -> None:  # noqa: N802
        text.value = str(CUDARuntimeError(status)).encode()

    def _cuDeviceGet(self, device: Any, index: int) -> None:  # noqa: N802
        if index >= MACHINE.settings.num_gpus:
            raise CUDARuntimeError(INVALID_VALUE)
        device.value = index

    def _cuDeviceGetUuid(self, uuid: Any, device: int) -> None:  # noqa: N802
        uuid.raw = uuid_of(device)

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:  # noqa: N802
        context.value = device + 1

    def _cuCtxPushCurrent(self, context: int) -> None:  # noqa: N802
        outer = self._outer.__dict__.setdefault("gpus", [])
        outer.append(getattr(MACHINE._threads, "gpu", None))
        MACHINE.set_gpu(context - 1)

    def _cuCtxPopCurrent(self, _context: Any) -> None:  # noqa: N802
        gpu = self._outer.gpus.pop()
        if gpu is None:
            del MACHINE._threads.gpu
        else:
            MACHINE.set_gpu(gpu)

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:  # noqa: N802
        stream.value = runtime.streamCreateWithFlags(flags)

    def _cuStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        runtime.streamSynchronize(stream)

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:  # noqa: N802
        runtime.streamWaitEvent(stream, event, flags)

    def _cuEventCreate(self, event: Any, flags: int) -> None:  # noqa: N802
        event.value = runtime.eventCreateWithFlags(flags)

    def _cuEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        runtime.eventRecord(event, stream)

    def _cuIpcGetMemHandle(self, handle: Any, address: int) -> None:  # noqa: N802
        handle.raw = runtime.ipcGetMemHandle(address)

    def _cuIpcGetEventHandle(self, handle: Any, event: int) -> None:  # noqa: N802
        handle.raw = runtime.ipcGetEventHandle(event)

    def _cuMemGetAddressRange(self, base: Any, size: Any, address: int) -> None:  # noqa: N802
        allocation = self._at(address)
        base.value, size.value = allocation.start, allocation.num_bytes

    def _cuPointerGetAttribute(self, value: Any, attribute: int, address: int) -> None:  # noqa: N802
        allocation = self._at(address)
        if attribute == _BUFFER_ID:
            known = self._ids.get(allocation.start)
            if known is None or known[0] is not allocation:
                known = self._ids[allocation.start] = allocation, next(self._numbers)
            value.value = known[1]
        elif attribute == _DEVICE_ORDINAL:
            value.value = runtime.pointerGetAttributes(address).device
        else:
            assert attribute == _IS_LEGACY_CUDA_IPC_CAPABLE
            value.value = allocation.start not in self.not_capable and not isinstance(allocation, Imported)

    def _cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        runtime.memcpyAsync(target, source, size, runtime.memcpyDeviceToHost, stream)

    def _cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        runtime.memcpyAsync(target, source, size, runtime.memcpyHostToDevice, stream)

    def _at(self, address: int) -> Allocation:
        MACHINE.enter()
        allocation = MACHINE.device.at(address)
        if allocation is None:
            raise CUDARuntimeError(INVALID_VALUE)
        return allocation


LIBRARY = Library()
_load = driver.load_library


def install() -> None:
    """Makes gradserve take this for the driver."""
    driver.open_gpu.cache_clear()
    driver.load_library = lambda: LIBRARY


def uninstall() -> None:
    """Gives gradserve the real one again."""
    driver.open_gpu.cache_clear()
    driver.load_library = _load
