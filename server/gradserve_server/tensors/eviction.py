"""Makes room in the memory of a device: stored tensors that nobody uses move to the host."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from gradserve_server.devices.failures import DeviceFullError
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.memory import DeviceMemory, Memories, Purpose, Room, Sizes
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.security.identity import ANONYMOUS, Identity, owner_named
from gradserve_server.tensors.held import Entry, move
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.store import TensorStore

T = TypeVar("T")

_ATTEMPTS = 4
"""How often work is begun for which the device has no memory."""
_MOVED_AT_ONCE = 1024
"""Tensors that are chosen in one turn of the event loop."""


@dataclass(frozen=True)
class _Victim:
    """A tensor that is going to move.

    Attributes:
        entry: The tensor.
        room: Where the memory of its copy on the host is reserved.
    """

    entry: Entry
    room: Room


class Evictor:
    """Lets calls take memory of the device, and moves tensors to the host where it does not suffice.

    First go the tensors of those who hold more than what is reserved for each, and of the caller; and among them the
    ones that were not used for the longest. Those of others go only for who will not hold more than that share.

    Attributes:
        device: The memory.
        num_evicted: How many tensors have moved.
        evicted_bytes: Their bytes.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, store: TensorStore, host: Quota, device: DeviceMemory, residence: Residence) -> None:
        """Takes the store, the memory of the host and of the device, and what copies tensors to the host."""
        self.device = device
        self._memories = Memories(host, device, Purpose.STORED)
        self._store = store
        self._residence = residence
        self._evicting = asyncio.Lock()
        self.num_evicted = 0
        self.evicted_bytes = 0

    async def grow(self, account: Account, amount: int, owner: Identity = ANONYMOUS) -> None:
        """Takes memory of the device, and makes room for it if necessary.

        Args:
            account: An account of the device's memory.
            amount: The bytes that it takes more.
            owner: Whose account it is.

        Raises:
            ResourceExhaustedError: There is not enough, even if everything moves that can; nothing was taken.
        """
        try:
            account.grow(amount)
        except ResourceExhaustedError:
            async with self._evicting:
                await self._grow(account, amount, owner)

    async def spare(self, amount: int, owner: Identity = ANONYMOUS) -> bool:
        """Moves tensors with up to so many bytes to the host, though the quota would do; returns False if none can.

        For memory that the device does not have, or not in one piece.
        """
        async with self._evicting:
            idle = self._store.idle
            amount = min(amount, sum(map(idle.num_bytes, idle.owners)))
            return await self._evict(owner, 0, amount, is_within_share=self._is_within_share(owner, 0))

    async def attempt(self, work: Callable[[], Awaitable[T]], amount: int, owner: Identity = ANONYMOUS) -> T:
        """Does work on the device; again after moving tensors to the host, if the device has no memory for it.

        So a call gets what it has reserved, although memory is in pieces, or other processes use the device.

        Args:
            work: The work, which raises DeviceFullError and can begin again.
            amount: The bytes that it takes.
            owner: Who does it.

        Raises:
            ResourceExhaustedError: That did not help.
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
        quota = self.device.quota
        return ResourceExhaustedError(
            f"the memory of the device does not suffice: {amount} bytes asked for, {quota.used} in use, {quota.limit} "
            f"allowed (--max-device-bytes); {why}"
        )

    async def _grow(self, account: Account, amount: int, owner: Identity) -> None:
        while True:
            try:
                return account.grow(amount)
            except ResourceExhaustedError:
                own, all_in_all = self.device.quota.missing(owner, amount)
                is_within_share = self._is_within_share(owner, amount)
                if not await self._evict(owner, own, all_in_all, is_within_share=is_within_share):
                    raise

    def _is_within_share(self, owner: Identity, amount: int) -> bool:
        quota = self.device.quota
        return quota.identities.held_by(owner.name) + amount <= quota.reserve

    async def _evict(self, owner: Identity, own: int, amount: int, *, is_within_share: bool) -> bool:
        """Moves tensors to the host: `own` bytes of a caller, and `amount` bytes in all; returns False if it cannot.

        If a tensor is used meanwhile, it stays, and another has to be chosen.
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
                move(entry, copy, self._memories, victim.room)
                entry.shared = False

    def _choose(self, owner: str, own: int, amount: int, *, is_within_share: bool) -> list[_Victim]:
        """Returns what is to move, with memory reserved for it on the host; nothing if it would not do."""
        quota, idle = self.device.quota, self._store.idle
        over = {each for each in idle.owners if not each or quota.identities.held_by(each) > quota.reserve}
        others = set(idle.owners) if is_within_share else set()
        if sum(map(idle.num_bytes, over | others | {owner})) < amount or idle.num_bytes(owner) < own:
            return []
        chosen = _Chosen(self._memories)
        chosen.add(idle.oldest({owner}), own)
        floor = {each: quota.identities.held_by(each) - quota.reserve for each in over if each and each != owner}
        chosen.add(idle.oldest(over | {owner}), amount, floor)
        chosen.add(idle.oldest(others), amount)
        return chosen.victims(amount)


class _Chosen:
    """The tensors that are to move."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self._victims: dict[Entry, _Victim] = {}
        self._full: set[str] = set()
        self._given: dict[str, int] = {}
        self._num_bytes = 0

    def add(self, entries: Iterable[Entry], wanted: int, most: Mapping[str, int] = MappingProxyType({})) -> None:
        """Adds tensors until all have `wanted` bytes, as far as there is memory for them on the host.

        Args:
            entries: The tensors.
            wanted: The bytes.
            most: What owners should give at most.
        """
        for entry in entries:
            if self._num_bytes >= wanted or len(self._victims) == _MOVED_AT_ONCE:
                return
            given = self._given.get(entry.owner, 0)
            if entry in self._victims or entry.owner in self._full or given >= most.get(entry.owner, given + 1):
                continue
            room = self._memories.room(owner_named(entry.owner))
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
