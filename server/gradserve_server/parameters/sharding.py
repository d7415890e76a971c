"""Parameters on several servers: a follower makes one server's shard of each version, by the rounds that the home ends.

The home is like other parameters, but for its updates: they are staged on all servers before the home counts them, and
with each version it says which updates made it, and how (`DecidedRound`). Every other server has a follower. It replays
these rounds in order, each once, so the same optimizer takes the same steps there, on other rows. The servers do not
talk to each other: clients carry rounds to followers. docs/concepts/sharding.md has the protocol.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

import numpy as np

from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.rounds import Members, Outcome
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.accumulators.waits import Waiter
from gradserve_server.errors import AbortedError
from gradserve_server.parameters.changes import Changer, Changes, Machine
from gradserve_server.parameters.ledger import UpdateAnswered
from gradserve_server.parameters.queue import UpdateQueue
from gradserve_server.parameters.record import DecidedRound
from gradserve_server.parameters.variables import Loaded
from gradserve_server.parameters.versions import Versions
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import InTurns, Turn

DECIDED_FIELD = "decided"
"""The field of the error of a server that lacks rounds before those of a request."""
_ADDITION = 8
"""The items of the event loop's turn that an addition counts as."""
_MOST_HELD = 2
"""The most values that are held until they are loaded: of callers that have ended, the home never hears."""


class FollowingQueue(UpdateQueue):
    """The calls that wait for a version of a follower, whose rounds do not end by themselves."""

    def head(self, members: Members) -> Waiter | None:
        """Returns None: the home ends rounds."""
        return None


class Follower:
    """Makes the versions of one server's shard, by the rounds that the home has ended. Within changes only."""

    def __init__(self, name: str, incarnation: str, machine: Machine, changer: Changer, shard: Shard) -> None:
        self._name = name
        self._incarnation = incarnation
        self._parts = machine
        self._changer = changer
        self._shard = shard
        self._changes, self._ledger = machine.changes, machine.ledger
        self._versions = cast(Versions, machine.changes.averages)
        self._held: dict[str, tuple[Loaded, Reservation]] = {}

    async def hold(self, load_id: str, loaded: Loaded) -> None:
        """Holds a copy of values until the home has decided that they are loaded.

        Raises:
            InvalidArgumentError: They do not fit.
            ResourceExhaustedError: There is no memory for them.
        """
        variables = self._parts.variables
        optimizer = self._ledger.next_rules.optimizer if loaded.state is None else loaded.state.optimizer
        await self._changer.attempt(variables.check_loaded, loaded, optimizer)
        num_bytes = variables.spec.version_bytes + (0 if loaded.state is None else variables.state_bytes(optimizer))
        while len(self._held) >= _MOST_HELD:
            self._release(next(iter(self._held)))
        memory = self._parts.memory.another()
        memory.grow(num_bytes)
        try:
            copied = await self._changer.attempt(_copy_of, loaded)
        except BaseException:
            memory.settle(0)
            raise
        self._release(load_id)
        self._held[load_id] = copied, memory

    async def follow(self, rounds: Sequence[DecidedRound]) -> None:
        """Makes the versions of rounds that come after the newest version, the oldest first.

        Raises:
            AbortedError: There are rounds between the newest version and the first of these; or an update or values
                that one of them needs are not here. The versions before it are made.
            ResourceExhaustedError: There is no memory or disk for a version; likewise.
        """
        later = [each for each in rounds if each.step > self._step]
        for place, each in reversed(list(enumerate(later))):
            if each.loaded in self._held:  # what came before it is replaced by it
                later = later[place:]
                break
        for each in later:
            if each.loaded:
                await self._load(each)
            else:
                await self._take_step(each)
        if rounds:
            await self._shard.forget_older(self._step - self._parts.spec.staleness.max)
            self._versions.drop_before(rounds[-1].oldest_version)

    def close(self) -> None:
        """Gives back the memory of held values."""
        for load_id in list(self._held):
            self._release(load_id)

    @property
    def _step(self) -> int:
        return self._ledger.rounds.global_step

    async def _load(self, decided: DecidedRound) -> None:
        if decided.loaded not in self._held:
            raise AbortedError(
                f"the values that were loaded into parameters {self._name!r} as step {decided.step} are not on this "
                "server: load them again",
                field=f"{DECIDED_FIELD}.part_ids",
            )
        loaded, _ = self._held[decided.loaded]
        changes = Changes(decided.optimizer, decided.schedule, loaded=loaded, step=decided.step)
        await self._changer.change(None, changes)
        self._release(decided.loaded)

    async def _take_step(self, decided: DecidedRound) -> None:
        if decided.step != self._step + 1:
            raise AbortedError(
                f"this server has parameters {self._name!r} at step {self._step}, and got a round that led to step "
                f"{decided.step}: the rounds in between come first",
                field=DECIDED_FIELD,
            )
        keys = [PartKey(self._incarnation, part_id) for part_id in decided.part_ids]
        if not self._ledger.updates:  # otherwise they have been added, and there was no room for the version
            sums = self._shard.sums_of(keys)
            await self._changer.change(None, Changes(decided.optimizer, decided.schedule))
            await self._add(sums, decided)
        queue = self._parts.queue
        await self._changes.end_round(queue.end_of_round())
        with suppress(AbortedError):  # deleted in the meantime
            await self._shard.withdraw(keys)

    async def _add(self, sums: Sequence[RoundSum], decided: DecidedRound) -> None:
        ledger, total = self._ledger, self._changes.sum
        members = list(zip(sums, decided.contributions, strict=True))
        try:
            turn = Turn()
            for each, contribution in members:
                await turn.spend(_ADDITION)
                await total.add_of(each, contribution)
                await total.finish()
        except BaseException:
            total.drop()
            raise
        async for each, contribution in InTurns(members):
            event = UpdateAnswered(
                None,
                contribution,
                Outcome.ACCEPTED,
                at=ledger.now,
                weight_asked=contribution.weight,
                num_bytes=each.nbytes,
            )
            await self._changes.record(event)
            ledger.answer(event)

    def _release(self, load_id: str) -> None:
        _, memory = self._held.pop(load_id, (None, None))
        if memory is not None:
            memory.settle(0)


def _copy_of(loaded: Loaded) -> Loaded:
    values = {name: np.copy(array) for name, array in loaded.values.items()}
    if loaded.state is None:
        return replace(loaded, values=values)
    slots = {
        slot: {name: np.copy(array) for name, array in arrays.items()} for slot, arrays in loaded.state.slots.items()
    }
    return replace(loaded, values=values, state=replace(loaded.state, slots=slots))
