"""The interface of GPU memory that clients hand over."""

from typing import Protocol

from gradserve_server.devices.device import Array, Device


class SharingError(Exception):
    """Memory of a client, or its event, cannot be used; the message says why."""


class SharedEvent(Protocol):
    """An event that a client has recorded. It is closed when nobody refers to it any more."""

    def is_done(self) -> bool:
        """Returns True if everything is done that came before it. Does not wait.

        Raises:
            SharingError: CUDA does not say.
        """
        ...


class GpuSharing(Protocol):
    """Opens what clients have allocated on the GPU of the ops. Safe to use from several threads.

    Attributes:
        uuid: What tells it from all other GPUs, 16 bytes.
    """

    uuid: bytes

    @property
    def device(self) -> Device:
        """The GPU."""
        ...

    def open_memory(self, handle: bytes, buffer_id: int, num_bytes: int) -> Array:
        """Returns the memory of an allocation, as an array of bytes. It is closed when nobody refers to it any more.

        Args:
            handle: Its handle, 64 bytes.
            buffer_id: What tells it from another allocation that had the same handle, or will have it.
            num_bytes: Its size.

        Raises:
            SharingError: It cannot be opened, or is smaller.
        """
        ...

    def open_event(self, handle: bytes) -> SharedEvent:
        """Opens an event.

        Args:
            handle: Its handle, 64 bytes.

        Raises:
            SharingError: It cannot be opened.
        """
        ...

    def close(self) -> None:
        """Frees what it has beside open memory and events."""
        ...
