"""The processors of a server: its devices, and the threads that compute on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.config import RuntimeConfig
from gradserve_server.devices.compute import DEVICE_THREADS, ThreadCompute
from gradserve_server.devices.device import CpuDevice, Device, DeviceWatch, GpuSharing
from gradserve_server.devices.host.kernels import ForkJoin


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
        sharing: Opens clients' memory on the device; None if it cannot or must not.
        watch: Checks whether the device is lost.
    """

    pool: BufferPool
    host: CpuDevice
    device: Device
    compute: ThreadCompute
    op_compute: ThreadCompute
    parallel: ForkJoin
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
        pool = BufferPool(config.pool_bytes)
        host = CpuDevice(pool)
        device = choose_device(host)
        return cls(
            pool,
            host,
            device,
            ThreadCompute(config.compute_threads),
            ThreadCompute(config.compute_threads if device is host else DEVICE_THREADS, "ops"),
            ForkJoin(config.compute_threads),
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
