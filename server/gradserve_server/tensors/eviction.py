"""Makes room in the memory of a device: stored tensors that nobody uses move to the host."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from gradserve_server.devices.device import DeviceFullError
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Purpose, Reservation
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.security.identity import ANONYMOUS, Identity, owner_named
from gradserve_server.tensors.held import Entry, Residence, move
from gradserve_server.tensors.store import TensorStore

T = TypeVar("T")

_ATTEMPTS = 4
"""Attempts at work for which the device has no memory."""
_MOVED_AT_ONCE = 1024
"""Tensors that are chosen in one turn of the event loop."""


@dataclass(frozen=True)
class _Victim:
    """A tensor to evict.

    Attributes:
        entry: The tensor.
        room: The reservation for its copy on the host.
    """

    entry: Entry
    room: Room


class Evictor:
    """Reserves device memory for calls, and evicts tensors to the host if there is not enough.

    The caller's tensors, and those of identities above their reserved share, go first, least recently used first.
    Tensors of other identities go only if the caller stays within its own reserved share.

    Attributes:
        device: The budget of bytes of device memory.
        num_evicted: The number of evicted tensors.
        evicted_bytes: The bytes of evicted tensors.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, store: TensorStore, memory: Memory, residence: Residence) -> None:
        assert memory.device is not None, "only a device has something to evict"
        self.device = memory.device
        self._memory = memory
        self._store = store
        self._residence = residence
        self._evicting = asyncio.Lock()
        self.num_evicted = 0
        self.evicted_bytes = 0

    async def grow(self, reservation: Reservation, amount: int, owner: Identity = ANONYMOUS) -> None:
        """Grows a reservation of device memory, evicting tensors if necessary.

        Args:
            reservation: A reservation of device memory.
            amount: The additional bytes.
            owner: The owner of the reservation.

        Raises:
            ResourceExhaustedError: There is not enough, even after evicting everything that can be; nothing was taken.
        """
        try:
            reservation.grow(amount)
        except ResourceExhaustedError:
            async with self._evicting:
                await self._grow(reservation, amount, owner)

    async def spare(self, amount: int, owner: Identity = ANONYMOUS) -> bool:
        """Evicts tensors of up to that many bytes although the budget suffices; returns False if none can go.

        For when the device itself has less free memory, or has it in fragments.
        """
        async with self._evicting:
            idle = self._store.idle
            amount = min(amount, sum(map(idle.num_bytes, idle.owners)))
            return await self._evict(owner, 0, amount, is_within_share=self._is_within_share(owner, 0))

    async def attempt(self, work: Callable[[], Awaitable[T]], amount: int, owner: Identity = ANONYMOUS) -> T:
        """Does work on the device, and retries it after evicting tensors if the device has no memory for it.

        So a call gets what it has reserved even if memory is fragmented, or other processes use the device.

        Args:
            work: The work, which raises DeviceFullError and can be repeated.
            amount: The bytes that it needs.
            owner: The identity that it is for.

        Raises:
            ResourceExhaustedError: There is not enough memory even then.
        """
        wanted, why = amount, ""
        for left in reversed(range(_ATTEMPTS)):
            try:
                return await work()
            except DeviceFullError as error:
                why = str(error)
            if not left or not await self.spare(wanted, owner):
                break
            wanted *= 2  # so much was not enough, as it was in pieces, or others have taken it
        raise self._refusal(amount, why)

    def _refusal(self, amount: int, why: str) -> ResourceExhaustedError:
        budget = self.device
        return ResourceExhaustedError(
            f"the memory of the device does not suffice: {amount} bytes asked for, {budget.used} in use, "
            f"{budget.limit} allowed (--max-device-bytes); {why}",
            code="GS_DEVICE_MEMORY",
        )

    async def _grow(self, reservation: Reservation, amount: int, owner: Identity) -> None:
        while True:
            try:
                return reservation.grow(amount)
            except ResourceExhaustedError:
                own, all_in_all = self.device.missing(owner, amount)
                is_within_share = self._is_within_share(owner, amount)
                if not await self._evict(owner, own, all_in_all, is_within_share=is_within_share):
                    raise

    def _is_within_share(self, owner: Identity, amount: int) -> bool:
        budget = self.device
        return budget.held_by(owner.name) + amount <= budget.reserved

    async def _evict(self, owner: Identity, own: int, amount: int, *, is_within_share: bool) -> bool:
        """Evicts `own` bytes of a caller's tensors, and `amount` bytes in total; returns False if it cannot.

        A tensor that a call begins to use in the meantime stays, and another is chosen.
        """
        victims = self._choose(owner.name, own, amount, is_within_share=is_within_share)
        for victim in victims:
            self._store.begin_hold(victim.entry)
        try:
            await self._move(victims)
        finally:
            for victim in victims:
                self._store.end_hold(victim.entry)
                victim.room.settle()
        return bool(victims)

    async def _move(self, victims: Sequence[_Victim]) -> None:
        arrays = [victim.entry.array for victim in victims]
        copies = await self._residence.copy_to_host(arrays)
        for victim, array, copy in zip(victims, arrays, copies, strict=True):
            entry = victim.entry
            # Who uses it now uses it where it was.
            if entry.users == 1 and not entry.deleted and entry.array is array:
                self.num_evicted += 1
                self.evicted_bytes += copy.nbytes
                move(entry, copy, self._memory, victim.room)
                entry.shared = False

    def _choose(self, owner: str, own: int, amount: int, *, is_within_share: bool) -> list[_Victim]:
        """Chooses tensors, and reserves host memory for them; returns none if they would not suffice."""
        budget, idle = self.device, self._store.idle
        over = {each for each in idle.owners if not each or budget.held_by(each) > budget.reserved}
        others = set(idle.owners) if is_within_share else set()
        if sum(map(idle.num_bytes, over | others | {owner})) < amount or idle.num_bytes(owner) < own:
            return []
        chosen = _Chosen(self._memory)
        chosen.add(idle.oldest({owner}), own)
        floor = {each: budget.held_by(each) - budget.reserved for each in over if each and each != owner}
        chosen.add(idle.oldest(over | {owner}), amount, floor)
        chosen.add(idle.oldest(others), amount)
        return chosen.victims(amount)


class _Chosen:
    """The tensors chosen for eviction."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._victims: dict[Entry, _Victim] = {}
        self._full: set[str] = set()
        self._given: dict[str, int] = {}
        self._num_bytes = 0

    def add(self, entries: Iterable[Entry], wanted: int, most: Mapping[str, int] = MappingProxyType({})) -> None:
        """Adds tensors until they have `wanted` bytes in total, while the host has memory for them.

        Args:
            entries: The tensors.
            wanted: The bytes.
            most: The most bytes of each owner.
        """
        for entry in entries:
            if self._num_bytes >= wanted or len(self._victims) == _MOVED_AT_ONCE:
                return
            given = self._given.get(entry.owner, 0)
            if entry in self._victims or entry.owner in self._full or given >= most.get(entry.owner, given + 1):
                continue
            room = self._memory.room(Purpose.STORED, owner_named(entry.owner))
            try:
                room.grow(Sizes(entry.array.nbytes))
            except ResourceExhaustedError:
                self._full.add(entry.owner)
                continue
            self._victims[entry] = _Victim(entry, room)
            self._given[entry.owner] = given + entry.array.nbytes
            self._num_bytes += entry.array.nbytes

    def victims(self, wanted: int) -> list[_Victim]:
        """Returns them; none if they have less than `wanted` bytes and are not too many for a turn."""
        if self._num_bytes < wanted and len(self._victims) < _MOVED_AT_ONCE:
            for victim in self._victims.values():
                victim.room.settle()
            return []
        return list(self._victims.values())
