"""The tensors of a request, and the ways in which they travel: a class for each.

Another way, such as a codec, is another subclass of `IncomingTensor`. Only the code that decodes messages makes
tensors of a certain way; everyone else asks them for what they need.
"""

from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import INLINE_BYTES, PIECE_BYTES, Compute
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.budget import Reservation
from gradserve_server.resources.memory import Room
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.held import HeldTensors, Residence
from gradserve_server.tensors.payload import NO_PAYLOAD, Payload
from gradserve_server.tensors.spec import Fault, TensorSpec
from gradserve_server.tensors.store import TensorStore


class IncomingTensor:
    """One tensor of a request.

    Attributes:
        field: The path of its field in the request.
        array: The elements: read-only, in the memory of their device, while the tensors of the request are open; before
            that, only if they came with the request. None otherwise.
        fault: What is wrong with the tensor, or None. Raised when a check needs the tensor, in its order.
        spec: The description of a stored tensor in the request; None if there is none, or the array says it.
        is_live: Whether the elements are in memory of the client, who can change them at any time.
        is_own: Whether the payload's reservation counts the memory, which the call may keep.
        is_on_gpu: Whether the elements are in the client's memory on the ops' GPU.
        is_stored: Whether it is stored on the server.
        is_in_payload: Whether it travels in the payload.
    """

    is_stored: ClassVar[bool] = False
    is_in_payload: ClassVar[bool] = False
    is_own: bool = False
    is_on_gpu: bool = False

    def __init__(
        self,
        field: str,
        array: Array = None,
        *,
        fault: Fault | None = None,
        spec: TensorSpec | None = None,
        is_live: bool = False,
    ) -> None:
        self.field = field
        self.array = array
        self.fault = fault
        self.spec = spec
        self.is_live = is_live

    def read(self) -> Array:
        """Returns the array of a tensor that is open.

        Raises:
            InvalidArgumentError: The request describes no possible tensor, or not the stored one.
        """
        if self.fault is not None:
            raise self.error(self.fault)
        return self.array

    def error(self, fault: Fault) -> InvalidArgumentError:
        """Returns the error for a fault of the tensor."""
        return InvalidArgumentError(fault.message, field=self.field + fault.field)

    def copied_bytes(self, *, in_place: bool) -> int:
        """Returns the number of bytes that `settle` will copy."""
        return 0

    def settle(self, held: HeldTensors | None, *, in_place: bool) -> None:
        """Finds the array for the length of the call. Called once, by any thread, when the tensor has arrived.

        Args:
            held: The stored tensors of the request; None if it refers to none.
            in_place: Whether elements that the client can change may stay where they are.

        Raises:
            MemoryError: There is no memory for a copy.
        """


class Malformed(IncomingTensor):
    """An invalid description of a tensor."""


class Inline(IncomingTensor):
    """A tensor in the message itself, in host memory; read-only."""


class Stored(IncomingTensor):
    """A tensor that is stored on the server."""

    is_stored = True

    def __init__(self, field: str, handle: str, spec: TensorSpec | None = None, *, fault: Fault | None = None) -> None:
        super().__init__(field, fault=fault, spec=spec)
        self.handle = handle

    def settle(self, held: HeldTensors | None, *, in_place: bool) -> None:
        """Takes the stored array, and compares it with the description."""
        assert held is not None, "the request refers to stored tensors"
        self.array = array = held.arrays[self.handle]
        spec = self.spec
        if spec is not None and (spec.dtype, spec.shape) != (array.dtype, array.shape):
            self.fault = Fault(
                f"expected the stored tensor's shape {list(array.shape)} of {array.dtype}, "
                f"got {list(spec.shape)} of {spec.dtype}"
            )


class Attached(IncomingTensor):
    """A tensor beside the message, in memory that the call owns and may keep.

    That is host memory, or memory of the ops' device if the tensor was copied there from the client's memory.
    """

    is_in_payload = True
    is_own = True

    def __init__(self, field: str, array: Array, payload: Payload) -> None:
        super().__init__(field, array)
        self._payload = payload

    def copied_bytes(self, *, in_place: bool) -> int:
        """Returns the number of bytes to copy if only a part of the payload is in use."""
        return 0 if self._payload.is_filled else int(self.read().nbytes)

    def settle(self, held: HeldTensors | None, *, in_place: bool) -> None:
        """Copies the array if the rest of the payload would stay alive with it, which nobody counts."""
        if not self._payload.is_filled:
            self.array = self.read().copy()


class Live(IncomingTensor):
    """A tensor in host memory of the client."""

    is_in_payload = True

    def __init__(self, field: str, array: NDArray[Any]) -> None:
        super().__init__(field, array, is_live=True)

    def copied_bytes(self, *, in_place: bool) -> int:
        """Returns the number of bytes to copy."""
        return 0 if in_place else int(self.read().nbytes)

    def settle(self, held: HeldTensors | None, *, in_place: bool) -> None:
        """Copies the array unless it is read in place."""
        if not in_place:
            self.array = np.array(self.array)
            self.is_live = False


class LiveOnGpu(IncomingTensor):
    """A tensor in the client's memory on the ops' GPU.

    It is not copied there: only calls that treat elements as nothing but numbers get it.
    """

    is_in_payload = True

    def __init__(self, field: str, array: Array) -> None:
        super().__init__(field, array, is_live=True)
        self.is_on_gpu = True

    def land(self, copy: NDArray[Any]) -> None:
        """Replaces the array by a copy in host memory that the payload's reservation counts."""
        self.array = copy
        self.is_live = self.is_on_gpu = False
        self.is_own = True


def tensors_in(payload: Payload, described: Sequence[tuple[str, TensorSpec, int]]) -> list[IncomingTensor]:
    """Returns the tensors in a payload; each may be malformed.

    Args:
        payload: The payload.
        described: The field of each tensor, its spec, and its first byte in the payload.
    """
    tensors: list[IncomingTensor] = []
    found = payload.take([(spec, offset) for _, spec, offset in described])
    for (field, _, _), taken in zip(described, found, strict=True):
        if isinstance(taken, Fault):
            tensors.append(Malformed(field, fault=taken))
            continue
        array, segment = taken
        if not segment.is_live:
            tensors.append(Attached(field, array, payload))
        else:
            tensors.append(LiveOnGpu(field, array) if segment.on_gpu else Live(field, array))
    return tensors


class IncomingTensors:
    """The tensors of one request, in its order. A `TensorOpener` opens them, once.

    Attributes:
        payload: The payload in which some of them are. The payload's reservation is the call's.
        num_in_payload: The number of those.
        user: The identity that sent the request, which can only refer to stored tensors within its reach.
        stored: Those that are stored on the server.
        held: The stored tensors while they are open; None if there are none.
    """

    def __init__(
        self, tensors: Sequence[IncomingTensor], payload: Payload = NO_PAYLOAD, user: Identity = ANONYMOUS
    ) -> None:
        self.payload = payload
        self.user = user
        self._tensors = tensors
        self.num_in_payload = self._num_live = self._num_on_gpu = 0
        self.stored: list[Stored] = []
        self.held: HeldTensors | None = None
        for each in tensors:
            if each.is_in_payload:
                self.num_in_payload += 1
                self._num_live += each.is_live
                self._num_on_gpu += each.is_on_gpu
            elif isinstance(each, Stored):
                self.stored.append(each)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[IncomingTensor]:
        return iter(self._tensors)

    @property
    def is_partly_on_gpu(self) -> bool:
        """True if some tensors are in the client's memory on the ops' GPU."""
        return self._num_on_gpu > 0

    @property
    def is_one_payload(self) -> bool:
        """True if the tensors fill a payload, so that none of them is copied and each can be used when it arrives."""
        return self.num_in_payload - self._num_live == len(self._tensors) and self.payload.is_filled

    @property
    def lenders(self) -> tuple[Payload, ...]:
        """The payload if some tensors are, or were until they were copied, in the client's memory."""
        return (self.payload,) if self._num_live else ()

    # While they are open

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by field. For very many it takes long.

        Raises:
            InvalidArgumentError: The request describes one of them wrongly.
        """
        return {each.field: each.read() for each in self._tensors}

    @property
    def is_live(self) -> bool:
        """True if the client can change some of the tensors at any time. For very many it takes long."""
        return self._num_live > 0 and True in [each.is_live for each in self._tensors]

    @property
    def exclusive(self) -> bool:
        """True if the call may write to all tensors: no other call can ever see them, and none is used twice.

        For very many it takes long.
        """
        num_own = 0
        for each in self._tensors:
            if each.is_live:
                return False
            num_own += each.is_own
        if num_own and not self.payload.is_filled:
            return False
        if self.held is not None:
            return self.held.exclusive and len(self.stored) == len(self.held.arrays)
        return num_own > 0

    @property
    def memory(self) -> tuple[Reservation, ...]:
        """The reservations of the tensors' memory, for callers that take it over. For very many it takes long."""
        stored = () if self.held is None else self.held.memory
        own = self.payload.memory if True in [each.is_own for each in self._tensors] else None
        return stored if own is None else (*stored, own)

    def share(self) -> None:
        """Notes that the call will use the stored tensors' memory, or that of copies from `relocate`, after it ends.

        So no other call may take it over.
        """
        if self.held is not None:
            self.held.share()

    def relocate(self, arrays: Mapping[str, Array], room: Room) -> None:
        """Replaces stored tensors by private copies.

        Args:
            arrays: The copies by field; those of tensors that are not stored are ignored.
            room: The call's reservation for the copies.
        """
        for each in self.stored:
            if each.field in arrays and self.held is not None:
                self.held.relocate(each.handle, arrays[each.field], room)
                each.array = self.held.arrays[each.handle]

    async def bring_to_host(self, residence: Residence) -> None:
        """Moves all tensors to host memory, for this call and later ones; copies those in the client's memory of a GPU.

        Raises:
            ResourceExhaustedError: There is not enough memory.
            MemoryError: Likewise.
        """
        if self._num_on_gpu:
            on_gpu = [each for each in self._tensors if isinstance(each, LiveOnGpu)]
            for each in on_gpu:
                self.payload.adopt(each.read().nbytes)
            for each, copy in zip(on_gpu, await residence.copy_to_host([each.array for each in on_gpu]), strict=True):
                each.land(copy)
        if self.held is not None:
            await self.held.bring_to_host(residence)

    def settle(self, in_place: Container[str]) -> None:
        """Finds all arrays, in any thread; see `IncomingTensor.settle`."""
        for each in self._tensors:
            each.settle(self.held, in_place=each.field in in_place)

    def settling_work(self, in_place: Container[str]) -> int:
        """Returns how long `settle` takes, in bytes of element-wise work."""
        work = PIECE_BYTES * len(self._tensors)
        if not self.num_in_payload or work > INLINE_BYTES:
            return work
        return work + sum([each.copied_bytes(in_place=each.field in in_place) for each in self._tensors])


class TensorOpener:
    """Opens the tensors of requests."""

    def __init__(self, store: TensorStore, residence: Residence, compute: Compute) -> None:
        """`compute` runs what takes time for very many tensors, and copies."""
        self._store = store
        self._residence = residence
        self._compute = compute

    @asynccontextmanager
    async def open(
        self,
        tensors: IncomingTensors,
        *,
        release: bool = False,
        on_host: bool = False,
        in_place: Container[str] = (),
    ) -> AsyncIterator[IncomingTensors]:
        """Holds the tensors of a request while a call uses them, and renews the leases of stored ones.

        What is in the payload has arrived, unless the tensors are `one_payload`. An InvalidArgumentError of the block
        becomes an AbortedError if the client has left, and may have written to memory that it had lent.

        Args:
            tensors: The tensors.
            release: Whether to delete the stored ones when the block ends without an exception. They are hidden from
                other calls from the start, and reappear after an exception.
            on_host: Whether to move all tensors to host memory, for this call and, if they are stored, for later ones.
            in_place: The fields of tensors that the client may change during the call: each element is read once, and
                only as a number, not as an index, length or count.

        Raises:
            NotFoundError: A stored tensor does not exist.
            ResourceExhaustedError: There is not enough host memory.
            MemoryError: Likewise.
        """
        payload = tensors.payload
        if tensors.num_in_payload:
            payload.begin_use(tensors.num_in_payload)
        try:
            if not tensors.stored:
                await self._settle(tensors, in_place, on_host=on_host)
                yield tensors
                return
            handles, fields = await self._compute.run(PIECE_BYTES * len(tensors), _handles_and_fields, tensors.stored)
            using = self._store.use(handles, release=release, fields=fields, user=tensors.user)
            async with using as tensors.held:
                await self._settle(tensors, in_place, on_host=on_host)
                yield tensors
        except InvalidArgumentError:
            for each in tensors.lenders:
                each.check_lender()  # what is not valid may be what a client that has left has written there
            raise
        finally:
            if tensors.num_in_payload:
                payload.end_use()

    async def copy_to_host(self, tensors: IncomingTensors) -> list[NDArray[Any]]:
        """Returns the arrays of open tensors, in host memory; copies only those that are elsewhere.

        Raises:
            InvalidArgumentError: The request describes one of them wrongly.
            MemoryError: There is not enough memory.
        """
        return await self._residence.copy_to_host([each.read() for each in tensors])

    async def _settle(self, tensors: IncomingTensors, in_place: Container[str], *, on_host: bool) -> None:
        if on_host:
            await tensors.bring_to_host(self._residence)
        await self._compute.run(tensors.settling_work(in_place), tensors.settle, in_place)


def _handles_and_fields(stored: Sequence[Stored]) -> tuple[list[str], list[str]]:
    return [each.handle for each in stored], [f"{each.field}.handle" for each in stored]
