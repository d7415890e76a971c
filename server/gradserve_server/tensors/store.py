"""Stores tensors under leased handles."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.config import LeaseConfig
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.limits import quoted
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.resources.lifetimes import LeaseQueue
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.runtime.event_loop import InTurns, Turn
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.held import Entry, HeldTensors, IdleTensors, Receipt, Receipts, Serials
from gradserve_server.tensors.spec import TensorSpec, num_bytes_of

Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]


def _never(_handle: str) -> bool:
    return False


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor in a list.

    Attributes:
        serial: A number that grows with every stored tensor, and orders lists.
        lease_remaining: Seconds until it is deleted if it is not used.
    """

    handle: str
    serial: int
    spec: TensorSpec
    lease_remaining: float


@dataclass(slots=True)
class _Places:
    """Reservations for tensors of one identity that are not stored yet.

    Attributes:
        room: The reserved bytes.
        handles: The reserved handles.
    """

    room: Room
    handles: Reservation


@dataclass(eq=False)
class Upload:
    """Tensors being received: their memory is reserved, but they are not visible yet."""

    specs: Sequence[TensorSpec]
    lease: float
    places: _Places
    allocate: Allocate
    receipt: bytes = b""

    @property
    def owner(self) -> Identity:
        """The owner of the tensors."""
        return self.places.room.owner

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the tensors, allocated on first access, in any thread."""
        return tuple([self.allocate(spec.shape, spec.dtype) for spec in self.specs])


class TensorStore:
    """Stored tensors under leased handles, within budgets of bytes and handles.

    Attributes:
        idle: The unused tensors on the device.
        receipts: The tensors whose clients can delete them before they know the handles.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        *,
        pool: BufferPool,
        memory: Memory,
        handles: Budget,
        leases: LeaseConfig,
        clock: Callable[[], float],
        new_handle: Callable[[], str],
        is_of_another_run: Callable[[str], bool] = _never,
    ) -> None:
        """Takes the limits and the other parts.

        Args:
            pool: The memory of uploads.
            memory: The memory of the server.
            handles: The budget of handles.
            leases: The lengths of leases.
            clock: A monotonic clock, in seconds.
            new_handle: A source of unguessable handles.
            is_of_another_run: Returns whether a handle is of an earlier run of the server.
        """
        self._is_of_another_run = is_of_another_run
        self._pool = pool
        self._memory = memory
        self._handles = handles
        self._leases = leases
        self._clock = clock
        self._queue: LeaseQueue[str] = LeaseQueue(clock)
        self._new_handle = new_handle
        self._entries: dict[str, Entry] = {}
        # Those that nobody finds, as a call deletes them at its end; unless it fails.
        self._being_released: dict[str, Entry] = {}
        self._by_serial: Serials[Entry] = Serials()
        # Also by the owner, where there are several.
        self._of_owner: dict[str, Serials[Entry]] = {}
        self._serials = itertools.count(1)
        self.idle = IdleTensors()
        self.receipts = Receipts(self.delete)

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def receive(
        self,
        specs: Sequence[TensorSpec],
        lease: float | None,
        *,
        owner: Identity = ANONYMOUS,
        allocate: Allocate | None = None,
        given: Room | None = None,
        receipt: bytes = b"",
    ) -> Iterator[Upload]:
        """Reserves memory for arriving tensors; frees it at the end of the block unless `store` stored them.

        Args:
            specs: The specs of the tensors.
            lease: The lease in seconds, None for the default.
            owner: The owner of the tensors.
            allocate: Allocates their memory; None for host memory.
            given: Device memory reserved for them; None if they go to host memory.
            receipt: Their owner's name for them.

        Raises:
            InvalidArgumentError: `lease` is not positive.
            ResourceExhaustedError: They do not fit.
        """
        seconds = self.lease_seconds(lease)
        num_bytes = num_bytes_of(specs)
        sizes = Sizes(num_bytes) if given is None else Sizes(0, num_bytes)
        with self._reserved(owner, len(specs), sizes, given) as places:
            yield Upload(specs, seconds, places, allocate or self._pool.empty, receipt)

    @contextmanager
    def _reserved(
        self, owner: Identity, num_handles: int, sizes: Sizes, given: Room | None = None
    ) -> Iterator[_Places]:
        """Reserves memory and handles for a block, and frees at its end what no tensor has taken.

        Args:
            owner: The owner of the tensors.
            num_handles: The number of tensors.
            sizes: The bytes of the tensors.
            given: Memory that is reserved for them already.

        Raises:
            ResourceExhaustedError: They do not fit, or would be too much for their owner.
        """
        with (
            self._handles.reserve(num_handles, owner=owner) as handles,
            self._memory.room(Purpose.STORED, owner) as room,
        ):
            if given is None:
                room.grow(sizes)
            else:
                room.take_over(sizes, given)
            yield _Places(room, handles)

    async def store(self, upload: Upload, freed: Callable[[], None] | None = None) -> list[str]:
        """Makes the tensors of an upload visible, in several turns if they are many; returns their handles.

        Args:
            upload: The upload.
            freed: Called for each tensor when it is freed.
        """
        return await self._add_in_turns(
            upload.arrays, upload.lease, upload.places, upload.receipt, shared=False, freed=freed
        )

    async def _add_in_turns(
        self,
        arrays: Sequence[Array],
        lease: float,
        places: _Places,
        receipt: bytes,
        *,
        shared: bool,
        freed: Callable[[], None] | None = None,
    ) -> list[str]:
        handles: list[str] = []
        try:
            async for array in InTurns(arrays):
                handles.append(  # noqa: PERF401 - deleted after an error
                    self._add(array, lease, places, receipt, shared=shared, freed=freed)
                )
        except BaseException:
            self.delete(handles)
            raise
        return handles

    async def keep(
        self,
        arrays: Sequence[Array],
        lease: float | None,
        *,
        shared: bool,
        room: Room | None = None,
        owner: Identity = ANONYMOUS,
        receipt: bytes = b"",
    ) -> list[str]:
        """Stores any number of results without copying them, in turns of the event loop; returns their handles.

        Args:
            arrays: The results.
            lease: The lease in seconds, None for the default.
            shared: Whether their memory is referenced from outside the store.
            room: Memory reserved for them; the store takes it over.
            owner: The owner of the tensors.
            receipt: Their owner's name for them.

        Raises:
            InvalidArgumentError: `lease` is not positive.
            ResourceExhaustedError: They do not fit.
        """
        seconds = self.lease_seconds(lease)
        with self._reserved(owner, len(arrays), self._memory.sizes(arrays), room) as reserved:
            return await self._add_in_turns(arrays, seconds, reserved, receipt, shared=shared)

    def lease_seconds(self, lease: float | None) -> float:
        """Returns the lease in seconds; the default for None.

        Raises:
            InvalidArgumentError: `lease` is not positive.
        """
        if lease is None:
            return self._leases.default_lease_seconds
        if lease <= 0:
            raise InvalidArgumentError(f"expected a positive lease, got {lease:g} s", field="lease")
        return min(lease, self._leases.max_lease_seconds)

    @asynccontextmanager
    async def use(
        self,
        handles: Sequence[str],
        *,
        release: bool = False,
        fields: Sequence[str] | None = None,
        user: Identity = ANONYMOUS,
    ) -> AsyncIterator[HeldTensors]:
        """Holds stored tensors while a call uses them, and renews their leases; very many in several turns of the loop.

        Other calls can find tensors that are not hidden yet. If one of them deletes such a tensor, this call fails, and
        the tensors it has hidden reappear.

        Args:
            handles: The handles of the tensors; one may occur twice.
            release: Whether to delete them when the block ends without an exception. They are hidden from other calls
                from the start, and reappear after an exception.
            fields: The paths of the handles in the request, for errors; None for "handles[0]" and so on.
            user: The caller.

        Raises:
            NotFoundError: One of them does not exist, or is out of the caller's reach.
        """
        entries: list[Entry] = []
        held = HeldTensors(self._memory, release=release)
        keep = True
        try:
            async for index, handle in InTurns(enumerate(handles)):
                if handle not in held.arrays:
                    entry = self._find(handle, index, fields, user)
                    entries.append(entry)
                    self._begin_use(entry, held, release=release)
            yield held
            keep = not release
        finally:
            await self._end_uses(entries[::-1], keep=keep, release=release)

    async def _end_uses(self, entries: list[Entry], *, keep: bool, release: bool) -> None:
        """Ends the uses of entries, the last one first."""
        turn = Turn()
        try:
            while entries:
                await turn.spend()
                self._end_use(entries.pop(), keep=keep, release=release)
        finally:
            while entries:  # if it was cancelled
                self._end_use(entries.pop(), keep=keep, release=release)

    def _find(self, handle: str, index: int, fields: Sequence[str] | None, user: Identity) -> Entry:
        entry = self._entries.get(handle)
        if entry is None or not user.reaches(entry.owner):
            field = f"handles[{index}]" if fields is None else fields[index]
            why = ": the server was started again since, and stored tensors end with it"
            lost = why if self._is_of_another_run(handle) else ""
            raise NotFoundError(f"no tensor with the handle {quoted(handle)}{lost}", field=field, code="GS_NO_TENSOR")
        return entry

    def _begin_use(self, entry: Entry, held: HeldTensors, *, release: bool) -> None:
        self.begin_hold(entry)
        entry.lease.begin_use()
        if release:
            self._hide(entry)
            self._being_released[entry.handle] = entry
        held.add(entry)

    def _end_use(self, entry: Entry, *, keep: bool, release: bool) -> None:
        entry.lease.end_use()
        if release and self._being_released.pop(entry.handle, None) is not None and keep:
            self._show(entry)
        entry.deleted = entry.deleted or not keep
        self.end_hold(entry)

    def begin_hold(self, entry: Entry) -> None:
        """Keeps an existing tensor until `end_hold`, even if it is deleted. Its lease goes on."""
        entry.users += 1
        self.idle.discard(entry)

    def end_hold(self, entry: Entry) -> None:
        """Ends what `begin_hold` began."""
        entry.users -= 1
        self._rest(entry)

    def delete(self, handles: Sequence[str], *, user: Identity = ANONYMOUS) -> int:
        """Deletes the tensors that exist and that the caller reaches, after their last use; returns their number."""
        count = 0
        for handle in handles:
            entry = self._entries.get(handle) or self._being_released.get(handle)
            if entry is not None and user.reaches(entry.owner):
                if self._being_released.pop(handle, None) is None:
                    self._hide(entry)
                entry.deleted = True
                self._rest(entry)
                count += 1
        return count

    def page(self, after_serial: int, size: int, *, user: Identity = ANONYMOUS) -> list[StoredTensor]:
        """Returns up to `size` tensors that the caller reaches, after the one with `after_serial`, oldest first."""
        now = self._clock()
        found = self._by_serial if user.reaches_all else self._of_owner.get(user.name, Serials())
        return [
            StoredTensor(
                entry.handle,
                entry.serial,
                TensorSpec(entry.array.dtype, entry.array.shape),
                max(entry.lease.end(now) - now, 0.0),
            )
            for entry in found.after(after_serial, size)
        ]

    def expire(self, turn: Turn) -> int:
        """Deletes unused tensors whose leases have ended, in one turn; returns the number."""
        count = 0
        while (lease := self._queue.pop(turn)) is not None:
            count += self.delete([lease.item])
        return count

    def _add(
        self,
        array: Array,
        lease: float,
        places: _Places,
        receipt: bytes,
        *,
        shared: bool,
        freed: Callable[[], None] | None,
    ) -> str:
        handle = self._new_handle()
        begun = self._queue.begin(handle, lease)
        room = places.room
        memory = (room.device if self._memory.is_on_device(array) else room.host).split(array.nbytes)
        place = places.handles.split(1)
        entry = Entry(handle, next(self._serials), array, begun, memory, place, shared, room.owner.name, freed)
        self._show(entry)
        self._rest(entry)
        if receipt:
            self.receipts.sign(Receipt(room.owner.name, receipt), handle)
        return handle

    def _show(self, entry: Entry) -> None:
        """Makes a tensor visible."""
        self._entries[entry.handle] = entry
        self._by_serial.add(entry.serial, entry)
        if entry.owner:
            self._of_owner.setdefault(entry.owner, Serials()).add(entry.serial, entry)

    def _hide(self, entry: Entry) -> None:
        """Hides a tensor, so that no other call finds it."""
        del self._entries[entry.handle]
        self._by_serial.remove(entry.serial)
        if entry.owner:
            self._of_owner[entry.owner].remove(entry.serial)

    def _rest(self, entry: Entry) -> None:
        """If a tensor is unused now, frees it if it was deleted, or lets it be evicted."""
        if entry.users:
            return
        if entry.deleted:
            self.idle.discard(entry)
            self._queue.cancel(entry.lease)
            self.receipts.forget(entry.handle)
            entry.memory.settle(0)
            entry.place.settle(0)
            freed, entry.freed = entry.freed, None
            if freed is not None:
                freed()
        elif self._memory.is_on_device(entry.array):
            self.idle.add(entry)
