"""Delivers results to the places that requests ask for."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self, TypeAlias

from gradserve_server.devices.device import Array
from gradserve_server.errors import ResourceExhaustedError, request_fields
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.memory import DeviceMemory, Memories, Room
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.references import Inline, Stored
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.spec import TensorSpec
from gradserve_server.tensors.store import TensorStore

_DELIVERED_AT_ONCE = 1024
"""Results that are delivered before other work gets its turn."""


class PlacementMode(Enum):
    """The way in which the tensors of a reply travel."""

    INLINE = "INLINE"
    """All tensors are in the reply."""
    KEEP = "KEEP"
    """All tensors stay on the server, and the reply has their handles."""
    AUTO = "AUTO"
    """Small tensors are in the reply; otherwise it has their handles."""
    ATTACHED = "ATTACHED"
    """All tensors travel with the reply, whatever their size."""


@dataclass(frozen=True)
class Placement:
    """The place where a request wants the tensors of its reply.

    Attributes:
        lease: The lease of the handles, in seconds; None for the default.
        owner: The identity that owns the handles.
    """

    mode: PlacementMode = PlacementMode.INLINE
    lease: float | None = None
    owner: Identity = ANONYMOUS


Delivered: TypeAlias = Inline | Stored
"""A result: an array for the reply, or a stored tensor with its spec."""


@dataclass(frozen=True)
class DeliveryLimits:
    """Limits for inline results, in bytes.

    Attributes:
        small: The most bytes inline with `PlacementMode.AUTO`.
        message: The most bytes inline in any mode.
    """

    small: int
    message: int


class Delivery:
    """The results of one call. If the block fails, none of them stays on the server.

    Attributes:
        room: Memory that the call has reserved for results. Stored results take it over; the rest is freed at the end.
    """

    def __init__(
        self, placement: Placement, limits: DeliveryLimits, store: TensorStore, residence: Residence, room: Room
    ) -> None:
        self.room = room
        self._placement = placement
        self._limits = limits
        self._store = store
        self._residence = residence
        self._keeps: bool | None = None
        self._handles: list[str] = []

    @property
    def is_attached(self) -> bool:
        """True if tensors can travel beside the reply."""
        return self._placement.mode is PlacementMode.ATTACHED

    def keeps(self, num_bytes: int) -> bool:
        """Returns True if results stay on the server. The first size, which may be an upper bound, decides for all.

        Raises:
            ResourceExhaustedError: They must come inline and are too large for that.
        """
        if self._keeps is None:
            mode = self._placement.mode
            is_small = num_bytes <= self._limits.small
            self._keeps = mode is PlacementMode.KEEP or (mode is PlacementMode.AUTO and not is_small)
            is_attached = mode is PlacementMode.ATTACHED
            if not self._keeps and not is_attached and num_bytes > self._limits.message:
                raise ResourceExhaustedError(
                    f"the result has {num_bytes} bytes, but at most {self._limits.message} come inline; "
                    "ask for placement MODE_KEEP or MODE_AUTO",
                    field="placement.mode",
                )
        return self._keeps

    def deliver(self, arrays: Sequence[Array], *, shared: bool) -> list[Delivered]:
        """Delivers arrays; returns the place of each.

        Args:
            arrays: The arrays, in host memory unless they stay on the server.
            shared: Whether their memory is also referenced elsewhere.

        Raises:
            ResourceExhaustedError: They must be kept and do not fit, or come inline and are too large for that.
        """
        if not self.keeps(sum(array.nbytes for array in arrays)):
            return [Inline(array) for array in arrays]
        place = self._placement
        handles = self._store.keep(arrays, place.lease, shared=shared, room=self.room, owner=place.owner)
        self._handles += handles
        return [
            Stored(handle, TensorSpec(array.dtype, array.shape)) for handle, array in zip(handles, arrays, strict=True)
        ]

    async def deliver_many(self, arrays: Sequence[Array], *, shared: bool) -> list[Delivered]:
        """Delivers any number of arrays, in several turns of the event loop; see `deliver`.

        Raises:
            ResourceExhaustedError: See `deliver`.
        """
        if not self.keeps(sum([array.nbytes for array in arrays])):
            return await self._in_turns(map(Inline, arrays))
        place = self._placement
        handles = await self._store.keep_many(arrays, place.lease, shared=shared, room=self.room, owner=place.owner)
        self._handles += handles
        return await self._in_turns(
            Stored(handle, TensorSpec(array.dtype, array.shape)) for handle, array in zip(handles, arrays, strict=True)
        )

    async def _in_turns(self, results: Iterable[Delivered]) -> list[Delivered]:
        delivered: list[Delivered] = []
        for each in results:
            delivered.append(each)
            if len(delivered) % _DELIVERED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return delivered

    def deliver_named(self, arrays: Mapping[str, Array], *, shared: bool = False) -> dict[str, Delivered]:
        """Delivers arrays by name; returns the place of each. See `deliver`.

        Raises:
            ResourceExhaustedError: See `deliver`.
        """
        return dict(zip(arrays, self.deliver(list(arrays.values()), shared=shared), strict=True))

    async def deliver_from_anywhere(self, arrays: Sequence[Array], *, shared: bool) -> list[Delivered]:
        """Delivers arrays after copying them to the host, unless they stay on the server; returns the place of each.

        Raises:
            ResourceExhaustedError: See `deliver`.
            MemoryError: There is not enough memory on the host.
        """
        if not self.keeps(sum(array.nbytes for array in arrays)):
            arrays = await self._residence.copy_to_host(arrays)
        return self.deliver(arrays, shared=shared)

    def __enter__(self) -> Self:
        """Returns the delivery."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Deletes stored results after an error; frees the rest of the reserved memory."""
        if error is not None:
            self._store.delete(self._handles)
        self.room.settle()


class TensorDeliverer:
    """Delivers the results of calls."""

    def __init__(
        self,
        store: TensorStore,
        residence: Residence,
        memory: Budget,
        limits: DeliveryLimits,
        device: DeviceMemory | None = None,
    ) -> None:
        self._store = store
        self._residence = residence
        self._memories = Memories(memory, device)
        self._limits = limits

    def begin(self, placement: Placement) -> Delivery:
        """Checks a placement; returns a context manager that delivers results to it.

        Raises:
            InvalidArgumentError: The lease is not positive.
        """
        if placement.lease is not None:
            with request_fields({"lease": "placement.lease"}):
                self._store.lease_seconds(placement.lease)
        return Delivery(
            placement, self._limits, self._store, self._residence, self._memories.room_of_call(placement.owner)
        )
