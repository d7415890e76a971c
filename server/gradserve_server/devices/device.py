"""The interfaces of devices, and the host as a device.

`Device` is memory for arrays, `Reducer` arithmetic on lists of arrays, and `GpuSharing` opens memory that clients hand
over. `DeviceWatch` finds out whether a GPU is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool


@dataclass(frozen=True)
class DeviceUsage:
    """Figures of a device that has its own memory, since the server started.

    Attributes:
        cached_bytes: Memory kept for later arrays.
        other_bytes: Memory used by neither arrays nor the cache: libraries and other processes.
        num_compiled: Kernels compiled or loaded.
        num_launches: Kernels started, except those of libraries.
        bytes_to_device: Bytes copied from the host.
        bytes_to_host: Bytes copied to the host.
        wait_seconds: Seconds for which threads have waited for the device, summed over the threads.
    """

    cached_bytes: int = 0
    other_bytes: int = 0
    num_compiled: int = 0
    num_launches: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    wait_seconds: float = 0.0


Array: TypeAlias = Any
"""A C-contiguous array in the memory of some device: NumPy's on the host, CuPy's on a GPU. Both have `dtype`, `shape`
and `nbytes`."""

Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Returns an uninitialised array; raises MemoryError if there is not enough memory."""


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns a view of the bytes of a C-contiguous host array."""
    return array.reshape(-1).view(np.uint8)


class Device(Protocol):
    """Memory for arrays, and arithmetic on them. Safe to use from several threads."""

    @property
    def name(self) -> str:
        """The name of the device in `gradserve info`: "cpu", "cuda:0", ..."""
        ...

    @property
    def inline_bytes(self) -> int:
        """The most bytes on which work takes less time than waking up a thread."""
        ...

    @property
    def memory_bytes(self) -> int | None:
        """The limit of the memory that tensors and computations may take; None if it is the host's memory."""
        ...

    def limit_memory(self, num_bytes: int) -> None:
        """Limits the memory of the device, cache included, to little more than this. Called once, before its use."""
        ...

    def holds(self, array: Array) -> bool:
        """Returns True if an array is in this device's memory."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def from_host(self, array: NDArray[Any]) -> Array:
        """Returns a host array in this device's memory: the array itself if that is the host's."""
        ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns an array of this device in host memory: the array itself if it is there already.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def write(self, array: Array, offset: int, source: NDArray[Any]) -> None:
        """Copies the bytes of a C-contiguous host array into an array, from an offset in bytes on.

        In a `computing` block, the host array must not change until the block is left.
        """
        ...

    def read(self, array: Array, offset: int, target: NDArray[Any]) -> None:
        """Fills a C-contiguous host array with the bytes of an array, from an offset in bytes on.

        In a `computing` block, it is filled when the block is left.
        """
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Ensures that work started by this thread in the block is finished when the block is left."""
        ...

    def is_full(self, error: BaseException) -> bool:
        """Returns True if an error says that the device's own memory does not suffice."""
        ...

    def free_cached(self) -> None:
        """Frees the memory kept for later. May wait for work on the device."""
        ...

    def trim(self) -> None:
        """Frees the memory kept for later if it is too much. May wait for work on the device."""
        ...

    def usage(self) -> DeviceUsage | None:
        """Returns figures of the device without waiting; None for the host."""
        ...

    def why_lost(self) -> str | None:
        """Returns why this process can no longer use the device, None if it can. May wait for work on the device."""
        ...


class CpuDevice:
    """The host."""

    name = "cpu"
    inline_bytes = 1 << 18
    """The most bytes of inputs and outputs; memory-bound work on them takes some 50 microseconds."""
    memory_bytes = None

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def limit_memory(self, num_bytes: int) -> None:
        """Does nothing."""

    def holds(self, array: Array) -> bool:
        """Returns True if an array is in host memory; one of NumPy's numbers is, too."""
        return isinstance(array, np.ndarray | np.generic)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not enough memory.
        """
        return self._pool.empty(shape, dtype)

    def from_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array itself."""
        return array

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns the array itself."""
        host: NDArray[Any] = array
        return host

    def write(self, array: Array, offset: int, source: NDArray[Any]) -> None:
        """Copies the bytes of a C-contiguous array into an array, from an offset in bytes on."""
        bytes_of(array)[offset : offset + source.nbytes] = bytes_of(source)

    def read(self, array: Array, offset: int, target: NDArray[Any]) -> None:
        """Fills a C-contiguous array with the bytes of an array, from an offset in bytes on."""
        bytes_of(target)[...] = bytes_of(array)[offset : offset + target.nbytes]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Does nothing, because functions on the host return when their work is finished."""
        yield

    def is_full(self, error: BaseException) -> bool:
        """Returns False: the host keeps nothing that could be given back."""
        return False

    def free_cached(self) -> None:
        """Does nothing."""

    def trim(self) -> None:
        """Does nothing."""

    def usage(self) -> None:
        """Returns None."""

    def why_lost(self) -> None:
        """Returns None: the host is never lost."""


class Place(NamedTuple):
    """The place of an element in a list of arrays.

    Attributes:
        array: The index of its array.
        position: Its position among the elements of that array.
    """

    array: int
    position: int


class Reducer(Protocol):
    """Scales, adds and divides lists of C-contiguous arrays of one memory. Safe to use from several threads.

    Every operation on every element is rounded by itself, in the dtype of sums, so that all implementations give the
    same bits; only those of a NaN may differ. Methods return when the results are there.
    """

    def make_ready(self, dtypes: Iterable[tuple[np.dtype[Any], np.dtype[Any]]]) -> None:
        """Does what might fail when gradients are added to sums, given the dtypes of both."""
        ...

    def scale(self, sources: Sequence[Array], factor: float, outs: Sequence[Array]) -> None:
        """Computes out = source factor for each; an `out` is either its `source` itself or other memory."""
        ...

    def add_scaled(self, totals: Sequence[Array], sources: Sequence[Array], factor: float) -> None:
        """Computes total += source factor for each."""
        ...

    def divide(self, totals: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        """Computes out = total / divisor for each, rounded to the dtype of `out` at the end."""
        ...

    def add_and_divide(
        self,
        totals: Sequence[Array],
        sources: Sequence[Array],
        factor: float,
        divisor: float,
        outs: Sequence[Array],
    ) -> None:
        """Computes out = (total + source factor) / divisor for each. The totals may be changed."""
        ...

    def needs_totals(self, num_gradients: int) -> bool:
        """Returns True if `add_up` of so many gradients needs memory for their sums."""
        ...

    def add_up(
        self,
        gradients: Sequence[Sequence[Array]],
        factors: Sequence[float],
        divisor: float,
        dtypes: Sequence[np.dtype[Any]],
        totals: Sequence[Array] | None,
        outs: Sequence[Array],
    ) -> None:
        """Computes out = (first gradient * its factor + second gradient * its factor + ...) / divisor, in this order.

        Args:
            gradients: The lists of arrays to add, at least one.
            factors: The factor of each list.
            divisor: The divisor.
            dtypes: The dtypes of the sums.
            totals: Memory for the sums, None if `needs_totals` says so.
            outs: The results; each is either its `total` itself or other memory.
        """
        ...

    def copy(self, sources: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Copies arrays; returns True if it has seen that all the values copied are finite."""
        ...

    def first_non_finite(self, arrays: Sequence[Array]) -> Place | None:
        """Returns the place of the first value that is infinite or NaN, None if all are finite."""
        ...


class SharingError(Exception):
    """A client's memory or event cannot be used; the message says why."""


class SharedEvent(Protocol):
    """An event that a client has recorded. It is closed with the last reference to it."""

    def is_done(self) -> bool:
        """Returns True if all work before the event is done. Does not wait.

        Raises:
            SharingError: CUDA cannot tell.
        """
        ...


class GpuSharing(Protocol):
    """Opens memory and events of clients on the GPU that runs ops. Safe to use from several threads.

    Attributes:
        uuid: The GPU's UUID, 16 bytes.
    """

    uuid: bytes

    @property
    def device(self) -> Device:
        """The GPU."""
        ...

    def open_memory(self, handle: bytes, buffer_id: int, num_bytes: int) -> Array:
        """Returns the memory of an allocation as an array of bytes. It is closed with the last reference to it.

        Args:
            handle: Its handle, 64 bytes.
            buffer_id: Distinguishes the allocation from earlier and later ones with the same handle.
            num_bytes: Its size.

        Raises:
            SharingError: It cannot be opened, or is smaller than `num_bytes`.
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
        """Frees everything but open memory and events."""
        ...


_log = logging.getLogger(__name__)


class DeviceWatch:
    """Checks after each unexpected error whether the device is lost; away from the event loop, one check at a time.

    Some errors of CUDA, such as an access to memory that is not there, spoil the whole process: whatever it asks of the
    GPU from then on fails in the same way, and only another process can use it. A server in such a state has to stop.
    """

    def __init__(self, device: Device, on_loss: Callable[[str], object]) -> None:
        self._device = device
        self._on_loss = on_loss
        self._is_lost = False
        # A thread of its own, because those of ops may all be waiting for the device.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gradserve-device-watch")
        self._looking: Future[None] | None = None

    @property
    def is_looking(self) -> bool:
        """True while it checks the device."""
        return self._looking is not None and not self._looking.done()

    def suspect(self) -> None:
        """Starts a check, unless one is under way. Called on the event loop."""
        if not self._is_lost and not self.is_looking:
            self._looking = self._threads.submit(self._look, asyncio.get_running_loop())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            why = self._device.why_lost()
        except Exception:
            _log.exception("looking at %s failed", self._device.name)
            return
        if why is not None:
            self._is_lost = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_loss, f"this process cannot use {self._device.name} any more: {why}")

    def close(self) -> None:
        """Ends the thread, without waiting for a check."""
        self._threads.shutdown(wait=False, cancel_futures=True)


P = ParamSpec("P")
T = TypeVar("T")


class DeviceFullError(MemoryError):
    """A device's memory does not suffice, even after its cache has been freed."""


def with_all_memory(device: Device, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function. If the device's memory does not suffice, frees what it keeps for later and calls once more.

    The function must be repeatable.

    Raises:
        DeviceFullError: That did not help.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not device.is_full(error):
            raise
    # Here the error is gone, and with it the arrays of the first attempt.
    device.free_cached()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not device.is_full(error):
            raise
        raise DeviceFullError(str(error)) from None
