"""The journals of an accumulator and of its shard in a state directory."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from gradserve_server.accumulators.durable.serialization import average_record, joined, split
from gradserve_server.accumulators.events import Event, GradientAnswered, StepSet, contribution_record, to_record
from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import PartKey, Staged
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import Change, Space, StateStore


class FileShardJournal:
    """The journal of a shard. Writes each gradient before it is acknowledged, as the home may count it from then on."""

    def __init__(self, store: StateStore, number: int) -> None:
        self._store = store
        self._number = number
        self._blobs: dict[PartKey, int] = {}
        self._ended = False

    async def accept(self, key: PartKey, staged: Staged, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient; the future is done once it is on disk."""
        space = await self._store.reserve(gradient.nbytes)
        change = Change()
        if self._ended or key in self._blobs:
            change.give_back(space)
            self._store.add(change)
            return None
        blob = self._blobs[key] = self._store.new_blob()
        layout, arrays = split(dict(gradient.values))
        change.put(blob, arrays, space, live=gradient.live)
        change.execute(
            "INSERT INTO part (accumulator, home, id, epoch, local_step, names, blob) VALUES (?, ?, ?, ?, ?, ?, ?)",
            self._number,
            *key,
            *staged,
            json.dumps(layout),
            blob,
        )
        return self._store.submit(change)

    def stage_again(self, key: PartKey, epoch: int) -> asyncio.Future[None] | None:
        """Writes the later epoch of a gradient that was staged again."""
        if self._ended or key not in self._blobs:
            return None
        change = Change()
        change.execute(
            "UPDATE part SET epoch = ? WHERE accumulator = ? AND home = ? AND id = ?", epoch, self._number, *key
        )
        return self._store.submit(change)

    def forget(self, keys: Collection[PartKey]) -> None:
        """Removes gradients that no round needs any more."""
        known = [key for key in dict.fromkeys(keys) if key in self._blobs]
        if not known or self._ended:
            return
        change = Change()
        for key in known:
            change.execute("DELETE FROM part WHERE accumulator = ? AND home = ? AND id = ?", self._number, *key)
        change.remove([self._blobs.pop(key) for key in known])
        self._store.add(change)

    def end(self) -> list[int]:
        """Stops writing, as the accumulator was deleted; returns the blobs to remove."""
        self._ended = True
        blobs, self._blobs = list(self._blobs.values()), {}
        return blobs

    def read(self, allocate: Allocate) -> Iterator[tuple[PartKey, Staged, Gradient]]:
        """Yields the gradients held by an earlier run of the server, with their descriptions.

        Raises:
            StateError: Something is damaged.
            ValueError, TypeError, KeyError: A record is damaged.
        """
        rows = self._store.rows(
            "SELECT home, id, epoch, local_step, names, blob FROM part WHERE accumulator = ? ORDER BY blob",
            self._number,
        )
        for home, part_id, epoch, local_step, names, blob in rows:
            key = PartKey(home, part_id)
            self._blobs[key] = blob
            values = joined(json.loads(names), self._store.read(blob, allocate))
            yield key, Staged(epoch, local_step), Gradient(values, owned=True, finite=frozenset(values))


_MAX_PENDING = 4096
"""The most events that wait for the end of their round, at level GRADIENT."""


class FileJournal:
    """The journal of an accumulator. Writes what its durability asks for, and no earlier than necessary.

    With ROUND, the events of a round are written when it ends, together with its average: a crash before that leaves
    nothing of its gradients, so their senders can send them again. With GRADIENT, each gradient is written at once.
    """

    is_durable = True

    def __init__(
        self,
        store: StateStore,
        number: int,
        durability: Durability,
        *,
        position: int = 0,
        gradients: Sequence[int] = (),
        averages: dict[int, int] | None = None,
        on_round: Callable[["FileJournal"], None] = lambda _: None,
    ) -> None:
        """Takes the present contents of the state directory.

        Args:
            store: The state directory.
            number: The number of the accumulator there.
            durability: Its durability; not NONE.
            position: The position of its latest event.
            gradients: The blobs of the gradients of the current round.
            averages: The blobs of the averages, by round.
            on_round: Called when the end of a round is on disk.
        """
        self.number = number
        self.position = position
        self.num_events = 0
        """The events written since `on_round` last wrote the ledger."""
        self._store = store
        self._durability = durability
        self._pending: list[tuple[int, Event]] = []
        """The events that are not written yet, with their positions."""
        self._gradients = list(gradients)
        self._averages = dict(averages or {})
        self._space: Space | None = None
        self._on_round = on_round
        self._ended = False
        self.shard = FileShardJournal(store, number)
        """The journal of this server's shard, if the accumulator is sharded."""

    async def append(self, event: Event) -> None:
        """Queues an event for the next write; a new step is on disk when this returns."""
        if self._ended:
            return
        position = self._next_position()
        if isinstance(event, StepSet):
            # Together with the averages that it drops: a crash leaves both or neither.
            change = Change()
            self._execute(change, position, event)
            dropped = self._take(event.abandoned)
            self._remove(change, dropped)
            try:
                await self._store.commit(change)
            except BaseException:
                self._averages |= dropped
                raise
            return
        self._pending.append((position, event))
        if len(self._pending) > _MAX_PENDING and self._durability is Durability.GRADIENT:
            self._store.add(self._change())

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient with its event, at level GRADIENT; otherwise queues the event alone."""
        if self._durability is not Durability.GRADIENT:
            await self.append(event)
            return None
        space = await self._store.reserve(gradient.nbytes)
        if self._ended:
            _give_back(self._store, space)
            return None
        change, position = self._change(), self._next_position()
        self._execute(change, position, event)
        blob = self._store.new_blob()
        layout, arrays = split(dict(gradient.values))
        change.put(blob, arrays, space, live=gradient.live)
        change.execute(
            "INSERT INTO gradient (accumulator, position, contribution, names, blob) VALUES (?, ?, ?, ?, ?)",
            self.number,
            position,
            json.dumps(contribution_record(event.contribution)),
            json.dumps(layout),
            blob,
        )
        self._gradients.append(blob)
        return self._store.submit(change)

    async def reserve(self, num_bytes: int) -> None:
        """Reserves disk space for the average of a round that is about to end."""
        space = await self._store.reserve(num_bytes)
        if self._ended:
            _give_back(self._store, space)  # the accumulator was deleted in the meantime
            return
        self._give_back_space()  # of a round that did not end
        self._space = space

    async def settle(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Writes an average with all queued events, in place of the gradients of its round."""
        if self._ended:
            return
        change = self._change()
        blob = self._store.new_blob()
        layout, arrays = split(dict(average.values))
        space, self._space = self._space, None
        change.put(blob, arrays, space)
        change.execute(
            "INSERT INTO average (accumulator, round, record, names, blob) VALUES (?, ?, ?, ?, ?)",
            self.number,
            average.round_number,
            json.dumps(average_record(average, list(answered))),
            json.dumps(layout),
            blob,
        )
        change.execute("DELETE FROM gradient WHERE accumulator = ?", self.number)
        change.remove(self._gradients)
        self._gradients = []
        self._averages[average.round_number] = blob
        await self._store.commit(change)
        self._on_round(self)

    def forget(self, rounds: Collection[int]) -> None:
        """Removes the averages of rounds."""
        known = self._take(rounds)
        if not known or self._ended:
            return
        change = Change()
        self._remove(change, known)
        self._store.add(change)

    def of_shard(self) -> FileShardJournal:
        """Returns the journal of this server's shard."""
        return self.shard

    def end(self) -> None:
        """Removes everything of a deleted accumulator."""
        self._ended = True
        self._give_back_space()
        change = Change()
        change.execute("DELETE FROM accumulator WHERE id = ?", self.number)
        change.remove([*self._gradients, *self._averages.values(), *self.shard.end()])
        self._gradients, self._averages, self._pending = [], {}, []
        self._store.add(change)

    def _take(self, rounds: Collection[int]) -> dict[int, int]:
        """Returns the blobs of the averages of rounds, and forgets them."""
        return {number: self._averages.pop(number) for number in rounds if number in self._averages}

    def _remove(self, change: Change, averages: Mapping[int, int]) -> None:
        """Adds the removal of averages to a change."""
        for number in averages:
            change.execute("DELETE FROM average WHERE accumulator = ? AND round = ?", self.number, number)
        change.remove(averages.values())

    def _give_back_space(self) -> None:
        space, self._space = self._space, None
        if space is not None:
            _give_back(self._store, space)

    def _change(self) -> Change:
        """Returns a change with the queued events."""
        change = Change()
        pending, self._pending = self._pending, []
        for position, event in pending:
            self._execute(change, position, event)
        return change

    def _next_position(self) -> int:
        """Returns the position of the next event, which may be written before earlier ones."""
        self.position += 1
        return self.position

    def _execute(self, change: Change, position: int, event: Event) -> None:
        self.num_events += 1
        change.execute(
            "INSERT INTO event (accumulator, position, record) VALUES (?, ?, ?)",
            self.number,
            position,
            json.dumps(to_record(event)),
        )


def _give_back(store: StateStore, space: Space) -> None:
    change = Change()
    change.give_back(space)
    store.add(change)
