"""What a device has done, and what its memory is used for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceUsage:
    """Figures of a device with memory of its own, since the server started.

    Attributes:
        cached_bytes: Its memory that is kept for later arrays.
        other_bytes: Its memory that neither arrays take nor what is kept for later: libraries, and other processes.
        num_compiled: The kernels that were compiled or loaded.
        num_launches: The kernels that were started, except those of libraries.
        bytes_to_device: The bytes that were copied from the host.
        bytes_to_host: The bytes that were copied to the host.
        wait_seconds: How long threads have waited for the device, all together.
    """

    cached_bytes: int = 0
    other_bytes: int = 0
    num_compiled: int = 0
    num_launches: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    wait_seconds: float = 0.0
