"""What the device of the ops does."""

from dataclasses import dataclass

from gradserve.v1 import server_messages_pb2 as messages_pb2
from gradserve.wire.messages import encode_duration
from gradserve_server.devices.device import Device
from gradserve_server.resources.memory import Purpose
from gradserve_server.tensors.eviction import Evictor


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of a device, and of the quota of its memory.

    Attributes:
        device: The device.
        evictor: What takes its memory; None if the device has none of its own.
    """

    device: Device
    evictor: Evictor | None

    def message(self) -> messages_pb2.DeviceUsage | None:
        """Returns them; None for the host."""
        usage = self.device.usage()
        if usage is None or self.evictor is None:
            return None
        used = self.evictor.device.used
        return messages_pb2.DeviceUsage(
            max_bytes=self.evictor.device.quota.limit,
            computing_bytes=used[Purpose.COMPUTING],
            stored_bytes=used[Purpose.STORED],
            accumulator_bytes=used[Purpose.ACCUMULATORS],
            layer_bytes=used[Purpose.LAYERS],
            cached_bytes=usage.cached_bytes,
            other_bytes=usage.other_bytes,
            num_evicted=self.evictor.num_evicted,
            evicted_bytes=self.evictor.evicted_bytes,
            num_compiled=usage.num_compiled,
            num_launches=usage.num_launches,
            bytes_to_device=usage.bytes_to_device,
            bytes_to_host=usage.bytes_to_host,
            wait=encode_duration(usage.wait_seconds),
        )
