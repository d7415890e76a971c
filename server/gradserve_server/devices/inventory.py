"""The devices of this machine, the choice of one for ops, and the threads of a server that compute on them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from gradserve_protocol.gpu import GpuError
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.config import RuntimeConfig
from gradserve_server.devices.compute import DEVICE_THREADS, ThreadCompute
from gradserve_server.devices.device import CpuDevice, Device, DeviceWatch, GpuSharing
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.loading import KernelLoader
from gradserve_server.runtime.process import memory_bytes, num_cores

NO_CUPY = "CuPy is not installed: see the extras cuda12 and cuda13"


@dataclass(frozen=True)
class DeviceDescription:
    """A device of this machine.

    Attributes:
        name: "cpu", "cuda:0", ...
        description: A description in words.
        total_memory_bytes: The size of its memory.
    """

    name: str
    description: str
    total_memory_bytes: int


@dataclass(frozen=True)
class Inventory:
    """The devices of this machine.

    Attributes:
        devices: The CPU, and the GPUs that can be used.
        why_no_gpu: Why there are no GPUs among them; None if there are.
    """

    devices: tuple[DeviceDescription, ...]
    why_no_gpu: str | None


def take_inventory() -> Inventory:
    """Returns the CPU and, if CuPy and a driver are installed, the CUDA devices."""
    cpu = DeviceDescription("cpu", _cpu_description(), memory_bytes())
    gpus, why_none = _gpus()
    return Inventory((cpu, *gpus), why_none)


def _cpu_description() -> str:
    return f"{platform.machine()}, {num_cores()} cores"


def _gpus() -> tuple[list[DeviceDescription], str | None]:
    if importlib.util.find_spec("cupy") is None:
        return [], NO_CUPY
    from gradserve_server.devices.cuda.importing import import_cupy

    try:
        cupy = import_cupy()
    except ImportError as error:
        return [], f"CuPy cannot be imported: {error}"
    runtime = cupy.cuda.runtime
    try:
        gpus = [_described(index, runtime.getDeviceProperties(index)) for index in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:  # such as a driver that is too old for the CUDA of CuPy
        return [], f"CUDA cannot be used: {error}"
    return gpus, None if gpus else "CUDA finds no GPU"


def _described(index: int, properties: dict[str, object]) -> DeviceDescription:
    name, total = properties["name"], properties["totalGlobalMem"]
    assert isinstance(name, bytes)
    assert isinstance(total, int)
    return DeviceDescription(f"cuda:{index}", name.decode(), total)


_log = logging.getLogger(__name__)


class NoSuchDeviceError(Exception):
    """The machine or the server does not have the requested device; the message lists those it has.

    Attributes:
        setting: The setting that asks for it.
    """

    def __init__(self, message: str, setting: str = "device") -> None:
        super().__init__(message)
        self.setting = setting


def choose_device(wanted: str, host: CpuDevice, inventory: Inventory) -> Device:
    """Returns a device by its name in `gradserve info`; for "auto" the first GPU, or the host if there is none.

    Args:
        wanted: The name, or "cuda" for the first GPU.
        host: The device of the CPU.
        inventory: The devices of the machine.

    Raises:
        NoSuchDeviceError: The machine has no device of this name.
    """
    names = [device.name for device in inventory.devices]
    why_no_gpu = inventory.why_no_gpu
    if wanted == "auto":
        wanted = next((name for name in names if name.startswith("cuda:")), host.name)
        if why_no_gpu not in (None, NO_CUPY):  # a user who has installed CuPy wants a GPU
            _log.warning("ops run on the CPU: %s", why_no_gpu)
    if wanted == "cuda":
        wanted = "cuda:0"
    if wanted == host.name:
        return host
    if wanted not in names:
        lacking = "" if why_no_gpu is None else f"; {why_no_gpu}"
        raise NoSuchDeviceError(
            f"expected a device of this machine, {', '.join(names)} or auto, got {wanted!r}{lacking}"
        )
    from gradserve_server.devices.cuda.device import CudaDevice

    return CudaDevice(int(wanted.removeprefix("cuda:")), host.empty)


def sharing_of(device: Device) -> GpuSharing | None:
    """Returns the opener of clients' memory on a device; None if it is no GPU, or its driver cannot identify it."""
    if not device.name.startswith("cuda:"):
        return None
    from gradserve_server.devices.cuda.device import CudaDevice
    from gradserve_server.devices.cuda.sharing import CudaSharing

    assert isinstance(device, CudaDevice), "there is one kind of GPU"
    try:
        return CudaSharing(device)
    except GpuError as error:
        _log.warning("clients cannot hand over memory of %s: %s", device.name, error)
        return None


@dataclass(frozen=True)
class Processors:
    """The devices of a server, and the threads that compute on them.

    Attributes:
        pool: The host's memory that is kept for later.
        host: The host.
        device: The device of the ops; the host if that is the one.
        compute: Threads for arithmetic on the host.
        op_compute: Threads for everything that uses the device, and for nothing else if that is not the host.
        parallel: Threads that share one large computation on the host.
        loader: Loads the kernels of these threads.
        sharing: Opens clients' memory on the device; None if it cannot or must not.
        watch: Checks whether the device is lost.
    """

    pool: BufferPool
    host: CpuDevice
    device: Device
    compute: ThreadCompute
    op_compute: ThreadCompute
    parallel: ForkJoin
    loader: KernelLoader
    sharing: GpuSharing | None
    watch: DeviceWatch

    @classmethod
    def of(
        cls,
        config: RuntimeConfig,
        choose_device: Callable[[CpuDevice], Device],
        share: Callable[[Device], GpuSharing | None],
        on_loss: Callable[[str], object],
    ) -> Self:
        """Returns the processors of a server.

        Args:
            config: The number of threads, and the size of the pool.
            choose_device: Returns the device for ops, given the host.
            share: Returns the opener of clients' memory on it.
            on_loss: Called with the reason when the device is lost.
        """
        pool, loader = BufferPool(config.pool_bytes), KernelLoader()
        host = CpuDevice(pool)
        device = choose_device(host)
        return cls(
            pool,
            host,
            device,
            ThreadCompute(config.compute_threads),
            ThreadCompute(config.compute_threads if device is host else DEVICE_THREADS, "ops"),
            ForkJoin(config.compute_threads, loader),
            loader,
            share(device),
            DeviceWatch(device, on_loss),
        )

    async def trim(self) -> None:
        """Gives back what the device keeps for later, if that is too much."""
        with contextlib.suppress(Exception):  # of a device that is lost, which ops find out
            await self.op_compute.run_in_thread(self.device.trim)

    def close(self) -> None:
        """Ends all threads, and gives clients' memory back once nothing reads it."""
        self.op_compute.close()
        if self.sharing is not None:
            self.sharing.close()
        self.watch.close()
        self.compute.close()
        self.parallel.close()
